"""The part of TritonKernels that is about measuring: the verb, and what it left on this machine."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from outrider.device import DecoderShape, KernelSet
from outrider_triton.facts import DeviceFacts
from outrider_triton.prompts import PromptAttention
from outrider_triton.table import ANY, Table, layer_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outrider.device import TuningProgress, TuningResult
    from outrider_triton.tuned_store import Row


@dataclass(slots=True)
class Measured:
    """The table in use, of a kernel set and of all that :meth:`TritonTuning.for_shape` made of it."""

    table: Table | None


class TritonTuning(KernelSet):
    """Kernels whose choices are measured, kept and taken over."""

    tunes = True
    facts: DeviceFacts
    device: torch.device | None
    takes_over: bool
    _prompts: PromptAttention
    _measured: Measured
    _layer: str = ANY

    @property
    def table(self) -> Table | None:
        """What was measured; None: nothing."""
        return self._measured.table

    @table.setter
    def table(self, table: Table | None) -> None:
        self._measured.table = table

    def for_shape(self, shape: DecoderShape) -> Self:
        """A copy that shares everything, and to which the choices of such layers go first."""
        made = copy(self)
        made._layer = layer_of(shape)
        return made

    def tune(
        self,
        shapes: Sequence[DecoderShape],
        *,
        deadline_s: float,
        directory: Path,
        progress: TuningProgress | None = None,
    ) -> tuple[TuningResult, ...]:
        """See :mod:`outrider_triton.tuner`: for bfloat16, up to 128 tokens."""
        from outrider_triton.kernelset import TritonKernels
        from outrider_triton.tuner import tune

        assert isinstance(self, TritonKernels)  # this is a part of them
        return tune(self, shapes, deadline_s=deadline_s, directory=directory, progress=progress)

    def use_tuned(self, directory: Path) -> int:
        """Those of a device of this name, this torch, this Triton and these kernels; none where nothing is taken over.

        Which kernel attends over prompts, measured where an engine warms up, is taken over and kept there as well.
        """
        if not self.takes_over:
            return 0
        from outrider_triton.prompt_store import PromptStore
        from outrider_triton.tuned_store import TunedStore

        store = TunedStore(directory, self.facts)
        rows = store.read()
        self.take(rows)
        self._prompts.keep_in(PromptStore(store.home / "prompts"))
        return len(rows)

    def take(self, rows: Sequence[Row]) -> None:
        """Use these choices from now on, before all others."""
        from outrider_triton.tuned_store import merged

        self.table = merged(self.table, self.facts, rows)
