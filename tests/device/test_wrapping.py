"""WrappedKernels: every method goes to the kernels inside, but those that a subclass does otherwise."""

from inspect import getmembers, isfunction, signature
from unittest.mock import Mock

import pytest
import torch

from outrider.device import DecoderShape, KernelSet, QuantizedProduct, RotaryArgs, WrappedKernels
from outrider.device.kernels.formats import INT8
from outrider.device.kernels.weight_formats import WeightFormat

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


PARTS = {
    "verify_checked": {"find_nan", "verify_chain"},
    "embed_beside_linear_quantized": {"embed_beside", "linear_quantized"},
    "linear_quantized_add": {"linear_quantized", "silu_mul"},
    "linear_quantized_add_rms_norm": {"linear_quantized", "silu_mul", "add_rms_norm"},
    "linear_quantized_rope_write_cache": {"linear_quantized", "rope_write_cache"},
}


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in PARTS.items() for part in sorted(parts)])
def test_a_subclass_is_asked_for_its_part_of_what_is_one_call_now(name, part):
    """Engines and layers called these one by one before; by keywords, too."""
    asked = []

    def own(self, *operands, **options):
        asked.append(part)
        return getattr(super(kind, self), part)(*operands, **options)

    kind = type("Asked", (WrappedKernels,), {part: own, "cache_formats": frozenset()})
    right = getattr(KernelSet(), name)(*quantized_operands(name).values())
    inner = Mock(spec=KernelSet, wraps=KernelSet())
    for kernels in (kind(inner), WrappedKernels(kind(inner))):
        asked.clear()
        torch.testing.assert_close(getattr(kernels, name)(**quantized_operands(name)), right)
        assert asked == [part]
    getattr(inner, name).assert_not_called()


def quantized_operands(name):
    """By name, in their order; the same numbers each time."""
    torch.manual_seed(0)
    if name == "verify_checked":
        logits, drafts = torch.randn(2, 3, 7), torch.tensor([[1, 2], [3, 4]])
        zeros = torch.zeros(2, dtype=torch.int64)
        keys = "target_logits", "draft_tokens", "temperature", "seeds", "positions", "found"
        return dict(
            zip(keys, (logits, drafts, torch.zeros(2), zeros, zeros, torch.zeros(2, 2, dtype=torch.int64)), strict=True)
        )
    weight = WeightFormat(elements=INT8).random_weight(8, 8, device=torch.device("cpu"))
    if name == "embed_beside_linear_quantized":
        beside = WeightFormat(elements=INT8).random_weight(8, 16, device=torch.device("cpu"))
        own = torch.tensor([1, 0]), torch.randn(3, 8), torch.randn(2, 8), beside
        return dict(zip(("tokens", "embedding", "hidden", "weight"), own, strict=True))
    if name == "linear_quantized_rope_write_cache":
        wide = WeightFormat(elements=INT8).random_weight(16, 8, device=torch.device("cpu"))
        angle, caches = torch.randn(2, 4), [torch.zeros(2, 4, 1, 4) for _ in range(2)]
        rotary = RotaryArgs(angle.cos(), angle.sin(), *caches, torch.tensor([4, 5]))
        return {"x": torch.randn(2, 8), "weight": wide, "bias": None, "rotary": rotary}
    made = {"added": QuantizedProduct(torch.randn(2, 16), weight, None, gated=True), "residual": torch.randn(2, 8)}
    return made | ({"norm": torch.ones(8), "eps": 1e-5} if name.endswith("norm") else {})


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
