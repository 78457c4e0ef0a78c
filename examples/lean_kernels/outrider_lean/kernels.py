"""LeanKernels: three kernels; all others are those of the reference."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from outrider.device import KernelSet


class LeanKernels(KernelSet):
    """Kernels that consist of torch operators only, whose schemas declare their reads and writes."""

    name = "lean"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
