"""A fixed case of a kernel: its operands, and the call that a backend and the reference both run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.device import KernelSet

Operands = Mapping[str, Tensor]
Call = Callable[[KernelSet, Operands], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel with fixed operands, compared with the reference kernel."""

    name: str
    make: Callable[[torch.dtype], dict[str, Tensor]]
    """Return the host operands in this dtype."""
    call: Call
    """Run the kernel, and return its results followed by the operands that it wrote."""
    exact: bool = False
    """The results are tokens or lengths, compared for equality. Logits stay in float32, where two devices draw the same."""
    changed: tuple[str, ...] = ()
    """Operands that the kernel writes in place. Each run gets its own copy of them."""


def call_kernel(kernels: KernelSet, method: str, arguments: tuple[Any, ...], o: Operands, **options: Any) -> tuple[Any, ...]:
    """Call ``method`` and return its results as a tuple, which is empty for a kernel that only writes operands.

    An argument that is a string names an operand of ``o``; an operand that is absent is passed as None.
    """
    made = getattr(kernels, method)(*(o.get(each) if isinstance(each, str) else each for each in arguments), **options)
    return () if made is None else made if isinstance(made, tuple) else (made,)
