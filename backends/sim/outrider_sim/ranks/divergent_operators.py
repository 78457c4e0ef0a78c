"""Injected differences between one rank's device or host and the other ranks'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

DIVERGENCES: Mapping[str, str] = MappingProxyType(
    {
        "tie": "of equal values, argmax, max and topk take the last where other devices take the first",
        "ulp": "products of matrices are one unit in the last place larger",
        "slow": "the calling host thread goes on only when nothing else can",
    }
)
"""The kinds of injected differences, with their effects. A difference lasts until the next reset."""

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul"})

Run = Callable[..., Any]


def _last(dim: int, tensor: Tensor, indices: Tensor) -> Tensor:
    return tensor.shape[dim] - 1 - indices


def _argmax(tensor: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if dim is None:
        flat = tensor.flatten()
        return _last(0, flat, flat.flip(0).argmax())
    return _last(dim, tensor, tensor.flip(dim).argmax(dim, keepdim=keepdim))


def _max(tensor: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = tensor.flip(dim).max(dim, keepdim=keepdim)
    return values, _last(dim, tensor, indices)


def _topk(tensor: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = tensor.flip(dim).topk(k, dim, largest, sorted)
    return values, _last(dim, tensor, indices)


_TIES: Mapping[str, Run] = MappingProxyType({"aten::argmax": _argmax, "aten::max.dim": _max, "aten::topk": _topk})


def divergent_implementation(kinds: frozenset[str], name: str, run: Run) -> Run | None:
    """Return the function that runs operator `name` on a device with divergences `kinds`, or None for the usual function."""
    found = _TIES.get(name) if "tie" in kinds else None
    if "ulp" in kinds and name.partition(".")[0] in _PRODUCTS:
        found = _larger(run)
    return found


def _larger(run: Run) -> Run:
    def larger(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = run(*args, **kwargs)
        return torch.nextafter(result, torch.full_like(result, float("inf"))) if result.dtype.is_floating_point else result

    return larger
