"""What a case of a kernel is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import KernelSet

Operands = Mapping[str, Tensor]
Call = Callable[[KernelSet, Operands], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Case:
    """``make(dtype)`` gives host operands; ``call`` runs the kernel and returns what it made or changed.

    ``exact``: the result is a choice (a token, a length), compared for equality; its logits stay in float32, where two
    devices draw the same. ``changed``: operands that the kernel writes in place, so that each run gets its own copy.
    """

    name: str
    make: Callable[[torch.dtype], dict[str, Tensor]]
    call: Call
    exact: bool = False
    changed: tuple[str, ...] = ()
