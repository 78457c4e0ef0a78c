"""Triton's kernels with the norms and the rotation of hybrid models: weights in float32, and part of each head rotated.

In float16: the interpreter multiplies bfloat16 wrongly.
"""

import pytest
import torch

from kernels.unfused import UnfusedProducts
from outrider.device import HeadNorms, RotaryArgs
from outrider_triton.products import Product

PLAIN = UnfusedProducts()


def random(*shape, seed, device, dtype=torch.float16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def close(made, wanted):
    torch.testing.assert_close(made.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_norms_with_weights_in_float32(kernels, device):
    x, residual = random(5, 48, seed=1, device=device), random(5, 48, seed=2, device=device)
    norm = 1 + random(48, seed=3, device=device, dtype=torch.float32) * 0.1
    made, wanted = (each.rms_norm(x, norm, 1e-6) for each in (kernels, PLAIN))
    assert made.dtype is torch.float16
    close(made, wanted)
    grown = [residual.clone(), residual.clone()]
    made, wanted = (each.add_rms_norm(x, own, norm, 1e-6) for each, own in zip((kernels, PLAIN), grown, strict=True))
    close(made, wanted)
    close(*grown)


def test_a_gated_mlp_after_a_norm_in_float32(kernels, device):
    x, weight = random(5, 32, seed=4, device=device), random(48, 32, seed=5, device=device)
    gates, norm = (
        random(64, 48, seed=6, device=device) * 0.2,
        1 + random(48, seed=7, device=device, dtype=torch.float32) * 0.1,
    )
    grown = [random(5, 48, seed=8, device=device) for _ in range(2)]
    made, wanted = (
        each.norm_linear_silu_mul(Product(x, weight, None), own, norm, 1e-6, gates, None)
        for each, own in zip((kernels, PLAIN), grown, strict=True)
    )
    close(made / wanted.abs().max(), wanted / wanted.abs().max())


@pytest.mark.parametrize("normed", [False, True])
def test_part_of_each_head_is_rotated(kernels, device, normed):
    angle = torch.rand(5, 4, generator=torch.Generator().manual_seed(9)) * 6
    cos, sin = angle.cos().repeat(1, 2).to(device, torch.float16), angle.sin().repeat(1, 2).to(device, torch.float16)
    qkv = random(5, 8 * 32, seed=10, device=device)
    slots, results = torch.tensor([7, 18, 4, 11, 5], device=device), []
    for each in (kernels, PLAIN):
        caches = [torch.zeros(5, 4, 2, 32, dtype=torch.float16, device=device) for _ in range(2)]
        rotary = RotaryArgs(cos, sin, *caches, slots)
        if normed:
            norms = HeadNorms(*(1 + random(32, seed=seed, device=device, dtype=torch.float32) for seed in (11, 12)), 1e-6)
            q = each.head_norm_rope_write_cache(qkv.clone(), norms, rotary)
        else:
            q, k, v = rotary.split(qkv.clone())
            each.rope_write_cache(q, k, v, *rotary)
        results.append((q, *caches))
    for made, wanted in zip(*results, strict=True):
        close(made, wanted)


@pytest.mark.parametrize("shape", [(7, 3, 40), (7, 4, 8, 6)], ids=["convolution", "delta rule"])
def test_states_are_copied_from_row_to_row(kernels, device, shape):
    state = random(*shape, seed=13, device=device, dtype=torch.float32)
    before, sources = state.clone(), torch.tensor([3, 1], device=device)
    kernels.scatter_rows(state, torch.tensor([5, 2], device=device), kernels.gather_rows(state, sources))
    assert torch.equal(state[[5, 2]], before[[3, 1]])
    assert torch.equal(state[[0, 1, 3, 4, 6]], before[[0, 1, 3, 4, 6]])
