"""What an iteration works with: one record, made by the assembly, owned by the engine."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.device import Backend, Stream
from outrider.engine.attention_plans import AttentionPlans
from outrider.engine.buffers import StaticBuffers
from outrider.engine.fences import FenceSet
from outrider.engine.options import OptionTable
from outrider.engine.plans import Plans
from outrider.engine.probes import Probes
from outrider.engine.results import Results
from outrider.engine.rows import FutureMap, LengthsOnHost, RowTable
from outrider.engine.staging import Staging
from outrider.model import KVCache, LanguageModel, VisionTower
from outrider.speculative.proposer import Proposer


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of an engine. ``plan`` and ``copy`` may be forward itself; ``update`` rebinds host
    parameters of graphs, where there are such.
    """

    schedule: Stream
    forward: Stream
    plan: Stream
    copy: Stream
    update: Stream | None = None

    @property
    def all(self) -> tuple[Stream, ...]:
        """Each of them once."""
        streams = (self.schedule, self.forward, self.plan, self.copy, self.update)
        return tuple(dict.fromkeys(stream for stream in streams if stream is not None))


@dataclass(frozen=True, slots=True)
class StepParts:
    """What the step works with; alive as long as the engine."""

    backend: Backend
    streams: Streams
    fences: FenceSet
    model: LanguageModel
    cache: KVCache
    proposer: Proposer
    rows: RowTable
    options: OptionTable
    future: FutureMap
    buffers: StaticBuffers
    plans: Plans
    attention: AttentionPlans
    probes: Probes
    staging: Staging
    results: Results
    lengths: LengthsOnHost
    page_size: int
    max_context: int
    vision: VisionTower | None = None
