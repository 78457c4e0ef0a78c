"""L4: each kernel on random operands lies within the rounding bound of float64 results, and writes no other memory.

Kernels are called directly, in a graph, and in the scope that runs every variant. The backend's own attention, with its
preferred page size and dtypes, and planned attention equal the reference.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch

from outrider.device import CapabilityError, CaptureContext, KernelSet
from outrider_conformance.lab import Lab, expect
from outrider_conformance.plugin import Figure
from outrider_conformance.promises import first_sentence, needs, promise
from outrider_conformance.random_kernels.far_rows import FAR_CALLS, check_far_rows
from outrider_conformance.random_kernels.kernels import (
    KERNELS,
    check_concurrent_calls,
    check_dtypes,
    check_in_graph,
    check_problem,
    check_row_bits,
    corners,
    problem,
    with_nan_row,
)
from outrider_conformance.random_kernels.paged_batch import (
    SHAPES,
    PagedBatch,
    check_block,
    check_own_answers,
    check_renewed,
    check_unplanned,
    paged_batch,
    preferred_dtypes,
)
from outrider_conformance.random_kernels.problem import (
    KernelProblems,
    RandomValues,
    Shape,
    boundary_shapes,
    paired_shapes,
    shrink_shape,
    smallest_shape,
)
from outrider_conformance.random_kernels.recurrent import check_equal_bits
from outrider_conformance.reporting.verdict import not_applicable, refusals_left_out

_COMPILED_DRAWS = 1
_SHARES = 3
"""Number of dtypes that share the boundaries of a kernel."""
_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def _applies(lab: Lab, drawn: KernelProblems, dtype: torch.dtype) -> None:
    if drawn.choices and dtype is not torch.float32:
        not_applicable("it works on whole numbers, or on float32 whatever the model's dtype is")
    if drawn.format is not None and drawn.format not in lab.backend.capabilities.quantized_formats:
        not_applicable(f"quantised weights of the format {drawn.format} aren't declared")
    if drawn.cache is not None and drawn.cache not in lab.backend.kernels_in_use.cache_formats:
        not_applicable(f"a KV cache of the format {drawn.cache} isn't declared")
    if drawn.operand is not None and drawn.operand not in lab.backend.kernels_in_use.optional_operands:
        not_applicable(f"the operand {drawn.operand} isn't declared")
    if not drawn.choices and dtype not in lab.backend.capabilities.dtypes:
        not_applicable(f"{dtype} isn't declared")


@contextmanager
def _check_of(drawn: KernelProblems, case: str) -> Generator[None]:
    """Name the kernel, its promise and the case in an error of a check in this scope."""
    try:
        yield
    except AssertionError as error:
        found = AssertionError(f"{drawn.kernel} {case}: {error}")
        found.promise = first_sentence(f"KernelSet.{drawn.kernel.partition(',')[0]}")  # type: ignore[attr-defined]
        raise found from error
    except Exception as error:
        error.add_note(f"raised by {drawn.kernel} {case}; a kernel delegates shapes and dtypes that it can't do by super()")
        raise


@promise("KernelSet", "*Numerics.* A result may differ from the reference by rounding alone.")
@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("drawn", KERNELS.values(), ids=lambda drawn: drawn.kernel)
def test_a_kernel_is_right_at_its_corners(lab: Lab, drawn: KernelProblems, dtype: torch.dtype) -> None:
    """Results are within the rounding bound for long contexts, many rows, wide vocabularies and strided operands. A second
    call leaves the results of the first unchanged.
    """
    _applies(lab, drawn, dtype)
    (stream,) = lab.streams("s")
    for number, (shape, made) in enumerate(corners(drawn, dtype, lab.seed)):
        with _check_of(drawn, f"in {dtype} of {dict(shape)}"):
            check_problem(lab, stream, made, again=True, slow=not number)


@promise("KernelSet", "*Numerics.* A result may differ from the reference by rounding alone.")
@pytest.mark.parametrize("drawn", KERNELS.values(), ids=lambda drawn: drawn.kernel)
def test_a_kernel_returns_the_dtypes_of_the_reference(lab: Lab, drawn: KernelProblems) -> None:
    """Results have the dtype of the reference's results, in each declared dtype: a wider result would double its memory."""
    (stream,) = lab.streams("s")
    declared = lab.backend.capabilities.dtypes
    dtypes = [torch.float32] if drawn.choices else [dtype for dtype in _DTYPES if dtype in declared]
    _applies(lab, drawn, dtypes[0])
    for dtype in dtypes:
        with _check_of(drawn, f"in {dtype}"):
            check_dtypes(lab, stream, problem(drawn, smallest_shape(drawn.corners), dtype, lab.seed))


@promise("KernelSet", "*Numerics.* A result may differ from the reference by rounding alone.")
@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("drawn", KERNELS.values(), ids=lambda drawn: drawn.kernel)
def test_a_kernel_is_right_at_boundaries(lab: Lab, drawn: KernelProblems, dtype: torch.dtype) -> None:
    """One dimension at a time has each of its boundary values: one row, the end of a tile, page or group, more than 16 bits.

    float32 gets all of them. The other dtypes share them, since a boundary rarely concerns one dtype.
    """
    _applies(lab, drawn, dtype)
    (stream,) = lab.streams("s")
    shapes = list(boundary_shapes(drawn.corners, drawn.dimensions))
    if dtype is not torch.float32:
        part = _DTYPES.index(dtype) + lab.seed
        shapes = shapes[part % _SHARES :: max(_SHARES, lab.draws // lab.draws_in(dtype))]
    for shape in shapes:
        with _check_of(drawn, f"in {dtype} of {dict(shape)}"):
            check_problem(lab, stream, problem(drawn, shape, dtype, lab.seed))


@promise("KernelSet", "*Numerics.* A result may differ from the reference by rounding alone.")
@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("drawn", KERNELS.values(), ids=lambda drawn: drawn.kernel)
def test_a_kernel_is_right_on_drawn_operands(lab: Lab, drawn: KernelProblems, dtype: torch.dtype, figure: Figure) -> None:
    """Random shapes within the limits of the kernel: each two dimensions have small and large values in all combinations. Of
    a failing shape, as many dimensions as possible are made small.

    A dtype in which the device is slow gets fewer operand sets. The figures of the report then say how many.
    """
    _applies(lab, drawn, dtype)
    (stream,) = lab.streams("s")

    # Each new shape may be a variant to compile; the corners have compiled enough of them.
    compiled = lab.backend.kernels_in_use.every_variant() is not None
    most = min(lab.draws, _COMPILED_DRAWS) if compiled else lab.draws
    first_of_dtype = dtype not in lab.pace.product_s
    draws = most if drawn.choices else min(most, lab.draws_in(dtype))
    if draws < most and first_of_dtype:
        name = str(dtype).removeprefix("torch.")
        why = f"a product takes {lab.slowdown(dtype):.0f} times as long as in float32"
        figure(f"random operand sets per kernel in {name} ({why})", draws, f"of {most}")

    dice = RandomValues(zlib.crc32(f"{drawn.kernel} {dtype} shapes {lab.seed}".encode()))

    def fails(shape: Shape) -> AssertionError | None:
        try:
            with _check_of(drawn, f"in {dtype} of {dict(shape)}, seed {seed}"):
                check_problem(lab, stream, problem(drawn, shape, dtype, seed))
        except AssertionError as error:
            return error
        return None

    for number, shape in enumerate(paired_shapes(drawn.dimensions, draws, dice)):
        seed = lab.seed + number
        error = fails(shape)
        if error is not None:
            raise shrink_shape(fails, shape, smallest_shape(drawn.corners), error)[1]


@promise("KernelSet", "*Numerics.* A result may differ from the reference by rounding alone.")
@pytest.mark.parametrize("kernel", FAR_CALLS)
def test_offsets_have_more_than_32_bits(lab: Lab, kernel: str) -> None:
    """Rows of a cache are read and written right beyond 2**31 elements."""
    check_far_rows(lab, kernel)


@promise("KernelSet.every_variant", "The call returns and writes the same values as outside the scope.")
@pytest.mark.parametrize("drawn", KERNELS.values(), ids=lambda drawn: drawn.kernel)
def test_a_kernel_is_right_while_every_variant_is_run(lab: Lab, drawn: KernelProblems) -> None:
    """Results are within the rounding bound inside the scope in which an engine warms up all variants of a kernel."""
    _applies(lab, drawn, torch.float32)
    scope = lab.backend.kernels_in_use.every_variant()
    if scope is None:
        not_applicable("none of these kernels is compiled when it's first used")
    (stream,) = lab.streams("s")
    with _check_of(drawn, "while every variant is run"):
        check_problem(lab, stream, problem(drawn, drawn.corners[0], torch.float32, lab.seed), scope=scope)


@promise("KernelSet", "*Capture.* Every method may be captured; none reads a device value on the host.")
@pytest.mark.parametrize("drawn", KERNELS.values(), ids=lambda drawn: drawn.kernel)
def test_a_kernel_is_right_in_a_graph(lab: Lab, drawn: KernelProblems) -> None:
    """A kernel that was captured with other values gives results within the rounding bound at its replay."""
    _applies(lab, drawn, torch.float32)
    (stream,) = lab.streams("s")
    with refusals_left_out(lab.backend.capabilities), _check_of(drawn, "in a graph"):
        check_in_graph(lab, stream, problem(drawn, drawn.corners[0], torch.float32, lab.seed), drawn.kernel)


@needs("concurrent_streams")
@promise("KernelSet", "*Placement.* Every method enqueues on the stream whose scope the caller opened")
@pytest.mark.parametrize("drawn", KERNELS.values(), ids=lambda drawn: drawn.kernel)
def test_a_kernel_is_right_beside_its_calls_on_another_stream(lab: Lab, drawn: KernelProblems) -> None:
    """Calls on one stream are right while calls with other values run on another: no memory of a kernel serves both."""
    _applies(lab, drawn, torch.float32)
    with _check_of(drawn, "beside calls on another stream"):
        check_concurrent_calls(lab, problem(drawn, smallest_shape(drawn.corners), torch.float32, lab.seed))


_ROWS = {
    "linear": ("x",),
    "rms_norm": ("x",),
    "add_rms_norm": ("x", "residual"),
    "silu_mul": ("gate_up",),
    "sigmoid_mul": ("x", "gate"),
    "gated_rms_norm": ("x", "gate"),
    "experts": ("x", "weights", "chosen"),
    "linear_quantized": ("x",),
    "experts_quantized": ("x", "weights", "chosen"),
    "paged_attention": ("q",),
}
"""Operands with a row per token, by kernel; the first one is a floating-point number."""


@promise("KernelSet", "Rows of a batch don't influence each other except through rounding.")
@pytest.mark.parametrize(
    "drawn", [drawn for drawn in KERNELS.values() if drawn.kernel.partition(",")[0] in _ROWS], ids=lambda drawn: drawn.kernel
)
def test_a_row_with_nan_spoils_no_other_row(lab: Lab, drawn: KernelProblems) -> None:
    """A request whose numbers became NaN fails alone: results of the other rows are within the rounding bound."""
    _applies(lab, drawn, torch.float32)
    (stream,) = lab.streams("s")
    made = problem(drawn, drawn.corners[0], torch.float32, lab.seed)
    with _check_of(drawn, "with NaN in the first row"):
        check_problem(lab, stream, with_nan_row(made, _ROWS[drawn.kernel.partition(",")[0]][0]))


_ROW_COUNT = 33
_INVARIANT = [drawn for drawn in KERNELS.values() if drawn.kernel.partition(",")[0] in _ROWS.keys() - {"paged_attention"}]


def _invariant_kernels(lab: Lab, which: str) -> KernelSet:
    """Return the kernels in use, or their ``batch_invariant``, if the bits of their rows don't depend on other rows."""
    kernels = lab.backend.kernels_in_use
    if which == "batch_invariant":
        try:
            kernels = kernels.batch_invariant()
        except CapabilityError:
            not_applicable("these kernels can't be invariant")
        assert kernels.row_invariant, f"batch_invariant() returns {kernels.name!r}, which declares row_invariant = False"
    if not kernels.row_invariant:
        not_applicable("row_invariant isn't declared")
    return kernels


@promise("KernelSet.batch_invariant", "kernels of this device that are ``row_invariant``: the order of a row's sums is fixed")
@pytest.mark.parametrize("which", ["in use", "batch_invariant"])
@pytest.mark.parametrize("drawn", _INVARIANT, ids=lambda drawn: drawn.kernel)
def test_the_bits_of_a_row_do_not_depend_on_other_rows(lab: Lab, drawn: KernelProblems, which: str) -> None:
    """Rows that are computed alone have the bits that they have in a batch, in float32 and the first preferred dtype."""
    kernels = _invariant_kernels(lab, which)
    (stream,) = lab.streams("s")
    for dtype in dict.fromkeys((torch.float32, preferred_dtypes(lab.backend)[0])):
        _applies(lab, drawn, dtype)
        made = problem(drawn, {**smallest_shape(drawn.corners), "tokens": _ROW_COUNT}, dtype, lab.seed)
        check_row_bits(lab, stream, kernels, made, drawn.kernel, _ROWS[drawn.kernel.partition(",")[0]])


@promise("KernelSet.batch_invariant", "kernels of this device that are ``row_invariant``: the order of a row's sums is fixed")
@pytest.mark.parametrize("which", ["in use", "batch_invariant"])
def test_the_bits_of_attention_do_not_depend_on_other_requests(lab: Lab, which: str) -> None:
    """Attention of a sequence alone has the bits that it has in a batch of ragged sequences."""
    kernels, batch = _invariant_kernels(lab, which), paged_batch(lab, "a ragged prompt")
    batch.check_bits(kernels)


@promise("RecurrentKernels", "*Equal bits.* The results of a token in")
@pytest.mark.parametrize("kernel", ["short_convolution", "gated_delta_rule"])
def test_a_tokens_bits_do_not_depend_on_later_tokens(lab: Lab, kernel: str) -> None:
    """Results and states are the same with more tokens in the window, and however many of them are settled."""
    (stream,) = lab.streams("s")
    check_equal_bits(lab, stream, kernel, lab.seed)


@promise("RecurrentKernels.state_interval", "A pass that begins at a multiple computes the bits of a longer pass")
def test_a_pass_from_a_cut_on_has_the_bits_of_a_longer_pass(lab: Lab) -> None:
    """A prompt that is cut at the interval of states gives the bits of the whole prompt."""
    (stream,) = lab.streams("s")
    check_equal_bits(lab, stream, "chunk_gated_delta_rule", lab.seed)


@promise("KernelSet", "*Errors.* A shape or dtype that a kernel can't do raises before anything is enqueued.")
def test_a_wrong_shape_raises(lab: Lab) -> None:
    """A wrong shape raises an error, and later work runs."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    x, weight = lab.full(stream, 1, width=8), lab.full(stream, 1, width=7)
    with pytest.raises(Exception, match=r".+"), backend.on(stream):
        backend.kernels_in_use.rms_norm(x, weight, 1e-5)
    expect(lab.read_tensor(stream, lab.full(stream, 3)), 3.0, "work after the error")


@promise("Capabilities.page_size", "Tokens of a KV page with which the backend's own kernels run:")
@pytest.mark.parametrize("shape", SHAPES)
def test_preferred_pages_and_dtypes_are_attended_to(lab: Lab, shape: str) -> None:
    """Attention equals the reference for lengths on both sides of a page's end, with NaN after each sequence, in each
    preferred dtype, and no call is left to the reference.
    """
    for dtype in preferred_dtypes(lab.backend):
        batch = paged_batch(lab, shape, dtype)
        lab.slow(batch.stream)
        batch.check_call(batch.grown(batch.contexts[0]), batch.contexts[0], "called")
    check_own_answers(lab.backend)


@promise("KernelSet", "*Capture.* Every method may be captured; none reads a device value on the host.")
@pytest.mark.parametrize("shape", ["decoding", "a chain", "a tree", "a mixed batch"])
def test_attention_in_a_graph_follows_the_lengths(lab: Lab, shape: str) -> None:
    """One captured call of attention is replayed for lengths that have grown since its capture."""
    with refusals_left_out(lab.backend.capabilities):
        paged_batch(lab, shape).check_graph(plans=False)
    check_own_answers(lab.backend)


@promise(
    "KernelSet",
    "*Delegation.* An override computes a call, or delegates the call by ``super()``, for example for an unsupported shape.",
)
@pytest.mark.parametrize("shape", ["decoding", "a chain"])
@pytest.mark.parametrize("quantized", [False, True], ids=["unquantized", "quantised"])
def test_layers_use_it(lab: Lab, shape: str, quantized: bool) -> None:
    """The attention block of a layer uses the backend's own attention, with quantised weights, too. Other tests check the
    results.
    """
    check_block(lab, shape, quantized=quantized)


_FEW, _MANY = 2, 66
_SLACK_BYTES = 1 << 16
"""Bytes of memory that allocators may keep in pieces, independent of the number of requests."""


@promise("KernelSet.plan_attention", "return the metadata with the plan.")
@pytest.mark.parametrize("shape", ["decoding", "a chain", "a window", "a ragged prompt"])
def test_a_plan_follows_its_batch(lab: Lab, shape: str) -> None:
    """One plan is renewed for a batch with other lengths, and attention with the renewed plan equals the reference."""
    check_renewed(paged_batch(lab, shape))


@promise(
    "KernelSet.plan_attention",
    "The method then updates the plan in place, so that a graph captured with the plan computes this batch.",
)
def test_a_graph_follows_the_plan_that_it_was_captured_with(lab: Lab) -> None:
    """A captured attention call computes batches whose plans replaced the captured plan in place."""
    with refusals_left_out(lab.backend.capabilities):
        paged_batch(lab, "a chain").check_graph(plans=True)


@promise("KernelSet.plan_attention", "without shapes, nothing is planned.")
def test_without_shapes_nothing_is_planned(lab: Lab) -> None:
    """The metadata comes back without shapes, and attention works without a plan."""
    check_unplanned(lab)


@promise("KernelSet", "*Capture.* Every method may be captured; none reads a device value on the host.")
def test_lengths_that_change_between_passes_of_a_graph_are_read_anew(lab: Lab) -> None:
    """Two captured attention calls, as of two draft passes, each read the lengths that the graph wrote before it."""
    if lab.backend.kernels_in_use.plans_on_host:
        not_applicable("these kernels plan on the host, and passes of a draft aren't planned")
    backend, batch = lab.backend, paged_batch(lab, "decoding")
    metadata = batch.metadata(batch.made)
    with backend.on(batch.stream):
        outputs = {name: torch.zeros_like(batch.made["q"]) for name in ("first", "second")}
        inputs = {**batch.made, "lengths": batch.made["seq_lens"].clone()}
    batch.stream.synchronize()

    def fn(context: CaptureContext) -> None:
        for step, out in enumerate(context.outputs.values()):
            torch.add(context.inputs["lengths"], step, out=context.inputs["seq_lens"])
            out.copy_(batch.attend(metadata))

    with refusals_left_out(backend.capabilities):
        graph = backend.capture("draft passes", fn, stream=batch.stream, inputs=inputs, outputs=outputs)
    for context in batch.contexts:
        with backend.on(batch.stream):
            inputs["lengths"].copy_(torch.tensor(batch.lengths(context), dtype=torch.int32))
        graph.replay(batch.stream)
        batch.stream.synchronize()
        for step, (name, out) in enumerate(outputs.items()):
            batch.check(out, [n + step for n in context], f"in a graph, in the {name} pass with lengths of its own")


def _held_bytes(lab: Lab, requests: int) -> int:
    """Return how much allocated device memory grows with planned attention of ``requests`` requests, of which only the plan
    is kept.
    """
    backend, context = lab.backend, (17,) * requests
    (stream,) = lab.streams("s")
    backend.synchronize()
    before = backend.memory_info().allocated
    batch = PagedBatch(lab, stream, (1,) * requests, context, dtype=preferred_dtypes(backend)[0])
    planned = batch.planned(context)
    with backend.on(stream):
        batch.attend(planned)
    backend.synchronize()
    plan = planned.plan
    del batch, planned
    gc.collect()
    backend.synchronize()
    held = backend.memory_info().allocated - before
    del plan
    return held


@needs("memory_limit")
@promise("SpeculativeSync.bytes_per_request", "Device memory in bytes that the plugin's kernels and runtime hold")
def test_memory_for_each_request_is_declared(lab: Lab) -> None:
    """Memory that attention keeps after its call grows no faster with the number of requests than declared."""
    declared = lab.backend.speculative_sync.bytes_per_request
    _held_bytes(lab, _MANY)  # what is allocated once
    few, many = _held_bytes(lab, _FEW), _held_bytes(lab, _MANY)
    grown, allowed = many - few, declared * (_MANY - _FEW) + _SLACK_BYTES
    assert grown <= allowed, (
        f"attention keeps {grown} bytes more for {_MANY} requests than for {_FEW}; {declared} bytes for each are declared: "
        "raise bytes_per_request, or free the memory"
    )
