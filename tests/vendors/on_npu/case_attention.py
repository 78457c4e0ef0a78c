"""Attention through CANN's operator as the emulation does it: what it computes, and graphs whose lengths are rebound."""

import emulation
import pytest
import torch
import torch_npu

from outrider.device import AttentionMetadata, CapabilityError, HostParam, KernelSet
from outrider_sanitizer import watch

PAGE, HEADS, KV_HEADS, SIZE = 128, 4, 2, 64
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def backend():
    made = emulation.make()
    made.control.reset()
    yield made
    made.control.reset()  # drains; a device that a test lost lives again


@pytest.fixture
def stream(backend):
    return backend.create_stream("s")


def batch(new, context, dtype, *, tree=False, padding=0, seed=0, spare=0):
    """Host operands of sequences with ``new`` tokens behind ``context`` cached ones. What is ``spare`` tokens behind a
    sequence, and further, is NaN.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens, count = sum(new) + padding, len(new)
    lens = [n + c for n, c in zip(new, context, strict=True)]
    width = max(2, max((length + PAGE - 1) // PAGE for length in lens))
    table = (torch.randperm(count * width, generator=draw) + 1).view(count, width).to(torch.int32)
    mask = None
    if tree:
        lane = torch.arange(max(new))
        mask = ((lane[:, None] - lane) % 2 == 0) & (lane[:, None] >= lane) | (lane == 0)
        mask = mask.repeat(count, 1)
    pages = {name: torch.randn(1 + count * width, PAGE, KV_HEADS, SIZE, generator=draw).to(dtype) for name in "kv"}
    kept = torch.zeros(1 + count * width, PAGE, dtype=torch.bool)
    for row, length in zip(table.tolist(), lens, strict=True):
        for place in range(spare + length):
            kept[row[place // PAGE], place % PAGE] = True
    for cache in pages.values():
        cache[~kept] = torch.nan
    return pages | {
        "q": torch.randn(tokens, HEADS, SIZE, generator=draw).to(dtype),
        "start": torch.tensor([sum(new[:i]) for i in range(count + 1)], dtype=torch.int32),
        "lens": torch.tensor(lens, dtype=torch.int32),
        "table": table,
        "mask": mask,
    }


def metadata(o, new, *, exact, uniform):
    return AttentionMetadata(
        query_start=o["start"],
        seq_lens=o["lens"],
        block_table=o["table"],
        max_query=max(new),
        max_kv=int(o["table"].shape[1]) * PAGE,
        tree_mask=o["mask"],
        uniform=uniform,
        seq_lens_host=exact,
    )


def attend(kernels, o, new, *, exact=None, uniform=False, window=0):
    told = metadata(o, new, exact=exact, uniform=uniform)
    return kernels.paged_attention(o["q"], o["k"], o["v"], told, scale=0.2, window=window)


def upload(backend, stream, o):
    with backend.on(stream):
        made = {name: None if tensor is None else tensor.to(backend.device) for name, tensor in o.items()}
    stream.synchronize()
    return made


def reference(o, new, window=0):
    wide = {name: t.double() if t is not None and t.is_floating_point() else t for name, t in o.items()}
    return attend(KernelSet(), wide, new, window=window)[: sum(new)]


CASES = {
    # name: (new tokens, cached before, options of the batch, window, whether it's known to be uniform, sparse mode)
    "one token each": ((1, 1, 1), (5, 200, 130), {}, 0, True, 0),
    "a chain": ((4, 4, 4), (0, 7, 250), {}, 0, True, 3),
    "a chain in a batch of any shape": ((4, 4), (60, 127), {}, 0, False, 1),
    "a tree": ((5, 5), (3, 124), {"tree": True}, 0, True, 1),
    "a window": ((3, 3), (40, 126), {}, 9, True, 1),
    "a ragged prompt": ((7, 1, 20), (0, 30, 120), {}, 0, False, 1),
    "padding": ((3, 2), (10, 126), {"padding": 3}, 0, False, 1),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_equals_the_reference(backend, stream, fused_calls, case, dtype):
    new, context, options, window, uniform, mode = case
    host = batch(new, context, dtype, **options)
    o = upload(backend, stream, host)
    exact = HostParam("lens", host["lens"].tolist())
    assert backend.kernels.unfused(o["q"], o["k"], metadata(o, new, exact=exact, uniform=uniform)) == ""
    backend.delay(stream, 100_000)
    with backend.on(stream):
        out = attend(backend.kernels, o, new, exact=exact, uniform=uniform, window=window)
    stream.synchronize()
    off = (out.cpu()[: sum(new)].double() - reference(host, new, window)).abs().max()
    assert off < TOLERANCE[dtype], off
    assert fused_calls == [(mode, host["lens"].tolist())]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda o: o | {"exact": None}, "lengths aren't known on the host"),
        (lambda o: o | {"q": o["q"].float(), "k": o["k"].float(), "v": o["v"].float()}, "float16 and bfloat16"),
        (lambda o: o | {name: o[name][..., :24].contiguous() for name in "qkv"}, "head size of 24"),
        (lambda o: o | {name: o[name].view(-1, 64, KV_HEADS, SIZE) for name in "kv"}, "pages of 64"),
    ],
    ids=["lengths", "dtype", "head size", "page size"],
)
def test_what_the_operator_can_not_do_is_computed_by_the_reference(backend, stream, fused_calls, change, says):
    new = (2, 2)
    host = change({"exact": HostParam("lens", [5, 11])} | batch(new, (3, 9), torch.float16))
    exact = host.pop("exact")
    o = upload(backend, stream, {name: t.nan_to_num(0.0) if name in ("k", "v") else t for name, t in host.items()})
    o["table"] = o["table"][:, :1].contiguous()
    told = metadata(o, new, exact=exact, uniform=False)
    assert says in backend.kernels.unfused(o["q"], o["k"], told)
    with backend.on(stream):
        out = backend.kernels.paged_attention(o["q"], o["k"], o["v"], told, scale=0.2)
    stream.synchronize()
    assert fused_calls == []
    assert out.cpu().isfinite().all()


def shared(host, pages):
    """The batch with every sequence's first page the same one, and its other pages put together: fewer than its blocks."""
    table = host["table"].clone()
    order = {0: 0, int(table[0, 0]): 1}
    table[:, 0] = table[0, 0]
    for page in table.flatten().tolist():
        order.setdefault(page, len(order))
    assert len(order) <= pages
    kept = list(order)[:pages] + [0] * (pages - len(order))
    made = {name: host[name][torch.tensor(kept)].clone() for name in "kv"}
    return host | made | {"table": torch.tensor([[order[page] for page in row] for row in table.tolist()], dtype=torch.int32)}


@pytest.mark.parametrize("new", [(1, 1, 1, 1), (4, 4, 4, 4), (7, 1, 4, 2)], ids=["decoding", "a chain", "ragged"])
def test_sequences_that_share_pages_are_attended_to_in_parts(backend, stream, fused_calls, new):
    """The operator counts a page for each sequence that has it, and takes no more than the cache has."""
    host = shared(batch(new, (200, 210, 130, 220), torch.float16), pages=6)
    o = upload(backend, stream, host)
    exact = HostParam("lens", host["lens"].tolist())
    with backend.on(stream):
        out = attend(backend.kernels, o, new, exact=exact, uniform=len(set(new)) == 1)
    stream.synchronize()
    assert (out.cpu().double() - reference(host, new)).abs().max() < TOLERANCE[torch.float16]
    assert [lens for _, lens in fused_calls] == [host["lens"].tolist()[:3], host["lens"].tolist()[3:]]


def test_a_graph_of_sequences_that_share_pages_takes_any_lengths(backend, stream):
    new = (3, 3, 3)
    host = shared(batch(new, (1, 1, 1), torch.float16, spare=250), pages=5)
    graph = captured(backend, stream, host, new)
    assert len(graph.context.handles["lens"]) == 2
    for lens in ([4, 130, 250], [200, 240, 250]):
        graph.update_params({"lens": lens}, stream=stream)
        graph.replay(stream)
        stream.synchronize()
        off = (graph.outputs["0"].cpu().double() - reference(at(host, lens), new)).abs().max()
        assert off < TOLERANCE[torch.float16]


def captured(backend, stream, host, new, *, layers=1):
    """A graph of attention, the lengths a host parameter; returns it and its static tensors."""
    o = upload(backend, stream, host)
    with backend.on(stream):
        outputs = {str(i): torch.zeros_like(o["q"]) for i in range(layers)}
    stream.synchronize()

    def fn(context):
        for i in range(layers):
            context.outputs[str(i)].copy_(
                attend(
                    backend.kernels, dict(context.inputs) | {"mask": None}, new, exact=context.params["lens"], uniform=True
                )
            )

    inputs = {name: tensor for name, tensor in o.items() if tensor is not None}
    return backend.capture(
        "attention", fn, stream=stream, inputs=inputs, outputs=outputs, params={"lens": host["lens"].tolist()}
    )


NEW = (3, 3)
LENGTHS = ([4, 130], [90, 131], [128, 250])


def at(host, lens):
    return host | {"lens": torch.tensor(lens, dtype=torch.int32)}


def close(found, host, lens):
    return (found.double() - reference(at(host, lens), NEW)).abs().max() < TOLERANCE[torch.float16]


def test_a_graph_follows_its_rebound_lengths(backend, stream):
    """Each layer has a task group of its own; all are rebound."""
    host = batch(NEW, (1, 1), torch.float16, spare=249)
    graph = captured(backend, stream, host, NEW, layers=3)
    assert len(graph.context.handles["lens"]) == 3
    for lens in LENGTHS:
        graph.update_params({"lens": lens}, stream=stream)
        graph.replay(stream)
        stream.synchronize()
        assert all(close(out.cpu(), host, lens) for out in graph.outputs.values()), lens


def test_a_missing_rebind_shows(backend, stream):
    """The lengths on the device alone don't move the graph: on this device the host's count."""
    host = batch(NEW, (1, 1), torch.float16, spare=249)
    graph = captured(backend, stream, host, NEW)
    with backend.on(stream):
        graph.inputs["lens"].copy_(torch.tensor(LENGTHS[2], dtype=torch.int32).to(backend.device))
    graph.replay(stream)
    stream.synchronize()
    assert not close(graph.outputs["0"].cpu(), host, LENGTHS[2])


def rebinding(backend, *, free, bound):
    """Three replays, each rebound on a stream of its own while the host runs ahead; ``free`` and ``bound``: the fences."""
    forward, update = backend.create_stream("forward"), backend.create_stream("update")
    host = batch(NEW, (1, 1), torch.float16, spare=249)
    graph = captured(backend, forward, host, NEW)
    backend.synchronize()
    params_free, params_bound = backend.create_event("params free"), backend.create_event("params bound")
    kept = []
    forward.record(params_free)
    for lens in LENGTHS:
        if free:
            update.wait(params_free)
        graph.update_params({"lens": lens}, stream=update)
        update.record(params_bound)
        if bound:
            forward.wait(params_bound)
        graph.replay(forward)
        forward.record(params_free)
        with backend.on(forward):
            kept.append(graph.outputs["0"].clone())
    backend.synchronize()
    for lens, out in zip(LENGTHS, kept, strict=True):
        assert close(out.cpu(), host, lens), lens


def test_launch_ahead_is_right_in_every_order(backend):
    """The host waits for nothing: both fences are waits of streams."""
    found = backend.control.explore(lambda b: rebinding(b, free=True, bound=True), strategy="mixed", iterations=12, seed=0)
    assert found.failure is None, found.failure


@pytest.mark.parametrize("missing", ["free", "bound"])
def test_a_missing_fence_around_a_rebind_is_caught(backend, missing):
    fences = {"free": True, "bound": True} | {missing: False}
    found = backend.control.explore(lambda b: rebinding(b, **fences), strategy="mixed", iterations=40, seed=0)
    assert found.failure is not None
    assert isinstance(found.failure.error, AssertionError)
    print(missing, found.failure.run, found.failure.shrunk, *found.failure.orderings, sep="\n  ")
    assert any("update" in sentence for sentence in found.failure.orderings)


@pytest.mark.parametrize("missing", ["free", "bound", None])
def test_the_sanitizer_names_a_missing_fence_around_a_rebind(backend, missing):
    """In one run, in the order of the program, where nothing goes wrong."""
    fences = {"free": True, "bound": True} | ({missing: False} if missing else {})
    with watch(backend) as report:
        rebinding(backend, **fences)
    found = [str(finding) for finding in report.findings]
    if missing is None:
        assert found == []
    else:
        assert any("rebinding of graph 'attention'" in text for text in found), found


def test_workspaces_are_shared_by_layers_and_live_with_the_graph(backend, stream, monkeypatch):
    made = []
    ask = torch_npu._npu_fused_infer_attention_score_get_max_workspace
    monkeypatch.setattr(
        torch_npu,
        "_npu_fused_infer_attention_score_get_max_workspace",
        lambda *args, **kwargs: made.append(1) or ask(*args, **kwargs),
    )
    host = batch(NEW, (1, 1), torch.float16, spare=249)
    graph = captured(backend, stream, host, NEW, layers=3)
    assert len(made) == 1
    (kept,) = (value for key, value in graph.context.handles.items() if key.startswith("workspace"))
    assert len(kept) == 1
    stream.synchronize()


def test_a_parameter_that_no_operation_reads_is_not_rebound_in_silence(backend, stream):
    with backend.on(stream):
        x = torch.ones(4, device=backend.device)
    stream.synchronize()

    def fn(context):
        context.outputs["x"].mul_(context.params["n"].value[0])  # read behind the capture's back: frozen

    graph = backend.capture("frozen", fn, stream=stream, inputs={}, outputs={"x": x}, params={"n": [2]})
    with pytest.raises(CapabilityError, match=r"no captured operation was issued under \['n'\]"):
        graph.update_params({"n": [3]}, stream=stream)


def test_a_group_takes_one_operation(backend, stream):
    """CANN's limit: a kernel that enqueues two in one reissue is refused when it's captured."""
    with backend.on(stream):
        x = torch.ones(4, device=backend.device)
    stream.synchronize()

    def fn(context):
        def issue(values):
            x.mul_(values[0])
            x.add_(values[0])

        backend.reissue(context.params["n"], issue)

    with pytest.raises(Exception, match="2 tasks in a group"):
        backend.capture("two", fn, stream=stream, inputs={}, outputs={"x": x}, params={"n": [2]})
    with backend.on(stream):
        assert (x + 1).cpu().isfinite().all()  # the stream isn't captured any more
