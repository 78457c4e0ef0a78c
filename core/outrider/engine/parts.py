"""What an iteration works with: one record, made by the assembly, owned by the engine."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.device import Backend
from outrider.engine.fences import FenceSet
from outrider.engine.state.attention_plans import AttentionPlans
from outrider.engine.state.buffers import StaticBuffers
from outrider.engine.state.options import OptionTable
from outrider.engine.state.plans import Plans
from outrider.engine.state.probes import Probes
from outrider.engine.state.results import Results
from outrider.engine.state.rows import FutureMap, LengthsOnHost, RowTable
from outrider.engine.state.staging import Staging
from outrider.engine.streams import Streams
from outrider.model import KVCache, LanguageModel, VisionTower
from outrider.speculative.proposer import Proposer


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
