"""The part of TritonKernels that is about measuring: the verb, and what it left on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.device import KernelSet
from outrider_triton.facts import DeviceFacts
from outrider_triton.prompts import PromptAttention
from outrider_triton.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outrider.device import DecoderShape, TuningProgress, TuningResult
    from outrider_triton.tuned_store import Row


class TritonTuning(KernelSet):
    """Kernels whose choices are measured, kept and taken over."""

    tunes = True
    facts: DeviceFacts
    table: Table | None
    device: torch.device | None
    takes_over: bool
    _prompts: PromptAttention

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
