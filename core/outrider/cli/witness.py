"""Kernels that also note the two likeliest logits of each row that is reported on, for ``outrider bench tokens``."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from torch import Tensor

from outrider.device import KernelSet

if TYPE_CHECKING:
    _Base = KernelSet
else:
    _Base = object


@dataclass(frozen=True, slots=True)
class TopTwo:
    """The two likeliest tokens of a row and their logits, as the kernels got them."""

    tokens: tuple[int, int]
    logits: tuple[float, float]


@dataclass(slots=True)
class Notes:
    """What was seen, call by call; tensors that are read when all is over."""

    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def last(self) -> TopTwo:
        """Of the first row of the last call."""
        values, ids = self.seen[-1]
        first, second = values[0].tolist()
        one, two = ids[0].tolist()
        return TopTwo((one, two), (first, second))


class _Witness(_Base):
    notes: Notes

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Note, then report as ever."""
        top = logits.flatten(0, -2).topk(2)
        self.notes.seen.append((top.values.double(), top.indices))
        return super().logprobs(logits, tokens, count)


def with_witness(kernels: KernelSet) -> tuple[KernelSet, Notes]:
    """``kernels`` that note the logits which log-probabilities are reported of. They aren't for graphs."""
    made, notes = copy.copy(kernels), Notes()
    made.__class__ = type("Witness", (_Witness, type(kernels)), {})
    cast(_Witness, made).notes = notes
    return made, notes
