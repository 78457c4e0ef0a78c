"""States that a head reads: copied from the residual stream between two kernels, side by side, and read where they lie."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from model.harness import Driver
from model.quantized_checkpoints import write_compressed
from outrider.device import KernelSet
from outrider.device.kernels.kernelset import BLOCKS, kernel_names
from outrider.model import ModelRanks, Shards, SideBySide, load_decoder, side_by_side
from outrider.model.heads.eagle import fuse
from outrider.registry import get_backend
from outrider_proof import tiny
from tiny_checkpoints import write_checkpoint

PROMPT = [1, 17, 44, 90, 5, 61, 61, 8, 33]
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
LAYERS = (2, 0, 1, 2)


class Recording(KernelSet):
    """Which methods were called from outside, in which order."""

    def __init__(self):
        self.calls, self.inside = [], False


def recorded(name):
    def method(self, *operands, **more):
        if self.inside:
            return getattr(KernelSet, name)(self, *operands, **more)
        self.calls.append(name)
        self.inside = True
        try:
            return getattr(KernelSet, name)(self, *operands, **more)
        finally:
            self.inside = False

    return method


for _name in kernel_names():
    if _name not in BLOCKS:
        setattr(Recording, _name, recorded(_name))


@pytest.fixture(params=["llama", "qwen3", "qwen3_moe", "deepseek_v3", "quantised", "ranks"])
def model(request, tmp_path):
    """A decoder over kernels that record their calls, and transformers' states of the prompt in it."""
    kind = request.param
    family, ranks, path = "llama" if kind in ("quantised", "ranks") else kind, None, tmp_path
    reference = write_checkpoint(path, family, **SHAPE)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        if kind == "quantised":
            path = tmp_path / "quantised"
            path.mkdir()
            state = write_compressed(tmp_path, path, "int8-w8a16")
            out = torch.func.functional_call(reference, state, (ids,), {"output_hidden_states": True})
        else:
            out = reference(ids, output_hidden_states=True)
    if kind == "ranks":
        ranks = ModelRanks(Shards())  # what each adds is a part of a sum then
    backend = get_backend("cpu")
    backend.use_kernels(Recording())
    return load_decoder(path, backend=backend, dtype=torch.float32, ranks=ranks), [x[0] for x in out.hidden_states]


def run(model, layers):
    driver = Driver(model)
    inputs = driver.inputs([(driver.sequence(), PROMPT)])
    model.kernels.calls.clear()
    final, states = model.forward_with_aux_hidden_states(inputs, driver.cache, layers)
    return final, states, list(model.kernels.calls)


def test_a_captured_layer_is_a_copy_and_nothing_else(model):
    """No product is made for it: what the layer begins with has added what was pending."""
    model, wanted = model
    plain, nothing, without = run(model, ())
    final, states, calls = run(model, LAYERS)
    assert nothing == ()
    assert "copy_rows" not in without
    assert torch.equal(final, plain)
    assert Counter(calls) - Counter(without) == {"copy_rows": len(LAYERS)}
    assert [name for name in calls if name != "copy_rows"] == without
    assert len(states) == len(LAYERS)
    for layer, state in zip(LAYERS, states, strict=True):
        assert torch.allclose(state, wanted[layer], rtol=0, atol=1e-4)
    assert torch.equal(states[1], wanted[0])


def test_states_lie_side_by_side(model):
    """A head takes them as they are: [T, A H], which is one tensor."""
    model, _ = model
    _, states, _ = run(model, LAYERS)
    joined = side_by_side(states)
    assert joined.is_contiguous()
    assert torch.equal(joined, torch.cat(states, dim=-1))
    assert {each.untyped_storage().data_ptr() for each in (joined, *states)} == {joined.untyped_storage().data_ptr()}


def test_other_states_are_put_side_by_side():
    """Those of a model that returns a plain tuple."""
    states = tuple(torch.randn(3, 4) for _ in range(2))
    assert torch.equal(side_by_side(states), torch.cat(states, dim=-1))


@pytest.mark.parametrize("normed", [False, True], ids=["as they are", "normed each"])
def test_a_head_joins_nothing_that_is_joined(normed, monkeypatch):
    head = tiny.eagle3_head()
    weights, size = head.weights, head.target.config.hidden_size
    if normed:
        weights = replace(weights, state_norms=tuple(torch.rand(size, dtype=torch.float64) for _ in range(3)))
    joined = torch.randn(5, 3 * size, dtype=torch.float64)
    wanted = fuse(weights, tuple(x.clone() for x in joined.split(size, dim=1)), 1e-5, head.kernels)
    cats, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda *given, **more: cats.append(given) or cat(*given, **more))
    assert torch.equal(fuse(weights, SideBySide(joined, size), 1e-5, head.kernels), wanted)
    assert len(cats) == normed  # what was normed lies apart
