"""Who answered a call: an override, or what it was left to."""

from copy import copy

import pytest
import torch

from outrider.device import DecoderShape, InterfaceError, KernelSet, MlpBlock, ResidualStream, WrappedKernels
from outrider.registry import get_backend
from outrider_conformance import engines
from outrider_conformance.kernel_calls import KERNELS, counting
from outrider_conformance.lab import Lab
from outrider_conformance.random_kernels.paged_batch import check_block


class Halfway(KernelSet):
    """Products of few rows are its own; its norm always goes to the reference, in two calls."""

    name = "halfway"

    def linear(self, x, weight, bias=None):
        return x @ weight.T if x.shape[0] < 4 else super().linear(x, weight, bias)

    def rms_norm(self, x, weight, eps):
        return super().rms_norm(x.clone(), weight, eps)

    def head_norm_rope_write_cache(self, qkv, norms, rotary):
        return KernelSet().head_norm_rope_write_cache(qkv, norms, rotary)  # another's: computed here all the same


class Around(WrappedKernels):
    def linear(self, x, weight, bias=None):
        return -super().linear(-x, weight, bias) if x.shape[0] == 2 else x @ weight.T


X, W = torch.ones(2, 3), torch.ones(6, 3)


def test_calls_that_an_override_leaves_to_the_reference_are_seen():
    kernels = Halfway()
    with counting(kernels) as calls:
        kernels.linear(X, W)
        kernels.linear(torch.ones(8, 3), W)
        kernels.rms_norm(X, torch.ones(3), 1e-5)
        kernels.silu_mul(torch.ones(2, 6))
        with calls.during("draft"):
            kernels.linear(X, W, bias=None)
    assert calls.overridden == {"halfway": {"linear", "rms_norm", "head_norm_rope_write_cache"}}
    assert (calls.count("linear", own=True), calls.count("linear", own=False)) == (2, 1)
    assert calls.count("linear", own=True, use="draft") == 1
    assert (calls.count("rms_norm", own=True), calls.count("rms_norm", own=False)) == (0, 1)
    assert calls.count("silu_mul", own=False) == 1
    assert "float32[8, 3], float32[6, 3]" in {call.shape for call in calls.counts if call.kernel == "linear"}


MLP = MlpBlock(norm=torch.ones(3), eps=1e-5, gate_up=W, down=torch.ones(3, 3))


def test_a_composed_block_asks_overrides_of_its_parts():
    """The block is the reference's, its products the plugin's."""
    kernels = Halfway()
    with counting(kernels) as calls:
        kernels.mlp_block(ResidualStream(kernels, X.clone()), MLP)
    assert (calls.count("mlp_block", own=False), calls.count("linear", own=True)) == (1, 2)


@pytest.mark.parametrize("composes", [False, True])
def test_a_block_that_is_composed_though_declared_native_is_found(composes):
    """An override of a block that only calls the default computes nothing itself."""

    class Declares(KernelSet):
        name = "declares"

        def mlp_block(self, x, block):
            return super().mlp_block(x, block) if composes else KernelSet().mlp_block(x, block)

    kernels = Declares()
    assert kernels.is_native("mlp_block", MLP)
    backend = get_backend("cpu")
    backend.use_kernels(kernels)
    with counting(kernels) as calls:
        engines._call_with_random_operands(backend, calls)
    # test_l4_engine fails for an override with no call that it computed.
    assert calls.overriding_layer("mlp_block") == ("declares", "")
    assert (calls.count("mlp_block", own=True) == 0, calls.count("mlp_block", own=False) > 0) == (composes, composes)


def test_a_set_without_overrides_leaves_everything():
    with counting(KernelSet()) as calls:
        pass
    assert calls.overridden == {"torch": frozenset()}
    kernels = KernelSet()
    with counting(kernels) as calls:
        kernels.mlp_block(ResidualStream(kernels, X.clone()), MLP)
    assert {(call.kernel, call.own) for call in calls.counts} == {
        (name, False) for name in ("mlp_block", "rms_norm", "linear", "silu_mul")
    }


def test_kernels_for_a_shape_are_counted_with_those_they_came_from():
    class ForShapes(Halfway):
        def for_shape(self, shape):
            made = copy(self)
            made.shape = shape
            return made

    shape = DecoderShape(hidden=64, heads=4, kv_heads=2, head_size=16, inner=96, vocabulary=99)
    for kernels in (ForShapes(), Around(ForShapes())):
        with counting(kernels) as calls:
            made = kernels.for_shape(shape)
            made.rms_norm(X, torch.ones(3), 1e-5)
            made.linear(X, W)
        assert made is not kernels
        assert calls.count("rms_norm", own=False) >= 1
        assert calls.count("linear", own=True) == 1


def test_wrapped_kernels_are_counted_apart_from_those_inside():
    kernels = Around(Halfway())
    kernels.name = "around"
    with counting(kernels) as calls:
        kernels.linear(X, W)
        kernels.linear(X[:1], W)
        kernels.rms_norm(X, torch.ones(3), 1e-5)
    found = {(call.kernels, call.kernel, call.own) for call in calls.counts}
    assert found == {
        ("around", "linear", False),
        ("halfway", "linear", True),
        ("around", "linear", True),
        ("around", "rms_norm", False),
        ("halfway", "rms_norm", False),
    }


def test_the_kernels_are_as_they_were_afterwards():
    kernels = Halfway()
    right = KernelSet().linear(X, W)
    with counting(kernels) as calls:
        assert isinstance(kernels, Halfway)
        assert torch.equal(kernels.linear(X, W), right)
        with pytest.raises(InterfaceError, match="counted already"), counting(kernels):
            pass
    assert type(kernels) is Halfway
    kernels.linear(X, W)
    assert calls.count("linear", own=True) == 1


def test_an_override_that_raises_has_not_answered():
    kernels = Halfway()
    with counting(kernels) as calls, pytest.raises(RuntimeError):
        kernels.linear(X, torch.ones(6, 4))
    assert not calls.counts


def test_every_kernel_is_counted():
    assert {"paged_attention", "verify_tree", "move_cache", "plan_attention"} <= set(KERNELS)
    assert not {"every_variant", "compiled", "batch_invariant", "name"} & set(KERNELS)


class Rare(KernelSet):
    """What neither plain models nor the kit's fixed cases call."""

    name = "rare"

    def route(self, logits, count, *, renormalize, held=None):
        return KernelSet().route(logits, count, renormalize=renormalize, held=held)

    def experts_block(self, x, block):
        return KernelSet().experts_block(x, block)


def test_kernels_of_experts_and_of_quantised_layers_are_observed():
    """An override of these isn't taken for one that never computed anything."""
    backend = get_backend("cpu")
    backend.use_kernels(Rare())
    with counting(backend.kernels_in_use) as calls:
        engines._call_with_random_operands(backend, calls)
    assert {call.kernel for call in calls.counts if call.own} == {"route", "experts_block"}
    assert all(calls.count(kernel, own=True) for kernel in ("route", "experts_block"))


class Own(KernelSet):
    """Attention of its own."""

    name = "own"

    def paged_attention(self, *operands, **options):
        return KernelSet().paged_attention(*operands, **options)


class Wrapping(WrappedKernels):
    name = "wrapping"

    def paged_attention(self, *operands, **options):
        return KernelSet().paged_attention(*operands, **options)


class Fusing(WrappedKernels):
    """A block of its own, which computes attention with the kernels inside."""

    name = "fusing"

    def attention_block(self, x, block, tokens, *, attend=None):
        return self.inner.attention_block(x, block, tokens, attend=attend)


def run_block(kernels, quantized):
    backend = get_backend("cpu")
    backend.use_kernels(kernels)
    with counting(kernels):
        check_block(Lab(backend), "a chain", quantized=quantized)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("make", [Own, lambda: Wrapping(KernelSet()), lambda: WrappedKernels(Wrapping(KernelSet()))])
def test_own_attention_serves_layers(make, quantized):
    run_block(make(), quantized)


def test_own_attention_that_layers_pass_by_is_found():
    """As where the block of the kernels inside computed attention."""

    class Passed(Wrapping):
        attention_block = WrappedKernels.attention_block

    with pytest.raises(AssertionError, match="'wrapping' has attention of its own, and the attention block of a layer"):
        run_block(Passed(Fusing(KernelSet())), False)
