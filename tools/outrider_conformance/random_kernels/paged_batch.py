"""Sequences with a KV cache in pages, for tests of attention as the engine calls it: planned, and in graphs.

Further checks find out whether the backend's own attention answers the calls of a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device import (
    QUANTIZED_FORMATS,
    AttentionBlock,
    AttentionMetadata,
    AttentionShape,
    AttentionTokens,
    Backend,
    CaptureContext,
    HostParam,
    KernelSet,
    LayerRows,
    QuantizedWeight,
    ResidualStream,
    RotaryArgs,
    Stream,
    Weight,
)
from outrider_conformance.kernel_calls import counts_of
from outrider_conformance.lab import Lab
from outrider_conformance.random_kernels.problem import same_bits
from outrider_conformance.reporting.verdict import not_applicable

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 64
SCALE = 0.125
_GROWTHS = (0, 17, 40, 0)
"""Tokens by which the sequences of a batch are longer than at first, in one call after the other."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_LENGTHS = "lengths"
_EPS = 1e-5

Operands = Mapping[str, Tensor]


class PagedBatch:
    """Operands of sequences that may grow by ``room`` tokens. Keys and values after that, and in page 0, are NaN.

    ``new`` and ``context`` are each sequence's new tokens and cached tokens before them, ``padding`` the rows after all
    sequences. ``decoding``: the number of sequences in the first of two parts, which have equally many new tokens; 0: the
    batch isn't divided.
    """

    def __init__(
        self,
        lab: Lab,
        stream: Stream,
        new: Sequence[int],
        context: Sequence[int],
        *,
        dtype: torch.dtype,
        page_size: int = 16,
        room: int = 0,
        tree: bool = False,
        window: int = 0,
        padding: int = 0,
        decoding: int = 0,
    ) -> None:
        self.lab, self.stream, self.new, self.window, self.decoding = lab, stream, tuple(new), window, decoding
        self.dtype, self.page_size, self.uniform = dtype, page_size, len(set(new)) == 1 and not padding
        draw = torch.Generator().manual_seed(11)
        lengths = torch.tensor(self.lengths(context), dtype=torch.int32)
        columns = max(2, -(-(int(lengths.max()) + room) // page_size))
        self.max_kv = columns * page_size
        pages = 1 + len(new) * columns
        table = (torch.randperm(pages - 1, generator=draw) + 1).view(len(new), columns)
        used = torch.zeros(pages, page_size, dtype=torch.bool)
        used[table] = (lengths.unsqueeze(1) + room > torch.arange(self.max_kv)).view(len(new), columns, page_size)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(self.dtype)

        caches = [normal(pages, page_size, KV_HEADS, HEAD_SIZE).masked_fill(~used[..., None, None], torch.nan) for _ in "kv"]
        self.starts = tuple(sum(new[:index]) for index in range(len(new) + 1))
        self.host: dict[str, Tensor] = {
            "q": normal(sum(new) + padding, HEADS, HEAD_SIZE),
            "k_cache": caches[0],
            "v_cache": caches[1],
            "query_start": torch.tensor(self.starts, dtype=torch.int32),
            "seq_lens": lengths,
            "block_table": table.to(torch.int32),
        }
        if tree:
            lane = torch.arange(max(new))
            branches = ((lane[:, None] - lane) % 2 == 0) & (lane[:, None] >= lane) | (lane == 0)
            self.host["tree_mask"] = branches.repeat(len(new), 1)
        if decoding:
            self.host["rest_start"] = self.host["query_start"][decoding:] - self.starts[decoding]
        self.made = lab.upload(stream, self.host)
        self.plan: object | None = None
        self.contexts: Sequence[Sequence[int]] = [context]
        """The cached tokens of each sequence, in one call after the other."""

    @property
    def needs_host_lengths(self) -> bool:
        """True if the device's attention takes lengths as host integers."""
        return self.lab.backend.speculative_sync.exact_host_lengths

    def lengths(self, context: Sequence[int]) -> list[int]:
        """Return the length of each sequence, including its new tokens."""
        return [n + c for n, c in zip(self.new, context, strict=True)]

    def metadata(self, o: Operands, context: Sequence[int] | None = None) -> AttentionMetadata:
        """Return the metadata of the operands ``o``, with host lengths if ``context`` is given."""
        whole = AttentionMetadata(
            query_start=o["query_start"],
            seq_lens=o["seq_lens"],
            block_table=o["block_table"],
            max_query=max(self.new),
            max_kv=self.max_kv,
            tree_mask=o.get("tree_mask"),
            uniform=self.uniform,
            seq_lens_host=None if context is None else HostParam(_LENGTHS, self.lengths(context)),
        )
        if not self.decoding or context is not None:  # the engine divides no batch with host lengths
            return whole
        count, tokens = self.decoding, self.starts[self.decoding]
        drafts = replace(
            whole,
            query_start=whole.query_start[: count + 1],
            seq_lens=whole.seq_lens[:count],
            block_table=whole.block_table[:count],
            max_query=self.new[0],
            uniform=True,
        )
        rest = replace(
            whole,
            query_start=o["rest_start"],
            seq_lens=whole.seq_lens[count:],
            block_table=whole.block_table[count:],
            max_query=max(self.new[count:]),
        )
        return replace(whole, parts=((tokens, drafts), (o["q"].shape[0] - tokens, rest)))

    def grown(self, context: Sequence[int]) -> AttentionMetadata:
        """Copy the lengths for ``context`` to the device on the stream, and return the metadata of the batch; with host
        lengths if the device's attention takes lengths as host integers.
        """
        with self.lab.backend.on(self.stream):
            self.made["seq_lens"].copy_(torch.tensor(self.lengths(context), dtype=torch.int32))
        return self.metadata(self.made, context if self.needs_host_lengths else None)

    def planned(self, context: Sequence[int]) -> AttentionMetadata:
        """Copy the lengths to the device, and make a plan for them or renew the existing plan."""
        backend, stream = self.lab.backend, self.stream
        shape = AttentionShape(
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            page_size=self.page_size,
            dtype=self.dtype,
            scale=SCALE,
            window=self.window,
        )
        self.grown(context)
        batch = replace(self.metadata(self.made, context), host_query_start=self.starts, shapes=(shape,), plan=self.plan)
        with backend.on(stream):
            planned = backend.kernels_in_use.plan_attention(batch, stream=stream)
        self.plan = planned.plan
        return planned

    def attend(self, metadata: AttentionMetadata, o: Operands | None = None, kernels: KernelSet | None = None) -> Tensor:
        """Enqueue attention of the backend's kernels, or of ``kernels``, and return the rows without padding."""
        o, kernels = o or self.made, kernels or self.lab.backend.kernels_in_use
        out = kernels.paged_attention(o["q"], o["k_cache"], o["v_cache"], metadata, scale=SCALE, window=self.window)
        return out[: sum(self.new)]

    def check(self, found: Tensor, context: Sequence[int], how: str) -> None:
        """Fail unless ``found`` equals attention of the reference kernels on the host, in float64, within the tolerance of
        the dtype.

        ``context``: cached tokens of each sequence before its new ones. ``how`` describes the call in the message.
        """
        wide = {name: x.double() if x.is_floating_point() else x for name, x in self.host.items()}
        wide["seq_lens"] = torch.tensor(self.lengths(context), dtype=torch.int32)
        wanted = self.attend(self.metadata(wide), wide, KernelSet())
        off = float((found.cpu().double() - wanted).abs().nan_to_num(nan=float("inf")).max())
        where = f"attention in {self.dtype}, pages of {self.page_size}, {how}"
        assert off <= _TOLERANCE[self.dtype], f"{where}: off by {off:.3g}"

    def check_call(self, metadata: AttentionMetadata, context: Sequence[int], how: str) -> None:
        """Enqueue attention on the stream, wait for the stream, and check the result."""
        with self.lab.backend.on(self.stream):
            out = self.attend(metadata)
        self.stream.synchronize()
        self.check(out, context, how)

    def check_bits(self, kernels: KernelSet) -> None:
        """Check that attention of each sequence alone has the bits that it has in the batch."""
        with self.lab.backend.on(self.stream):
            found = [self.attend(self.metadata(self.made), kernels=kernels)]
            for row, (first, end) in enumerate(itertools.pairwise(self.starts)):
                own = {name: self.made[name][row : row + 1].clone() for name in ("seq_lens", "block_table")}
                own |= {"query_start": torch.tensor([0, end - first], dtype=torch.int32, device=self.made["q"].device)}
                own = {**self.made, **own, "q": self.made["q"][first:end].clone()}
                alone = replace(self.metadata(own), max_query=end - first, uniform=True)
                found.append(kernels.paged_attention(own["q"], own["k_cache"], own["v_cache"], alone, scale=SCALE))
        self.stream.synchronize()
        batch, *sequences = (each.cpu() for each in found)
        for row, (first, end) in enumerate(itertools.pairwise(self.starts)):
            assert same_bits(sequences[row], batch[first:end]), (
                f"attention of {kernels.name!r}: sequence {row} has other bits without the other sequences of the batch; "
                "compute each row by sums of one order, or declare row_invariant = False"
            )

    def check_graph(self, *, plans: bool) -> None:
        """Capture attention for the first of ``contexts``, and replay it for each: rebind host lengths, and renew the plan
        if ``plans``, before each replay.
        """
        contexts = self.contexts
        backend, stream = self.lab.backend, self.stream
        follow = self.planned if plans else self.grown
        metadata = follow(contexts[0])
        with backend.on(stream):
            outputs = {"out": torch.zeros_like(self.made["q"][: sum(self.new)])}
        stream.synchronize()

        def fn(context: CaptureContext) -> None:
            own = replace(metadata, seq_lens_host=context.params[_LENGTHS]) if self.needs_host_lengths else metadata
            context.outputs["out"].copy_(self.attend(own))

        params = {_LENGTHS: self.lengths(contexts[0])} if self.needs_host_lengths else None
        graph = backend.capture("attention", fn, stream=stream, inputs=self.made, outputs=outputs, params=params)
        for context in contexts:
            follow(context)
            if self.needs_host_lengths:
                graph.update_params({_LENGTHS: self.lengths(context)}, stream=stream)
            graph.replay(stream)
            stream.synchronize()
            self.check(outputs["out"], context, f"in a graph, with {context} cached tokens")


class BatchShape(NamedTuple):
    """The lengths of a batch of sequences, and the kind of its attention, as arguments of :class:`PagedBatch`."""

    new: tuple[int, ...]
    pages: tuple[float, ...]
    """Cached tokens of each sequence before the new ones, in pages: lengths lie around a page's end for any page size."""
    tree: bool = False
    window: int = 0
    padding: int = 0
    decoding: int = 0
    """Number of sequences in the first of two parts, see :class:`PagedBatch`."""


SHAPES: Mapping[str, BatchShape] = MappingProxyType(
    {
        "decoding": BatchShape((1, 1, 1), (0.1, 1.0, 1.5)),
        "a chain": BatchShape((4, 4, 4), (0.0, 0.99, 1.9)),
        "a tree": BatchShape((5, 5), (0.5, 1.0), tree=True),
        "a window": BatchShape((3, 3), (0.3, 1.2), window=9),
        "a ragged prompt": BatchShape((7, 1, 20), (0.0, 0.25, 1.0)),
        "padding": BatchShape((3, 2), (0.1, 1.0), padding=3),
        "a mixed batch": BatchShape((4, 4, 70, 20), (0.5, 1.9, 0.0, 1.0), padding=3, decoding=2),
    }
)


def paged_batch(lab: Lab, shape: str, dtype: torch.dtype | None = None) -> PagedBatch:
    """Return a batch of :data:`SHAPES` on a new stream, with the preferred page size, and ``dtype`` or the first preferred
    dtype. Its contexts grow and shrink.
    """
    new, pages, tree, window, padding, decoding = SHAPES[shape]
    size = lab.backend.capabilities.page_size
    context = [int(count * size) for count in pages]
    (stream,) = lab.streams("s")
    room = max(_GROWTHS) + 1  # a second pass of a graph has one token more
    dtype = dtype or preferred_dtypes(lab.backend)[0]
    batch = PagedBatch(
        lab,
        stream,
        new,
        context,
        dtype=dtype,
        page_size=size,
        room=room,
        tree=tree,
        window=window,
        padding=padding,
        decoding=decoding,
    )
    batch.contexts = [[tokens + more for tokens in context] for more in _GROWTHS]
    return batch


def preferred_dtypes(backend: Backend) -> tuple[torch.dtype, ...]:
    """Return the preferred dtypes of the backend, or all declared dtypes if it prefers none."""
    has = backend.capabilities
    return has.preferred_dtypes or tuple(sorted(has.dtypes, key=str))


def check_renewed(batch: PagedBatch) -> None:
    """Check attention with one plan for all contexts of the batch."""
    for context in batch.contexts:
        batch.check_call(batch.planned(context), context, f"planned for {context} cached tokens")


def check_unplanned(lab: Lab) -> None:
    """Call ``plan_attention`` without shapes on a new stream; attention must work with the returned metadata."""
    batch, (plan,) = paged_batch(lab, "decoding"), lab.streams("plan")
    context = batch.contexts[0]
    batch.grown(context)
    plan.wait(lab.record(batch.stream, "lengths"))
    with lab.backend.on(plan):
        planned = lab.backend.kernels_in_use.plan_attention(batch.metadata(batch.made), stream=plan)
    assert isinstance(planned, AttentionMetadata), f"plan_attention returned a {type(planned).__name__}"
    batch.stream.wait(lab.record(plan, "planned"))
    batch.check_call(planned, context, "without a plan")


def check_block(lab: Lab, shape: str, *, quantized: bool) -> None:
    """Fail if the attention block of a layer doesn't call the kernel set that has attention of its own. ``quantized``: the
    weights of the block are quantised.
    """
    backend, kernels = lab.backend, lab.backend.kernels_in_use
    formats = sorted(backend.capabilities.quantized_formats)
    if quantized and not formats:
        not_applicable("no format of quantised weights is declared")
    calls = counts_of(kernels)
    overriding = calls.overriding_layer("paged_attention")
    if overriding is None:
        not_applicable("attention is the reference's")
    own, _ = overriding
    batch = paged_batch(lab, shape)
    dtype = batch.dtype
    hidden, tokens = HEADS * HEAD_SIZE, batch.made["q"].shape[0]
    metadata = batch.grown(batch.contexts[0])

    def weight(rows: int) -> Weight:
        if quantized:
            return _ones(formats[0], rows, hidden, backend.device)
        # Not one number: a backend may find weights that are exact in a quantised format, and compute the block with these.
        numbers = torch.linspace(0.5, 1.0, rows * hidden, dtype=dtype, device=backend.device)
        return numbers.view(rows, hidden) / hidden

    def attention_calls() -> int:
        """Return how often the kernel set computed attention, alone and in attention blocks of its own."""
        alone = calls.count("paged_attention", kernels=own)
        return alone + calls.count("attention_block", kernels=own, own=True)

    with backend.on(batch.stream):
        norm = torch.ones(hidden, dtype=dtype, device=backend.device)
        block = AttentionBlock(
            norm=norm, eps=_EPS, qkv=weight(2 * hidden), output=weight(hidden), scale=SCALE, window=batch.window
        )
        ones = torch.ones(tokens, HEAD_SIZE, dtype=dtype, device=backend.device)
        slots = torch.arange(tokens, device=backend.device)
        rotary = RotaryArgs(ones, ones, batch.made["k_cache"], batch.made["v_cache"], slots)
        before = attention_calls()
        x = ResidualStream(kernels, torch.zeros(tokens, hidden, dtype=dtype, device=backend.device))
        rows = AttentionTokens(metadata, rotary, LayerRows())
        kernels.resolve_block("attention_block", block)(x, block, rows).norm(norm, _EPS)
        assert attention_calls() > before, (
            f"{own!r} has attention of its own, and the attention block of a layer didn't call it: attention_block of an "
            "outer or inner kernel set computed attention instead. Pass your attention on as the block's attend"
        )
    batch.stream.synchronize()


def _ones(format: str, rows: int, columns: int, device: torch.device) -> QuantizedWeight:
    """Return a quantised weight [rows, columns] in ``format`` whose elements are one small number, with one scale per row."""
    data = QUANTIZED_FORMATS[format].encode(torch.ones(rows, columns, device=device))
    scales = torch.full((rows, 1), 1 / columns, device=device)
    return QuantizedWeight(format=format, data=data, scales=scales, block=(1, columns), shape=(rows, columns))


def check_own_answers(backend: Backend) -> None:
    """Fail if the kernel set that overrides attention left calls to the overridden method."""
    calls = counts_of(backend.kernels_in_use)
    name, unused = calls.overriding_layer("paged_attention") or ("", "no kernel set overrides it")
    left = calls.shapes("paged_attention", kernels=name, own=False)
    assert unused or not left, f"{name!r} left its own attention to what it overrides, with {'; '.join(left)}"
