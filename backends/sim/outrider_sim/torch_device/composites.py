"""Composite operators that torch runs differently for tensors implemented in Python.

Some `out=` overloads then don't write the passed tensor. They are replaced by the operator without `out=` and a copy.
`ctc_loss` is replaced because torch's composite then rejects lengths in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_NAMES = ("matmul", "linalg_matrix_rank")


def _kernel(packet: Any) -> Callable[..., Tensor]:
    def run(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result: Tensor = packet(*args, **kwargs)
        if not torch.can_cast(result.dtype, out.dtype):
            raise RuntimeError(f"result type {result.dtype} can't be cast to the dtype of out, {out.dtype}")
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return run


def _ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *rest: Any) -> Tensor:
    result: Tensor = torch.ops.aten.ctc_loss.IntList(
        log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), *rest
    )
    return result


def kernels() -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield the operators' names with overload, and their implementations."""
    yield "ctc_loss.Tensor", _ctc_loss
    for name in _NAMES:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            if any(argument.name == "out" for argument in getattr(packet, overload)._schema.arguments):
                yield f"{name}.{overload}", _kernel(packet)
