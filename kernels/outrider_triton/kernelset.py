"""TritonKernels: a KernelSet in Triton with measured configurations, and derived ones where nothing was measured."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from outrider.device import KernelSet, QuantizedWeight, Weight
from outrider.device.kernels.weights import linear
from outrider_triton.blocks import TritonBlocks
from outrider_triton.bookkeeping.kernels import TritonBookkeeping
from outrider_triton.experts.kernels import TritonExperts
from outrider_triton.recurrent.kernels import TritonRecurrent
from outrider_triton.rows.kernels import TritonRows
from outrider_triton.selection.kernels import TritonChoices
from outrider_triton.tiles import variants
from outrider_triton.tiles.facts import DeviceFacts
from outrider_triton.tiles.store.choices import ChoiceRow, PromptStore, TunedStore, merge_choices
from outrider_triton.tiles.store.table import Table, layer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from outrider.device import DecoderShape, TuningProgress, TuningResult


class TritonKernels(TritonChoices, TritonBookkeeping, TritonRows, TritonExperts, TritonRecurrent, TritonBlocks):
    """Kernels in Triton for one device.

    ``facts`` describes the device. ``table`` has its measurements, or is None. Configurations that the table lacks are
    derived from the facts (:mod:`outrider_triton.tiles.derive.products`). ``device`` is where tuning runs. ``takes_over``
    uses choices that an earlier process stored on this machine.

    The references compute float64, which they do exactly, and shapes that a kernel's docstring excludes. The library
    computes float32 products.

    Each base class is one part of the set, in a module of its own, with all attributes that it uses. Composed kernels stand
    here, because a class that overrides their primitives has their defaults.
    """

    name = "triton"
    tunes = True

    def __init__(
        self,
        facts: DeviceFacts,
        *,
        table: Table | None = None,
        device: torch.device | None = None,
        takes_over: bool = True,
    ) -> None:
        super().__init__(facts, table)
        self.device, self.takes_over = device, takes_over
        kinds = type(self).__mro__
        declared = {name for kind in kinds[: kinds.index(TritonKernels)] for name in vars(kind)}
        if "cache_formats" not in declared:  # a subclass with its own cache kernels states its own formats
            # Without e4m3 instructions Triton has no conversions from and to e4m3.
            self.cache_formats = frozenset({"fp8"} if facts.fp8 else ())
        if "name" not in declared:
            tuned = f"derived for {facts.architecture}" if table is None else f"tuned for {table.device}"
            self.name = f"triton, {tuned}"

    def is_native(self, name: str, block: object = None) -> bool:
        """Return False also for a block with weights of 32 or 64 bits, whose products are the library's."""
        weight = getattr(block, "qkv", getattr(block, "gate_up", getattr(block, "projections", (None,))[0]))
        wide = isinstance(weight, Tensor) and weight.dtype.itemsize > 2
        return super().is_native(name, block) and not wide

    def every_variant(self) -> AbstractContextManager[None] | None:
        """Compile every table configuration of a weight, and every split of cached tokens and of the vocabulary."""
        return self._scope.entered()

    def compiled(self) -> Mapping[str, int]:
        """Return the number of compiled variants per kernel, read from Triton's caches."""
        return variants.compiled()

    def chosen(self) -> Mapping[str, str]:
        """Return the name of the kernel that computes prefill attention, and unusable candidates with reasons."""
        return self._prompts.reports

    def batch_invariant(self) -> KernelSet:
        """Return kernels with a fixed order of each row's sums (:mod:`outrider_triton.exact`)."""
        from outrider_triton.exact import ExactKernels

        return ExactKernels(self)

    # -- measurements ----------------------------------------------------------------------------------------------

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
        """Measure and store choices for bfloat16 and up to 128 tokens; see :mod:`outrider_triton.tiles.measure.tuner`."""
        from outrider_triton.tiles.measure.tuner import tune

        return tune(self, shapes, deadline_s=deadline_s, directory=directory, progress=progress)

    def use_tuned(self, directory: Path) -> int:
        """Load stored choices for this device name, torch, Triton and kernel sources; return how many.

        Also load the ranking of prefill kernels, and store later warm-up measurements there. Does nothing, and returns 0, if
        the set ignores earlier measurements.
        """
        if not self.takes_over:
            return 0
        store = TunedStore(directory, self.facts)
        rows = store.load()
        self.use_choices(rows)
        self._prompts.use_store(PromptStore(store.home / "prompts"))
        return len(rows)

    def use_choices(self, rows: Sequence[ChoiceRow]) -> None:
        """Use these tuned choices from now on, before those of the table and the estimates."""
        self.table = merge_choices(self.table, self.facts, rows)

    def fuse_embedding(
        self, tokens: Tensor, table: Tensor, hidden: Tensor, weight: Weight, bias: Tensor | None = None
    ) -> Tensor:
        """Join embeddings and states in one kernel before the product, which also quantises them for a quantised weight."""
        fused = None
        if isinstance(weight, QuantizedWeight):
            fused = self.fuse_embedding_quantized(tokens, table, hidden, weight, bias)
        return linear(self, self.embed_beside(tokens, table, hidden), weight, bias) if fused is None else fused

    attention_block, mlp_block = TritonBlocks.attention_block, TritonBlocks.mlp_block
    experts_block, recurrent_block = TritonBlocks.experts_block, TritonBlocks.recurrent_block
