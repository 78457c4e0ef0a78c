"""What the collectives of a decode iteration take at least: each measured alone, in the same run, on the same ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider_bench.collective_times import call_us

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.model import Decoder, ModelRanks


@dataclass(frozen=True, slots=True)
class Call:
    """A collective of one rank's tensor [rows, width]. ``kind``: as ``outrider bench collectives`` has it; ``group``: between
    which ranks, ``"tensor"`` or ``"data"``.
    """

    group: str
    kind: str
    rows: int
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """``calls`` collectives of one iteration, and their time one behind the other, ``seconds``."""

    calls: int
    seconds: float


def measure_collectives(engine: Engine, batches: Iterable[int]) -> Mapping[int, CollectiveCost]:
    """For each number of requests, what the collectives of an iteration take; none of one rank.

    Every rank of the engine calls this at the same time, with the same ``batches``, while nothing else of it runs.
    """
    ranks = engine.model.ranks
    found: dict[int, CollectiveCost] = {}
    times: dict[Call, float] = {}
    for batch in batches:
        calls = iteration_calls(engine, batch)
        for call in calls:
            if call not in times and ranks is not None:
                times[call] = _seconds(ranks, call)
        found[batch] = CollectiveCost(calls.total(), sum(count * times[call] for call, count in calls.items()))
    return found


def iteration_calls(engine: Engine, batch: int) -> Counter[Call]:
    """The collectives of one decode iteration of ``batch`` requests, with a chain of drafts; of one rank there are none.

    Counted as the model makes them: an embedding that is shared out is added up, a layer adds up behind its attention and
    behind its MLP, and logits are gathered. What the ranks decide goes out in two broadcasts, of the drafts and of what was
    accepted. Data-parallel ranks gather the tokens before each MLP, and scatter its sum.
    """
    from outrider.model import Decoder
    from outrider.speculative.eagle import EagleProposer

    model = engine.model
    calls: Counter[Call] = Counter()
    if model.ranks is None or not isinstance(model, Decoder):
        return calls
    depth = engine.proposer.depth
    rows = batch * (depth + 1)
    _count_pass(calls, model, rows, rows, layers=model.config.num_layers, normed=2 * model.config.num_layers)
    if isinstance(engine.proposer, EagleProposer):
        for number in range(depth):
            _count_pass(calls, model, batch if number else rows, batch, layers=1, normed=1)
    if model.ranks.tensor is not None:
        calls[Call("tensor", "broadcast", batch, depth + 2, torch.int64)] += 2 if depth else 1
    return calls


def _count_pass(calls: Counter[Call], model: Decoder, rows: int, sampled: int, *, layers: int, normed: int) -> None:
    """``normed``: of the two sums of each layer, those with a norm behind them."""
    ranks, width, dtype = model.ranks, model.config.hidden_size, model.dtype
    assert ranks is not None
    if ranks.tensor is not None:
        calls[Call("tensor", "all_reduce", rows, width, dtype)] += 1 + (2 * layers - normed)
        calls[Call("tensor", "all_reduce_rms_norm", rows, width, dtype)] += normed
        calls[Call("tensor", "all_gather", sampled, model.weights.head.shape[0], dtype)] += 1
    if ranks.data is not None:
        calls[Call("data", "all_gather", rows, width, dtype)] += layers
        calls[Call("data", "reduce_scatter", rows, width, dtype)] += layers


def _seconds(ranks: ModelRanks, call: Call) -> float:
    group = ranks.tensor if call.group == "tensor" else ranks.data
    assert group is not None
    return call_us(group, call.kind, call.rows, call.width, call.dtype) / 1e6
