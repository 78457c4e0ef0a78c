"""L4: each kernel gives the results of the reference in every declared dtype, called directly and in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.device import AttentionMetadata, CaptureContext, KernelSet
from outrider_conformance.fixed_case import FixedKernelCase, attention_metadata
from outrider_conformance.kernel_cases import CASES
from outrider_conformance.lab import Lab, expect
from outrider_conformance.promises import promise
from outrider_conformance.verdict import not_applicable

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
_DTYPES = list(_TOLERANCE)
_ROUNDING = "*Numerics.* A result may differ from the reference by rounding alone."


def _reference(case: FixedKernelCase, dtype: torch.dtype) -> list[Tensor]:
    """Return the reference's results on the host; floating results in float64, from operands rounded to ``dtype``."""
    operands = case.make(dtype)
    if not case.exact:
        operands = {k: v.double() if v.is_floating_point() and v.dtype is dtype else v for k, v in operands.items()}
    return [made.clone() for made in case.call(KernelSet(), operands)]


def _compare(case: FixedKernelCase, found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype, how: str) -> None:
    for number, (made, right) in enumerate(zip(found, wanted, strict=True)):
        what = f"result {number} of {case.name} in {dtype}, {how}"
        expect(tuple(made.shape), tuple(right.shape), f"shape of {what}")
        if case.exact or not right.is_floating_point():
            expect(made.tolist(), right.tolist(), what)
            continue
        assert made.isnan().logical_not().all(), f"{what}: NaN"
        off = (made.double() - right.double()).nan_to_num(0.0).abs()  # -inf on both sides is right
        rounding = max(_TOLERANCE[dtype], _TOLERANCE.get(made.dtype, 0.0))  # a result may be coarser than its operands
        limit = rounding * (1 + right.double().abs().nan_to_num(0.0, neginf=0.0))
        worst = float((off - limit).max()) if off.numel() else -1.0
        same = torch.equal(made.isinf(), right.isinf())
        assert same, f"{what}: infinite elsewhere than the reference"
        assert worst <= 0, f"{what}: off by {float(off.max()):.3g}, allowed is rounding (about {rounding:g})"


def _declared(lab: Lab, case: FixedKernelCase, dtype: torch.dtype) -> None:
    if dtype not in lab.backend.capabilities.dtypes:
        not_applicable(f"{dtype} isn't declared")
    if case.exact and dtype is not torch.float32:
        not_applicable("choices are compared in float32, where both sides draw the same")


@promise("KernelSet", _ROUNDING)
@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_kernel_equals_the_reference(lab: Lab, case: FixedKernelCase, dtype: torch.dtype) -> None:
    """A kernel that is enqueued after slow work gives the reference's results."""
    _declared(lab, case, dtype)
    (stream,) = lab.streams("s")
    operands = lab.upload(stream, case.make(dtype))
    lab.slow(stream)
    with lab.backend.on(stream):
        made = case.call(lab.backend.kernels_in_use, operands)
    stream.synchronize()
    _compare(case, [tensor.cpu() for tensor in made], _reference(case, dtype), dtype, "eagerly")


@promise("KernelSet.every_variant", "The call returns and writes the same values as outside the scope.")
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_kernel_equals_the_reference_while_every_variant_is_run(lab: Lab, case: FixedKernelCase) -> None:
    """A kernel gives the reference's results inside the scope in which an engine warms up all variants."""
    kernels, dtype = lab.backend.kernels_in_use, torch.float32
    scope = kernels.every_variant()
    if scope is None:
        not_applicable("none of these kernels is compiled when it's first used")
    (stream,) = lab.streams("s")
    operands = lab.upload(stream, case.make(dtype))
    with scope, lab.backend.on(stream):
        made = case.call(kernels, operands)
    stream.synchronize()
    _compare(case, [tensor.cpu() for tensor in made], _reference(case, dtype), dtype, "while every variant was run")


@promise("KernelSet", "*Capture.* Every method may be captured; none reads a device value on the host.")
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_kernel_equals_the_reference_in_a_graph(lab: Lab, case: FixedKernelCase) -> None:
    """A kernel that was captured with other values gives the reference's results at its replay."""
    dtype = torch.float32
    backend = lab.backend
    (stream,) = lab.streams("s")
    operands = lab.upload(stream, case.make(dtype))
    wanted = _reference(case, dtype)
    with backend.on(stream):
        outputs = {str(number): torch.zeros_like(right, device=backend.device) for number, right in enumerate(wanted)}
        if not case.exact:
            outputs = {key: value.to(_made_dtype(case, dtype, int(key))) for key, value in outputs.items()}
    stream.synchronize()

    def fn(context: CaptureContext) -> None:
        own = {name: tensor.clone() if name in case.changed else tensor for name, tensor in context.inputs.items()}
        for number, made in enumerate(case.call(backend.kernels_in_use, own)):
            context.outputs[str(number)].copy_(made)

    floats = [name for name, tensor in operands.items() if tensor.is_floating_point()]
    with backend.on(stream):
        kept = {name: operands[name].clone() for name in floats}
        for name in floats:
            operands[name].mul_(0.5)
    stream.synchronize()
    graph = backend.capture(case.name, fn, stream=stream, inputs=operands, outputs=outputs)
    with backend.on(stream):
        for name in floats:
            operands[name].copy_(kept[name])
    graph.replay(stream)
    stream.synchronize()
    _compare(case, [outputs[str(n)].cpu() for n in range(len(wanted))], wanted, dtype, "in a graph")


def _made_dtype(case: FixedKernelCase, dtype: torch.dtype, number: int) -> torch.dtype:
    return case.call(KernelSet(), case.make(dtype))[number].dtype


@promise("KernelSet", "Rows of a batch don't influence each other except through rounding.")
def test_rows_do_not_influence_each_other(lab: Lab) -> None:
    """The attention of a sequence does not change with the other sequences of the batch."""
    (stream,) = lab.streams("s")
    case = CASES["paged_attention of decoding"]
    host = case.make(torch.float32)
    disturbed = {**host, "q": host["q"].clone()}
    disturbed["q"][1:] = 50.0
    found = []
    for operands in (host, disturbed):
        made = lab.upload(stream, operands)
        with lab.backend.on(stream):
            (out,) = case.call(lab.backend.kernels_in_use, made)
        stream.synchronize()
        found.append(out[:1].cpu())
    _compare(case, [found[1]], [found[0]], torch.float32, "with other neighbours")


@promise("KernelSet", "Token rows beyond a batch's real tokens hold valid indices (row and page 0) and may compute anything")
def test_padding_is_finite(lab: Lab) -> None:
    """Rows of padding are finite, since following kernels add and normalise them."""
    (stream,) = lab.streams("s")
    operands = lab.upload(stream, CASES["paged_attention with padding"].make(torch.float32))
    metadata = attention_metadata(operands, max_query=5, max_kv=16)
    q, k_cache, v_cache = (operands[key] for key in ("q", "k_cache", "v_cache"))
    with lab.backend.on(stream):
        out = lab.backend.kernels_in_use.paged_attention(q, k_cache, v_cache, metadata, scale=0.3)
    stream.synchronize()
    assert out.cpu().isfinite().all(), "attention gives NaN or infinity for padding rows"


@promise("KernelSet.plan_attention", "return the metadata with the plan.")
def test_planning_keeps_the_batch(lab: Lab) -> None:
    """Attention gives the same result with and without a plan."""
    backend = lab.backend
    plan, stream = lab.streams("plan", "s")
    case = CASES["paged_attention of a ragged batch"]
    operands = lab.upload(stream, case.make(torch.float32))
    metadata = attention_metadata(operands, max_query=5, max_kv=16)
    with backend.on(plan):
        planned = backend.kernels_in_use.plan_attention(metadata, stream=plan)
    assert isinstance(planned, AttentionMetadata), f"plan_attention returned a {type(planned).__name__}"
    stream.wait(lab.record(plan, "planned"))
    with backend.on(stream):
        q, k_cache, v_cache = (operands[key] for key in ("q", "k_cache", "v_cache"))
        out = backend.kernels_in_use.paged_attention(q, k_cache, v_cache, planned, scale=0.3)
    stream.synchronize()
    _compare(case, [out.cpu()], _reference(case, torch.float32), torch.float32, "planned")


@promise("KernelSet", "*Errors.* A shape or dtype that a kernel can't do raises before anything is enqueued.")
def test_a_wrong_shape_raises(lab: Lab) -> None:
    """A wrong shape raises an error, and later work runs."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    x, weight = lab.full(stream, 1, width=8), lab.full(stream, 1, width=7)
    with pytest.raises(Exception, match=r".+"), backend.on(stream):
        backend.kernels_in_use.rms_norm(x, weight, 1e-5)
    expect(lab.read_tensor(stream, lab.full(stream, 3)), 3.0, "work after the error")
