"""Packed copies of weights on the host: when they are made, and that they never outlive the values that they copy."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider_cpu.packed_weights import PackedWeights

ROWS, COLUMNS = 512, 513
BYTES = ROWS * COLUMNS * 4

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


def test_a_changed_weight_is_packed_again():
    weights, weight, x = PackedWeights(), drawn(ROWS, COLUMNS), drawn(5, COLUMNS)
    weights.linear(x, weight, None)
    before = weights.linear(x, weight, None)
    weight.mul_(2)
    assert weights.linear(x, weight, None) is None
    torch.testing.assert_close(weights.linear(x, weight, None), before * 2)


def test_copies_are_limited_and_freed_with_their_weights():
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
