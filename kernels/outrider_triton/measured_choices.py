"""TritonTuning: the part of the kernel set that measures kernels and loads stored measurements."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from outrider.device import DecoderShape, KernelSet
from outrider_triton.device_facts import DeviceFacts
from outrider_triton.prefill_attention import PromptAttention
from outrider_triton.table import ANY_LAYER, Table, layer_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outrider.device import TuningProgress, TuningResult
    from outrider_triton.tuned_store import ChoiceRow


@dataclass(slots=True)
class Measured:
    """The table in use, shared by a kernel set and all of its :meth:`TritonTuning.for_shape` copies."""

    table: Table | None


class TritonTuning(KernelSet):
    """Kernels whose configurations can be measured, stored and loaded."""

    tunes = True
    facts: DeviceFacts
    device: torch.device | None
    takes_over: bool
    _prompts: PromptAttention
    _measured: Measured
    _layer: str = ANY_LAYER

    @property
    def table(self) -> Table | None:
        """Return the measurements in use, or None."""
        return self._measured.table

    @table.setter
    def table(self, table: Table | None) -> None:
        self._measured.table = table

    def for_shape(self, shape: DecoderShape) -> Self:
        """Return a copy that shares all state and prefers choices measured in layers of this shape."""
        copied = copy(self)
        copied._layer = layer_of(shape)
        return copied

    def tune(
        self,
        shapes: Sequence[DecoderShape],
        *,
        deadline_s: float,
        directory: Path,
        progress: TuningProgress | None = None,
    ) -> tuple[TuningResult, ...]:
        """Measure and store choices for bfloat16 and up to 128 tokens; see :mod:`outrider_triton.tuner`."""
        from outrider_triton.kernelset import TritonKernels
        from outrider_triton.tuner import tune

        assert isinstance(self, TritonKernels)  # TritonKernels is the only subclass that tunes
        return tune(self, shapes, deadline_s=deadline_s, directory=directory, progress=progress)

    def use_tuned(self, directory: Path) -> int:
        """Load stored choices for this device name, torch, Triton and kernel sources; return how many.

        Also load the ranking of prefill kernels, and store later warm-up measurements there. Does nothing, and returns 0, if
        the set ignores earlier measurements.
        """
        if not self.takes_over:
            return 0
        from outrider_triton.prefill_ranking_store import PromptStore
        from outrider_triton.tuned_store import TunedStore

        store = TunedStore(directory, self.facts)
        rows = store.load()
        self.use_choices(rows)
        self._prompts.use_store(PromptStore(store.home / "prompts"))
        return len(rows)

    def use_choices(self, rows: Sequence[ChoiceRow]) -> None:
        """Use these choices from now on, before all others."""
        from outrider_triton.tuned_store import merge_choices

        self.table = merge_choices(self.table, self.facts, rows)
