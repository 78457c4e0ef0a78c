"""All kernels with random operands, by name, and the check of a problem on a backend.

A check covers results, written operands and the memory around them.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import CaptureContext, KernelSet, Stream
from outrider_conformance.lab import Lab, switching_threads_often
from outrider_conformance.random_kernels.attention import ATTENTION
from outrider_conformance.random_kernels.blocks import BLOCKS
from outrider_conformance.random_kernels.bookkeeping import BOOKKEEPING
from outrider_conformance.random_kernels.bounds import Number, compare
from outrider_conformance.random_kernels.dense import DENSE
from outrider_conformance.random_kernels.experts import EXPERTS
from outrider_conformance.random_kernels.latent import LATENT
from outrider_conformance.random_kernels.logits import LOGITS
from outrider_conformance.random_kernels.problem import (
    KernelProblems,
    Operand,
    PlacedOperand,
    Problem,
    RandomValues,
    Shape,
    same_bits,
)
from outrider_conformance.random_kernels.quantized import QUANTIZED
from outrider_conformance.random_kernels.recurrent import RECURRENT
from outrider_conformance.random_kernels.token_choices import CHOICES

_HOST = torch.device("cpu")
_ROW_PARTS = slice(0, 1), slice(3, 10), slice(32, 33)
"""Rows of a batch that are computed again alone."""
_PENDING_CALLS = 48
"""Calls of a kernel on each of two streams; few of a call's operations meet those of a call on the other stream."""


def check_problem(
    lab: Lab,
    stream: Stream,
    problem: Problem,
    *,
    again: bool = False,
    slow: bool = False,
    scope: AbstractContextManager[None] | None = None,
) -> None:
    """Run ``problem`` on ``stream``, inside ``scope`` if given, and check results, written operands and the memory around
    them.

    ``again``: a second call with other values must not change the results of the first, nor may a later write to an operand
    that the kernel only reads. ``slow``: the stream is busy when the
    kernel is called.
    """
    backend = lab.backend
    kernels = backend.kernels_in_use
    placed = _place(lab, stream, problem.operands)
    other = _place(lab, stream, _disturbed(problem)) if again else {}
    stream.synchronize()
    if slow:
        lab.slow(stream)
    with scope or nullcontext(), backend.on(stream):
        made = dict(problem.call(kernels, {name: one.view for name, one in placed.items()}))
        if again:
            problem.call(kernels, {name: one.view for name, one in other.items()})
            later = _without_operands(problem, made, {name: one.view for name, one in placed.items()})
    stream.synchronize()
    results = {name: tensor.cpu() for name, tensor in made.items()}
    for name, result in later.items() if again else ():
        assert same_bits(result.cpu(), results[name]), (
            f"the result {name!r} changes if an operand is overwritten after the call, so it's a view of the operand; return "
            "memory of its own"
        )
    try:
        _check_results(problem, placed, results)
    except AssertionError as error:
        strided = [name for name, one in placed.items() if not one.view.is_contiguous()]
        if strided:
            message, end, lines = str(error).partition("\n")
            error.args = (f"{message}; not contiguous: {', '.join(strided)}{end}{lines}",)
        raise


def _without_operands(problem: Problem, made: Mapping[str, Tensor], operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the results ``made``, taken while the operands that the kernel only reads hold zeros. The operands
    have their contents again afterwards.
    """
    read = [operand for name, operand in operands.items() if name not in problem.changed]
    contents = [operand.clone() for operand in read]
    for operand in read:
        operand.zero_()
    results = {name: result.clone() for name, result in made.items()}
    for operand, content in zip(read, contents, strict=True):
        operand.copy_(content)
    return results


def check_in_graph(lab: Lab, stream: Stream, problem: Problem, name: str) -> None:
    """Capture the call of ``problem`` with other values, replay it with the problem's values, and check the results."""
    backend = lab.backend
    inputs = {each: placed.view for each, placed in _place(lab, stream, _disturbed(problem)).items()}
    values = lab.upload(stream, problem.tensors)
    right = _results(problem, KernelSet(), problem.tensors)
    with backend.on(stream):
        outputs = {each: torch.zeros_like(result, device=backend.device) for each, result in right.items()}
    stream.synchronize()

    def fn(context: CaptureContext) -> None:
        own = {each: input.clone() if each in problem.changed else input for each, input in context.inputs.items()}
        for each, result in _results(problem, backend.kernels_in_use, own).items():
            context.outputs[each].copy_(result)

    graph = backend.capture(name, fn, stream=stream, inputs=inputs, outputs=outputs)
    with backend.on(stream):
        for each, value in values.items():
            inputs[each].copy_(value)
    graph.replay(stream)
    stream.synchronize()
    check_results(problem, {each: output.cpu() for each, output in outputs.items()})


def check_dtypes(lab: Lab, stream: Stream, problem: Problem) -> None:
    """Run ``problem`` on ``stream``, and check that each result has the dtype of the reference's."""
    right = problem.call(KernelSet(), problem.tensors)
    operands = lab.upload(stream, problem.tensors)
    with lab.backend.on(stream):
        made = problem.call(lab.backend.kernels_in_use, operands)
    stream.synchronize()
    for name, result in right.items():
        assert made[name].dtype is result.dtype, f"{name!r} has the dtype {made[name].dtype}, expected {result.dtype}"


def check_concurrent_calls(lab: Lab, problem: Problem) -> None:
    """Run ``problem`` on one stream while another stream runs it with other values, and check the results of the first.

    Both streams have many calls pending before the first one runs, so that the calls overlap.
    """
    a, b, gate = lab.streams("a", "b", "gate")
    operands = lab.upload(a, problem.tensors)
    mirrored = {name: _halved(operand.tensor, (0, -1)) for name, operand in _disturbed(problem).items()}
    others = lab.upload(b, mirrored)
    made: list[dict[str, Tensor]] = []
    flag = lab.backend.create_flag("all calls are pending") if lab.backend.capabilities.flags else None
    for stream in (a, b):
        lab.slow(stream) if flag is None else flag.wait(stream)
    with switching_threads_often():
        for _ in range(_PENDING_CALLS if lab.backend.control is None else 1):
            for stream, given in ((a, operands), (b, others)):
                with lab.backend.on(stream):
                    own = {name: one.clone() if name in problem.changed else one for name, one in given.items()}
                    results = _results(problem, lab.backend.kernels_in_use, own)
                made += [results] if stream is a else []
        if flag is not None:
            flag.set(gate)
        lab.backend.synchronize()
    checked: dict[str, Tensor] = {}
    for results in ({name: result.cpu() for name, result in each.items()} for each in made):
        if not checked or any(not same_bits(checked[name], result) for name, result in results.items()):
            check_results(problem, results)
            checked = results


def _results(problem: Problem, kernels: KernelSet, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the results of the problem's call by name, and the operands that the call wrote."""
    made = problem.call(kernels, operands)
    return {name: operands[name] for name in problem.changed} | dict(made)


def with_nan_row(problem: Problem, name: str) -> Problem:
    """Return ``problem`` with NaN in the first row of the operand ``name``, and conditions for the results of other rows."""
    rows = problem.operands[name].tensor.clone()
    rows[0] = torch.nan
    wanted: dict[str, Number | Tensor] = {}
    for key, each in problem.wanted.items():
        assert isinstance(each, Number)
        if key in problem.operands:  # a written operand, compared as a whole
            wanted[key] = Number(each.value.index_fill(0, torch.tensor([0]), torch.nan), each.error)
        else:
            wanted[key] = each[1:]

    def call(kernels: KernelSet, operands: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {key: result[1:] for key, result in problem.call(kernels, operands).items()}

    return Problem({**problem.operands, name: Operand(rows, problem.operands[name].layout)}, call, wanted)


def check_row_bits(
    lab: Lab, stream: Stream, kernels: KernelSet, problem: Problem, kernel: str, names: Collection[str]
) -> None:
    """Run ``problem`` of ``kernel`` with ``kernels``, then some of its rows alone, and check that these have the same bits.

    ``names`` are the operands with a row per token.
    """
    operands = lab.upload(stream, problem.tensors)

    def results(rows: slice) -> dict[str, Tensor]:
        with lab.backend.on(stream):
            own = {name: one[rows].clone() if name in names else one for name, one in operands.items()}
            made = _results(problem, kernels, own)
        stream.synchronize()
        return {name: result.cpu() for name, result in made.items()}

    batch = results(slice(None))
    for rows in _ROW_PARTS:
        for name, part in results(rows).items():
            assert same_bits(part, batch[name][rows]), (
                f"{kernel} of {kernels.name!r} in {part.dtype}: rows {rows.start} to {rows.stop - 1} of {name!r} have other "
                "bits without the other rows of the batch; compute each row by sums of one order, or declare row_invariant = "
                "False"
            )


def check_kernels(kernels: KernelSet, problem: Problem, device: torch.device = _HOST) -> None:
    """Run and check ``problem`` with ``kernels`` on ``device``, without a backend."""
    placed = {name: PlacedOperand(operand, device) for name, operand in problem.operands.items()}
    made = problem.call(kernels, {name: one.view for name, one in placed.items()})
    _check_results(problem, placed, {name: tensor.cpu() for name, tensor in made.items()})


def _place(lab: Lab, stream: Stream, operands: Mapping[str, Operand]) -> dict[str, PlacedOperand]:
    with lab.backend.on(stream):
        return {name: PlacedOperand(operand, lab.backend.device) for name, operand in operands.items()}


def _disturbed(problem: Problem) -> dict[str, Operand]:
    """Return the problem's operands with other floating-point values of the same shapes. Integers are indices and stay
    unchanged.
    """
    return {name: Operand(_halved(one.tensor, (0,)), one.layout) for name, one in problem.operands.items()}


def _halved(x: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    """Return a tensor of floating-point numbers reversed in ``dimensions`` and halved, computed in float64. Other tensors are
    returned unchanged.
    """
    if not x.is_floating_point() or not x.dim():
        return x
    return (x.double().flip(tuple({each % x.dim() for each in dimensions})) * 0.5).to(x.dtype)


def _check_results(problem: Problem, placed: Mapping[str, PlacedOperand], made: dict[str, Tensor]) -> None:
    for name, one in placed.items():
        now, kept = one.read_back()
        assert kept, f"memory beside the operand {name!r} was written"
        if name in problem.wanted:
            made.setdefault(name, now)
        else:
            assert same_bits(now, one.before), f"the operand {name!r} was written, which the kernel only reads"
    check_results(problem, made)


def check_results(problem: Problem, made: Mapping[str, Tensor]) -> None:
    """Raise AssertionError unless each tensor of ``made``, on the host, matches what ``problem`` wants by that name."""
    for name, wanted in problem.wanted.items():
        found = made[name]
        if isinstance(wanted, Number):
            compare(found, wanted, f"{name!r}")
            continue
        assert tuple(found.shape) == tuple(wanted.shape), (
            f"{name!r}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
        )
        wrong = found != wanted
        if wrong.any():
            at = tuple(int(index) for index in wrong.nonzero()[0])
            raise AssertionError(
                f"{name!r}: {int(wrong.sum())} of {wrong.numel()} differ; at {list(at)} found {found[at].item()}, "
                f"expected {wanted[at].item()}"
            )
    if problem.check is not None:
        problem.check(made)


KERNELS: Mapping[str, KernelProblems] = MappingProxyType(
    {
        drawn.kernel: drawn
        for part in (BLOCKS, DENSE, EXPERTS, RECURRENT, QUANTIZED, ATTENTION, LATENT, CHOICES, LOGITS, BOOKKEEPING)
        for drawn in part
    }
)


def corners(drawn: KernelProblems, dtype: torch.dtype, seed: int) -> Iterator[tuple[Shape, Problem]]:
    """Yield the problems that every run includes, with values from ``seed``."""
    for number, shape in enumerate(drawn.corners):
        yield shape, problem(drawn, shape, dtype, seed + number)


def problem(drawn: KernelProblems, shape: Shape, dtype: torch.dtype, seed: int) -> Problem:
    """Return one problem, the same for the same arguments in every process."""
    return drawn.make(shape, dtype, RandomValues(zlib.crc32(f"{drawn.kernel} {dtype} {seed}".encode())))
