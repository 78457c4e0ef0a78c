"""Experts with GELU by the interpreter: the kit's problems, gates far from 0, and tiles that compute SwiGLU alone."""

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from conformance.small_problems import small
from kernels.devices import DEVICES
from outrider.device import KernelSet
from outrider_conformance.random_kernels.kernels import check_kernels
from outrider_triton.kernelset import TritonKernels
from outrider_triton.tiles.configs import LARGE_M


@pytest.mark.sample(1, per="change")
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("change", [{}, {"tokens": 1}, {"tokens": 40, "held": 2}], ids=["few", "one", "sorted"])
def test_the_kits_problems(kernels, invariant, change, device):
    kernels = kernels.batch_invariant() if invariant else kernels
    check_kernels(kernels, small("experts, expert_gelu", torch.float16, **change), device)
    check_kernels(kernels, small("experts_block, expert_gelu", torch.float16, **change | {"held": 0}), device)


@pytest.mark.sample(1, per="format")
@pytest.mark.parametrize("change", [{}, {"tokens": 40, "held": 2}], ids=["few", "sorted"])
@pytest.mark.parametrize("format", ["fp4", "fp8", "int4", "int8"])
def test_the_kits_problems_of_quantised_weights(kernels, change, format, device):
    check_kernels(kernels, small(f"experts_quantized, {format}, expert_gelu", torch.float16, **change), device)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # as on a device, where it gives infinity
def test_gates_far_from_zero(kernels, device):
    """The cube of a gate may exceed every number of the dtype."""
    gates = torch.tensor([-6e4, -300.0, -3.0, -0.0, 0.5, 3.0, 300.0, 6e4]).half()
    rows = torch.cat((gates, torch.ones_like(gates))).view(1, 16, 1).expand(1, 16, 8) / 8
    operands = torch.ones(1, 8).half(), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), rows.contiguous()
    down = torch.eye(8).half().unsqueeze(0)
    made = kernels.experts(*(each.to(device) for each in (*operands, down)), activation="gelu_tanh").cpu()
    torch.testing.assert_close(made, KernelSet().experts(*operands, down, activation="gelu_tanh"), rtol=2e-3, atol=1e-4)


def test_tiles_for_large_m_take_no_gelu(instead_of_launching):
    asked = []
    instead_of_launching(lambda kernel, *operands, **settings: asked.append((kernel.fn.__name__, settings.get("GELU"))))
    kernels, half = TritonKernels(DEVICES["H200"]), {"dtype": torch.bfloat16, "device": "meta"}
    x, chosen = torch.empty(4096, 512, **half), torch.empty(4096, 2, dtype=torch.int64, device="meta")
    stacks = torch.empty(8, 1024, 512, **half), torch.empty(8, 512, 512, **half)
    assert kernels.mixtures.experts_config(4096, 2, stacks[0])[1].descriptor == LARGE_M
    kernels.experts(x, chosen.float(), chosen, *stacks, activation="gelu_tanh")
    assert ("expert_gates", True) in asked
    assert "tall_experts" not in {name for name, _ in asked}
