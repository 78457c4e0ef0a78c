"""`out=` overloads that torch carries out otherwise for a tensor in Python, and then leaves the given tensor as it was.

They are done here as the operator without `out=`, and a copy.
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


def kernels() -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Name with overload, and what to do."""
    for name in _NAMES:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            if any(argument.name == "out" for argument in getattr(packet, overload)._schema.arguments):
                yield f"{name}.{overload}", _kernel(packet)
