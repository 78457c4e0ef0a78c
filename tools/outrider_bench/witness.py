"""Kernels that also record the logits behind reported log-probabilities, for ``outrider bench tokens``."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from outrider.device import KernelSet, WrappedKernels


@dataclass(slots=True)
class Notes:
    """The recorded logits, call by call; read them when decoding is over."""

    seen: list[Tensor] = field(default_factory=list)

    def last(self) -> list[float]:
        """The logits [V] of the first row of the last call, as the kernels got them."""
        row: list[float] = self.seen[-1].tolist()
        return row


class _Witness(WrappedKernels):
    def __init__(self, inner: KernelSet) -> None:
        super().__init__(inner)
        self.notes = Notes()

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Record the logits, then report as usual."""
        self.notes.seen.append(logits.flatten(0, -2)[0].double())
        return super().logprobs(logits, tokens, count)


def with_witness(kernels: KernelSet) -> tuple[KernelSet, Notes]:
    """``kernels`` that also record the logits behind reported log-probabilities. They don't work in graphs."""
    witness = _Witness(kernels)
    return witness, witness.notes
