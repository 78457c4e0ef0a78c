"""Products with their neighbours against the references in float64: the residual, the norm, the rotation, the cache.

Each operator by itself in float16, since the interpreter multiplies bfloat16 wrongly; on a device a whole layer in bfloat16.
"""

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.test_numerics import close
from kernels.unfused import UnfusedProducts
from outrider.device import RotaryArgs
from outrider_triton import kernelset as _kernelset  # noqa: F401  (registers the operators)
from outrider_triton.products.operands import Product

REFERENCE = UnfusedProducts()
HEADS, KV_HEADS, SIZE = 3, 2, 16
CONFIGS = [(16, 16, 32, 1, 4, 2, 0, 0, 0), (16, 32, 32, 1, 4, 2, 64, 0, 24), (32, 16, 64, 1, 4, 3, 0, 0, 12)]
TURNS = [(16, 16, 32, 1, 4, 2, 0, 0, 0), (16, 64, 32, 1, 4, 2, 64, 0, 24), (32, 32, 64, 1, 4, 3, 0, 0, 12)]


def operands(m, n, k, rows, seed=0):
    """Added product [m, k] x [n, k], its residual and norm, and a weight [rows, n] that takes the norm; float16."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=made).to(torch.float16)

    return (
        Product(normal(m, k), normal(n, k) * 0.2, normal(n)),
        normal(m, n),
        normal(n),
        normal(rows, n) * 0.2,
        normal(rows),
    )


def wide(*tensors):
    return tuple(tensor.double() for tensor in tensors)


def rotary(m, dtype, seed=1):
    made = torch.Generator().manual_seed(seed)
    angle = torch.rand(m, SIZE // 2, generator=made) * 6
    caches = (torch.randn(m + 1, 4, KV_HEADS, SIZE, generator=made).to(torch.float16) for _ in range(2))
    slots = torch.randperm(4 * m, generator=made)[:m] + 4
    cos, sin = (each.repeat(1, 2).to(torch.float16) for each in (angle.cos(), angle.sin()))
    return RotaryArgs(cos.to(dtype), sin.to(dtype), *(cache.to(dtype) for cache in caches), slots)


@pytest.mark.sample(1, per="config")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 64), (5, 40, 96), (16, 32, 128), (37, 33, 100)])
def test_a_product_is_added_to_the_residual(m, n, k, config, device, pdl):
    added, residual, norm, *_ = operands(m, n, k, 1)
    wanted = REFERENCE.linear_add(*wide(*added), residual.double())
    ops, there = torch.ops.outrider, [tensor.to(device) for tensor in added]
    alone = residual.to(device)
    ops.linear_add.triton(*there, alone, list(config), pdl)
    close(alone, wanted, torch.float16)
    kept = residual.to(device)
    scaled, squares = ops.linear_add_scaled.triton(*there, kept, norm.to(device), list(config), pdl)
    assert torch.equal(kept, alone)
    close(scaled, kept.cpu().double() * norm.double(), torch.float16)
    assert squares.shape == (-(-n // (config[8] or config[1])), m)
    close(squares.sum(0), kept.cpu().double().square().sum(1), torch.float32)


@pytest.mark.sample(1, per="config")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 64), (5, 40, 96), (37, 33, 100)])
def test_gates_of_a_norm(m, n, k, config, with_bias, device, pdl):
    added, residual, norm, weight, bias = operands(m, n, k, 44)
    bias = bias if with_bias else None
    wanted = REFERENCE.norm_linear_silu_mul(
        Product(*wide(*added)), *wide(residual, norm), 1e-5, weight.double(), None if bias is None else bias.double()
    )
    ops = torch.ops.outrider
    scaled, squares = ops.linear_add_scaled.triton(
        *(tensor.to(device) for tensor in added), residual.to(device), norm.to(device), [16, 16, 32, 1, 4, 2, 0, 0, 0], pdl
    )
    bias = None if bias is None else bias.to(device)
    made = ops.linear_silu_mul.triton(scaled, weight.to(device), bias, list(config), pdl, squares, 1e-5)
    close(made, wanted, torch.float16)


@pytest.mark.sample(1, per="config")
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("config", TURNS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 64), (5, 40, 96), (37, 33, 100)])
def test_queries_turn_and_keys_and_values_go_to_their_slots(m, n, k, config, with_norm, device, pdl):
    added, residual, norm, weight, bias = operands(m, n, k, (HEADS + 2 * KV_HEADS) * SIZE)
    exact, own = rotary(m, torch.float64), rotary(m, torch.float16)
    where = RotaryArgs(*(tensor.to(device) for tensor in own))
    ops = torch.ops.outrider
    if with_norm:
        wanted = REFERENCE.norm_linear_rope_write_cache(
            Product(*wide(*added)), *wide(residual, norm), 1e-5, *wide(weight, bias), exact
        )
        there = (tensor.to(device) for tensor in (*added, residual, norm))
        x, squares = ops.linear_add_scaled.triton(*there, [16, 16, 32, 1, 4, 2, 0, 0, 0], pdl)
    else:
        wanted = REFERENCE.linear_rope_write_cache(Product(*wide(residual, weight, bias)), exact)
        x, squares = residual.to(device), None
    made = ops.rope_write_cache.triton_linear(x, squares, weight.to(device), bias.to(device), 1e-5, *where, list(config), pdl)
    close(made, wanted, torch.float16)
    close(where.k_cache, exact.k_cache, torch.float16)
    close(where.v_cache, exact.v_cache, torch.float16)
