"""Muon for the matrices of the layers, AdamW for the other parameters, one learning-rate factor for both."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalise(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an approximation of the nearest orthogonal matrix of each matrix in ``grad``, by five Newton-Schulz steps in
    ``dtype``.
    """
    x = grad.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x


class Optimizer:
    """The optimizer of a module's parameters: Muon for matrices, AdamW for the others. `step(factor)` scales the peak
    learning rates.
    """

    def __init__(self, module: nn.Module, muon_lr: float, adam_lr: float, weight_decay: float) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        adam_parameters: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():
            if parameter.ndim == 2 and (".self_attn." in name or ".mlp." in name):
                groups[parameter.shape].append(parameter)
            else:
                adam_parameters.append(parameter)
        self.groups = [(ps, torch.zeros_like(torch.stack([p.data for p in ps]))) for ps in groups.values()]
        cuda = adam_parameters[0].is_cuda
        self.adam = torch.optim.AdamW(adam_parameters, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.muon_lr, self.adam_lr, self.weight_decay = muon_lr, adam_lr, weight_decay

    @torch.no_grad()
    def step(self, factor: float) -> None:
        lr = self.muon_lr * factor
        for parameters, momentum in self.groups:
            grad = torch.stack([p.grad for p in parameters if p.grad is not None])
            momentum.lerp_(grad, 0.05)
            update = orthogonalise(grad.lerp(momentum, 0.95), self.dtype)
            update = update * max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            data = [p.data for p in parameters]
            torch._foreach_mul_(data, 1.0 - lr * self.weight_decay)
            torch._foreach_add_(data, list(update.float().unbind(0)), alpha=-lr)
            for p in parameters:
                p.grad = None
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * factor
        self.adam.step()
        self.adam.zero_grad()
