"""WrappedKernels: every method goes to the kernels inside, but those that a subclass does otherwise."""

from inspect import getmembers, isfunction, signature
from unittest.mock import Mock

import pytest
import torch

from outrider.device import DecoderShape, KernelSet, WrappedKernels

METHODS = sorted(name for name, _ in getmembers(KernelSet, isfunction) if not name.startswith("_"))


# What a subclass does otherwise counts for these: the first two are its own, of the third the result is wrapped.
@pytest.mark.parametrize(
    "name", [name for name in METHODS if name not in ("batch_invariant", "unused_overrides", "for_shape")]
)
def test_each_method_is_passed_on(name):
    inner = Mock(spec=KernelSet)
    given = [object() for _ in signature(getattr(KernelSet, name)).parameters][1:]
    assert getattr(WrappedKernels(inner), name)(*given) is getattr(inner, name).return_value
    getattr(inner, name).assert_called_once_with(*given)


def test_an_override_reaches_the_inner_kernels_and_keeps_its_own_flags():
    class Planning(KernelSet):
        name, row_invariant, plans_on_host = "planning", True, True

    class Doubling(WrappedKernels):
        plans_on_host = False

        def embedding(self, tokens, weight):
            return 2 * super().embedding(tokens, weight)

    kernels = Doubling(Planning())
    assert (kernels.name, kernels.row_invariant, kernels.plans_on_host) == ("planning", True, False)
    assert kernels.embedding(torch.tensor([1]), torch.eye(2)).tolist() == [[0.0, 2.0]]
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

        def embedding(self, tokens, weight):
            self.seen.append(self.inner.shape)
            return 2 * super().embedding(tokens, weight)

    shape = DecoderShape(hidden=64, heads=4, kv_heads=2, head_size=16, inner=128, vocabulary=100)
    kernels = Doubling(Choosing())
    made = kernels.for_shape(shape)
    assert (type(made), made.name, made.inner.shape, kernels.inner.shape) == (Doubling, "doubling", shape, None)
    assert made.embedding(torch.tensor([1]), torch.eye(2)).tolist() == [[0.0, 2.0]]
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


def test_attention_of_a_subclass_is_asked_in_one_call_with_what_follows():
    """Of a set around it too; the rest is the inner kernels'."""

    class Attending(WrappedKernels):
        def paged_attention(self, q, *rest, **options):  # noqa: ARG002
            return q * 2

    inner = Mock(spec=KernelSet)
    q, rest = torch.ones(3, 2, 4), ("residual", "norm", 1e-5, "weight", "bias")
    for kernels in (Attending(inner), WrappedKernels(Attending(inner))):
        inner.reset_mock()
        made = kernels.attention_norm_linear_quantized(q, "k", "v", "metadata", "output", None, *rest, scale=0.5)
        assert made is inner.norm_linear_quantized.return_value
        (added, *others), _ = inner.norm_linear_quantized.call_args
        assert (added.x.tolist(), added.weight, added.gated) == ([[2.0] * 8] * 3, "output", False)
        assert tuple(others) == rest
        inner.attention_norm_linear_quantized.assert_not_called()
        operands = q, "k", "v", "metadata", "output", None, *rest, "down", "its bias"
        pending = kernels.attention_norm_linear_silu_mul_quantized(*operands, scale=0.5)
        assert pending == (inner.norm_linear_quantized.return_value, "down", "its bias", True, None)
        inner.attention_norm_linear_silu_mul_quantized.assert_not_called()
    assert WrappedKernels(inner).attention_norm_linear_silu_mul_quantized(*operands, scale=0.5) is (
        inner.attention_norm_linear_silu_mul_quantized.return_value
    )
