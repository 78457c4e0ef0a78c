"""Packed copies of weights on the host: when they are made, and that they never outlive the values that they copy."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from outrider_cpu import packed_weights
from outrider_cpu.packed_weights import PackedWeights

ROWS, COLUMNS = 512, 513
BYTES = ROWS * COLUMNS * 4

needs_fbgemm = pytest.mark.skipif(
    torch.backends.quantized.engine not in packed_weights._FBGEMM_ENGINES, reason="not run: this torch has no FBGEMM"
)
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="not run: this torch has no oneDNN")


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


@pytest.fixture(params=[False, True], ids=["plain", "inference"])
def mode(request):
    with torch.inference_mode(request.param):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_a_packed_product_is_that_of_the_weight(mode, dtype, tokens):
    weights, weight, bias = PackedWeights(), drawn(ROWS, COLUMNS, dtype=dtype), drawn(ROWS, dtype=dtype)
    x = drawn(tokens, COLUMNS, dtype=dtype)
    assert weights.linear(x, weight, None) is None, "the first product makes no copy"
    if dtype not in weights._dtypes:
        pytest.skip("not run: this processor multiplies no bfloat16")
    for added in (None, bias):
        expected = x.double() @ weight.double().T + (0 if added is None else added.double())
        close = {"rtol": 1e-2, "atol": 0.1} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
        torch.testing.assert_close(weights.linear(x, weight, added).double(), expected, **close)
    assert weights.linear(x.view(1, tokens, COLUMNS), weight, None).shape == (1, tokens, ROWS)


def products(monkeypatch):
    """Note the products with a packed copy, by name."""
    names = []
    for name in ("_multiply_float16", "_multiply_onednn"):
        product = getattr(packed_weights, name)
        monkeypatch.setattr(
            packed_weights, name, lambda *given, name=name, product=product: names.append(name) or product(*given)
        )
    return names


@needs_fbgemm
@pytest.mark.parametrize("tokens", [1, 2, 5, 7, 64])
@pytest.mark.parametrize("factor", [1.0, 3e-9, 1e6], ids=["plain", "tiny", "large"])
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_values_of_sixteen_bits_are_multiplied_exactly(mode, monkeypatch, source, factor, tokens):
    """The product of float32 values that a checkpoint in 16 bits had is as exact as that of the weight itself."""
    names = products(monkeypatch)
    values = drawn(ROWS, COLUMNS, dtype=source)
    weight = (values.float() if source is torch.float16 else (values * factor).float()).contiguous()
    weights, x, bias = PackedWeights(packing_products=1), drawn(tokens, 2 * COLUMNS)[:, :COLUMNS], drawn(ROWS)
    weights.linear(x, weight, None)
    for added in (None, bias):
        expected = x.double() @ weight.double().T + (0 if added is None else added.double())
        found = weights.linear(x, weight, added)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5 * weight.abs().max().item())
    assert names == ["_multiply_float16"] * 2
    assert weights._free_bytes == packed_weights._MAX_BYTES - BYTES // 2


@needs_fbgemm
def test_float16_copies_follow_one_after_another(monkeypatch):
    """Packing them all for one token would delay it by seconds."""
    names = products(monkeypatch)
    weights, x = PackedWeights(packing_products=3), drawn(5, COLUMNS)
    layers = [drawn(ROWS, COLUMNS, dtype=torch.float16).float() for _ in range(3)]
    for weight in layers:
        weights.linear(x, weight, None)
    expected, packed = F.linear(x, layers[0]), []
    for _ in range(4):
        names.clear()
        for weight in layers:
            torch.testing.assert_close(weights.linear(x, weight, None), expected, rtol=1e-4, atol=1e-3)
        packed.append(names.count("_multiply_float16"))
    assert packed == [1, 1, 2, 2]
    for _ in range(9):
        names.clear()
        for weight in layers:
            weights.linear(x, weight, None)
    assert names == ["_multiply_float16"] * 3
    assert weights._free_bytes == packed_weights._MAX_BYTES - 3 * BYTES // 2


@needs_fbgemm
@pytest.mark.parametrize("value", [1 / 3, 2.0**-40, torch.inf, torch.nan], ids=["bits", "range", "infinite", "nan"])
def test_a_weight_that_float16_rounds_has_a_copy_of_its_own_dtype(monkeypatch, value):
    names = products(monkeypatch)
    weights, weight, x = PackedWeights(), drawn(ROWS, COLUMNS, dtype=torch.float16).float(), drawn(5, COLUMNS)
    weight[-1, -1] = value
    weights.linear(x, weight, None)
    found = weights.linear(x, weight, None)
    torch.testing.assert_close(found, F.linear(x, weight), rtol=1e-4, atol=1e-3, equal_nan=True)
    assert names == ["_multiply_onednn"]


@needs_fbgemm
@pytest.mark.parametrize("tokens", [5, 200])
def test_a_processor_without_bfloat16_multiplies_in_float16(monkeypatch, tokens):
    """Torch's own product is many times slower there, for any number of tokens."""
    names = products(monkeypatch)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    weights, weight = PackedWeights(), drawn(ROWS, COLUMNS, dtype=torch.bfloat16)
    x, bias = drawn(tokens, COLUMNS, dtype=torch.bfloat16), drawn(ROWS, dtype=torch.bfloat16)
    weights.linear(x, weight, bias)
    found = weights.linear(x, weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-3)
    assert (found.dtype, names) == (torch.bfloat16, ["_multiply_float16"])


def test_without_fbgemm_each_copy_is_onednns(monkeypatch):
    names = products(monkeypatch)
    monkeypatch.setattr(packed_weights, "_FBGEMM_ENGINES", frozenset())
    weights, weight, x = PackedWeights(), drawn(ROWS, COLUMNS, dtype=torch.float16).float(), drawn(5, COLUMNS)
    weights.linear(x, weight, None)
    torch.testing.assert_close(weights.linear(x, weight, None), F.linear(x, weight), rtol=1e-4, atol=1e-3)
    assert names == ["_multiply_onednn"]


def test_a_changed_weight_is_packed_again():
    weights, weight, x = PackedWeights(), drawn(ROWS, COLUMNS), drawn(5, COLUMNS)
    weights.linear(x, weight, None)
    before = weights.linear(x, weight, None)
    weight.mul_(2)
    assert weights.linear(x, weight, None) is None
    torch.testing.assert_close(weights.linear(x, weight, None), before * 2)


def test_copies_are_limited_and_freed_with_their_weights(collects_little):
    weights, x = PackedWeights(max_bytes=BYTES), drawn(5, COLUMNS)
    first, second = drawn(ROWS, COLUMNS), drawn(ROWS, COLUMNS)
    made = [[weights.linear(x, weight, None) is not None for _ in range(2)] for weight in (first, second)]
    assert made == [[False, True], [False, False]]
    del first
    gc.collect()
    assert weights._free_bytes == BYTES
    assert weights.linear(x, second, None) is not None


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (drawn(5, COLUMNS).double(), drawn(ROWS, COLUMNS).double()),
        (drawn(65, COLUMNS), drawn(ROWS, COLUMNS)),
        (drawn(0, COLUMNS), drawn(ROWS, COLUMNS)),
        (drawn(5, COLUMNS), drawn(COLUMNS, ROWS).t()),
        (drawn(5, 64), drawn(64, 64)),
        (drawn(5, COLUMNS).bfloat16(), drawn(ROWS, COLUMNS)),
    ],
    ids=["float64", "many tokens", "no tokens", "transposed", "small", "another dtype"],
)
def test_other_products_use_the_weight(x, weight):
    weights = PackedWeights()
    assert [weights.linear(x, weight, None) for _ in range(3)] == [None] * 3
    assert weights._copies == {}


def test_an_observer_sees_the_weight():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    weights, weight, x = PackedWeights(), drawn(ROWS, COLUMNS), drawn(5, COLUMNS)
    weights.linear(x, weight, None)
    assert weights.linear(x, weight, None) is not None
    with Watch():
        assert weights.linear(x, weight, None) is None
