"""Compiled functions over rows of a batch equal the references: choices of tokens, places of tokens, norms."""

import random
from importlib.util import find_spec

import pytest
import torch

from outrider.device import KernelSet
from outrider_cpu import compiled_blocks
from outrider_cpu.kernels import CpuKernels

pytestmark = pytest.mark.skipif(find_spec("llvmlite") is None, reason="not run: llvmlite isn't installed")
REFERENCE = KernelSet()


@pytest.fixture(scope="module")
def kernels():
    kernels = CpuKernels()
    kernels._compiled_blocks._compiled()
    assert compiled_blocks.compiled_functions() is not None
    return kernels


@pytest.fixture
def ran(monkeypatch):
    """The names of the functions that ran."""
    names, run = [], compiled_blocks._Functions.run_on_rows
    monkeypatch.setattr(
        compiled_blocks._Functions, "run_on_rows", lambda self, name, *given: names.append(name) or run(self, name, *given)
    )
    return names


LOGITS = {
    "drawn": lambda x: x,
    "equal": lambda x: x.round(),
    "masked": lambda x: x.index_fill(2, torch.arange(x.shape[2] // 2), -torch.inf),
    "all masked": lambda x: torch.full_like(x, -torch.inf),
    "infinite": lambda x: x.index_fill(2, torch.tensor([5, 9]), torch.inf).index_fill(2, torch.tensor([7]), -torch.inf),
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize(("batch", "drafted", "vocabulary"), [(1, 0, 16), (1, 2, 49152), (3, 3, 1600), (5, 1, 32)])
def test_the_largest_logits_decide(kernels, ran, kind, batch, drafted, vocabulary):
    generator = torch.Generator().manual_seed(drafted)
    logits = LOGITS[kind](torch.randn(batch, drafted + 1, vocabulary, generator=generator))
    tokens = logits.argmax(-1)[:, :-1].clone()
    if drafted > 1:
        tokens[-1, 1] = (tokens[-1, 1] + 1) % vocabulary
    zeros, found = torch.zeros(batch, dtype=torch.int64), torch.full((2, batch, 4), 7)
    operands = logits, tokens, zeros.float(), zeros, zeros
    for ours, theirs in zip(
        kernels.verify_checked(*operands, found[0, :, 1:3]),
        REFERENCE.verify_checked(*operands, found[1, :, 1:3]),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert torch.equal(found[0], found[1])
    operands = logits[:, 0].contiguous(), *operands[2:]
    assert torch.equal(kernels.sample(*operands), REFERENCE.sample(*operands))
    assert ran == ["choose"] * 2


def test_nan_is_found_and_the_tokens_stay_valid(kernels):
    logits, zeros, found = torch.randn(2, 2, 64), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
    logits[1, 1, 9] = torch.nan
    logits[0] = -logits[0].abs()
    logits[1, 0] = torch.nan
    tokens, accepted = kernels.verify_checked(logits, torch.zeros(2, 1, dtype=torch.int64), zeros, zeros, zeros, found)
    assert found.tolist() == [[-1, -1], [0, -1]]
    assert ((tokens >= -1) & (tokens < 64)).all()
    assert ((accepted >= 0) & (accepted <= 1)).all()


def test_places_are_those_of_the_reference(kernels, ran):
    draw, generator = random.Random(3), torch.Generator().manual_seed(3)
    for _ in range(200):
        batch, count, pages, size = (draw.randint(1, most) for most in (5, 7, 8, 19))
        lens = torch.randint(0, pages * size + 3, (batch, 2), generator=generator)[:, 0]
        tables = torch.randint(0, 99, (batch, pages + 2), generator=generator).int()[:, :pages]
        last, ends = draw.choice((1 << 62, draw.randint(0, pages * size))), draw.randint(0, count)
        made = [
            (
                torch.zeros(count, batch).long().t(),
                torch.zeros(batch, 2 * count).long()[:, ::2],
                torch.zeros(batch, ends).int(),
            )
            for _ in range(2)
        ]
        for each, outputs in zip((kernels, REFERENCE), made, strict=True):
            each.place_tokens(lens, tables, size, last, *outputs)
        for ours, theirs in zip(*made, strict=True):
            assert torch.equal(ours, theirs)
    assert ran == ["place"] * 200


def test_norms_are_those_of_the_reference(kernels, ran):
    for shape in ((1, 16), (3, 576), (2, 5, 64)):
        x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
        torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    assert ran == ["normalize"] * 3
    for x in (torch.randn(3, 24), torch.randn(3, 32, dtype=torch.float64), torch.randn(32, 3).t()):
        weight = torch.ones(x.shape[-1], dtype=x.dtype)
        torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    CpuKernels().rms_norm(torch.randn(1, 16), torch.ones(16), 1e-5)
    assert len(ran) == 3, "other widths, dtypes and strides, and models without weights in blocks, use torch"


def test_padding_stays_out_of_rows(kernels):
    for rows in ([2, 1], [0, 2], [0, 0]):
        for shape in ((), (3,)):
            state, values = torch.randn(4, *shape), torch.randn(2, *shape)
            ours, theirs = state.clone(), state.clone()
            kernels.scatter_rows(ours, torch.tensor(rows), values)
            REFERENCE.scatter_rows(theirs, torch.tensor(rows), values)
            assert torch.equal(ours, theirs)
