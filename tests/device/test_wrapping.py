"""WrappedKernels: every method goes to the kernels inside, but those that a subclass does otherwise."""

from inspect import getmembers, isfunction, signature
from unittest.mock import Mock

import pytest
import torch

from outrider.device import DecoderShape, KernelSet, MlpBlock, ResidualStream, WrappedKernels

METHODS = sorted(name for name, _ in getmembers(KernelSet, isfunction) if not name.startswith("_"))


OWN = ("batch_invariant", "unused_overrides", "for_shape", "implementation", "is_native", "resolve_block")


# What a subclass does otherwise counts for these: the first two are its own, of the third the result is wrapped.
@pytest.mark.parametrize("name", [name for name in METHODS if name not in OWN])
def test_each_method_is_passed_on(name):
    inner = Mock(spec=KernelSet, optional_operands=KernelSet.optional_operands)
    given = [object() for _ in signature(getattr(KernelSet, name)).parameters][1:]
    assert getattr(WrappedKernels(inner), name)(*given) is getattr(inner, name).return_value
    getattr(inner, name).assert_called_once_with(*given)


def test_an_override_reaches_the_inner_kernels_and_keeps_its_own_flags():
    class Planning(KernelSet):
        name, row_invariant, plans_on_host = "planning", True, True

    class Doubling(WrappedKernels):
        plans_on_host = False

        def gather_rows(self, state, rows):
            return 2 * super().gather_rows(state, rows)

    kernels = Doubling(Planning())
    assert (kernels.name, kernels.row_invariant, kernels.plans_on_host) == ("planning", True, False)
    assert kernels.gather_rows(torch.eye(2), torch.tensor([1])).tolist() == [[0.0, 2.0]]
    assert kernels.batch_invariant() is kernels


def test_kernels_for_a_shape_are_wrapped_too():
    class Choosing(KernelSet):
        shape = None

        def for_shape(self, shape):
            made = Choosing()
            made.shape = shape
            return made

    class Doubling(WrappedKernels):
        name = "doubling"

        def __init__(self, inner):
            super().__init__(inner)
            self.seen = []

        def gather_rows(self, state, rows):
            self.seen.append(self.inner.shape)
            return 2 * super().gather_rows(state, rows)

    shape = DecoderShape(hidden=64, heads=4, kv_heads=2, head_size=16, inner=128, vocabulary=100)
    kernels = Doubling(Choosing())
    made = kernels.for_shape(shape)
    assert (type(made), made.name, made.inner.shape, kernels.inner.shape) == (Doubling, "doubling", shape, None)
    assert made.gather_rows(torch.eye(2), torch.tensor([1])).tolist() == [[0.0, 2.0]]
    assert kernels.seen == [shape]  # what a subclass keeps is shared
    same = WrappedKernels(KernelSet())
    assert same.for_shape(shape) is same  # whose kernels choose nothing by layers


def test_unused_overrides_are_the_subclasss_own():
    """The kit asks each layer by itself: a subclass that overrides what ``inner`` never uses must still compute it."""

    class Unused(KernelSet):
        def unused_overrides(self):
            return {"linear": "never here"}

    assert WrappedKernels(Unused()).unused_overrides() == {}


def test_batch_invariant_kernels_keep_what_a_wrapper_changes():
    class Zeros(WrappedKernels):
        def linear(self, x, weight, bias=None):
            return super().linear(x, weight, bias) * 0

    assert not Zeros(KernelSet()).batch_invariant().linear(torch.ones(3, 4), torch.ones(2, 4)).any()


def test_a_wrapper_of_a_primitive_composes_the_blocks_that_use_it():
    class Fused(KernelSet):
        def mlp_block(self, x, block):  # noqa: ARG002
            raise AssertionError("the wrapper's silu_mul would be passed by")

        def recurrent_block(self, x, block, tokens):  # noqa: ARG002
            return "fused"

    class Doubling(WrappedKernels):
        def silu_mul(self, gate_up):
            return 2 * super().silu_mul(gate_up)

    inner = Fused()
    kernels = WrappedKernels(Doubling(inner))
    block = MlpBlock(norm=torch.ones(4), eps=0.0, gate_up=torch.ones(6, 4), down=torch.ones(4, 3))
    mine, its = (
        KernelSet.mlp_block(each, ResidualStream(each, torch.ones(2, 4)), block).add() - 1 for each in (KernelSet(), inner)
    )
    assert torch.equal(mine, its)
    assert torch.equal(kernels.mlp_block(ResidualStream(kernels, torch.ones(2, 4)), block).add() - 1, 2 * mine)
    assert [kernels.is_native(name) for name in ("mlp_block", "recurrent_block", "silu_mul", "linear")] == [
        False,
        True,
        True,
        False,
    ]
    assert kernels.recurrent_block("x", "block", "tokens") == "fused"
    assert kernels.resolve_block("mlp_block", block).func is KernelSet.mlp_block


def test_a_wrapper_passes_its_attention_to_the_block_of_the_kernels_inside():
    class Attending(WrappedKernels):
        cache_formats = frozenset()

        def paged_attention(self, q, *rest, **options):  # noqa: ARG002
            return q * 2

        def attention_block(self, x, block, tokens, *, attend=None):
            return self.inner.attention_block(x, block, tokens, attend=attend or self.paged_attention)

    inner = Mock(spec=KernelSet, optional_operands=KernelSet.optional_operands)
    kernels = Attending(inner)
    made = WrappedKernels(kernels).attention_block("x", "block", "tokens")
    assert made is inner.attention_block.return_value
    inner.attention_block.assert_called_once_with("x", "block", "tokens", attend=kernels.paged_attention)
