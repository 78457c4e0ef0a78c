"""The least work of an iteration and of a prompt: bytes, operations of products, and the time of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from outrider.device import QuantizedWeight
from outrider_bench.rates import Cost, collective_seconds

if TYPE_CHECKING:
    from outrider.device import Weight
    from outrider.engine.engine import Engine
    from outrider.model import Decoder, DFlashHead, EagleHead, ModelConfig, MtpHead
    from outrider.model.layers.layer_weights import LayerWeights


def iteration_bytes(engine: Engine, *, batch: int, context: float) -> float | None:
    """Return the bytes that one decode iteration reads at least; None for an unknown model or proposer.

    The bytes are each weight once a pass, and the keys and values of the context. Activations don't count. Experts of a
    mixture count as often as tokens reach them if all experts are equally likely. The embedding table counts only if it is
    the output head too, since otherwise a few rows are read. A chain of K draft tokens costs K passes of the head, each with
    the output head. A block costs one pass, and the weights of keys and values once more for the text. A recurrent state is
    read and written.
    """
    from outrider.model import Decoder, EagleHead, MtpHead
    from outrider.speculative.eagle import EagleProposer
    from outrider.speculative.parallel import BlockProposer
    from outrider.speculative.proposer import NonSpeculativeProposer

    target = engine.model
    if not isinstance(target, Decoder):
        return None
    output = target.weights.head.nbytes
    tokens = batch * (1 + engine.proposer.depth)
    weights = _bytes(target.weights.layers) - _idle_expert_bytes(target, tokens) + target.weights.norm.nbytes + output
    cached = _cached_bytes(target.config, target.cache_dtype)
    proposer = engine.proposer
    if isinstance(proposer, EagleProposer) and isinstance(proposer.head, EagleHead | MtpHead):
        head = proposer.head
        passes = proposer.depth
        embedding = 0 if head.weights.embedding is None else head.weights.embedding.nbytes
        weights += passes * (_bytes(head.weights) - embedding + _output_head_bytes(head))
        cached += passes * _cached_bytes(head.config, target.dtype)
    elif isinstance(proposer, BlockProposer):
        drafter = proposer.head
        weights += _bytes(drafter.weights) + _key_value_weight_bytes(drafter) + _output_head_bytes(drafter)
        cached += _cached_bytes(drafter.config, target.dtype)
    elif not isinstance(proposer, NonSpeculativeProposer):
        return None
    recurrent = target.config.recurrent
    states = 0 if recurrent is None else 2 * recurrent.state_bytes(target.dtype)
    return float(weights + batch * (context * cached + states))


def iteration_cost(engine: Engine, *, batch: int, context: float) -> Cost | None:
    """Return the bytes (:func:`iteration_bytes`) and the operations of one decode iteration; None for an unknown model.

    A target's pass has a row for each verified token, and each of them needs the output head. A pass of a draft head has
    one row for each request, a block drafter as many as the target. A token costs two operations for each weight element of
    its products, four for each element of the keys that a query head reads, and those of its recurrent states.
    """
    from outrider.speculative.eagle import EagleProposer
    from outrider.speculative.parallel import BlockProposer

    needed = iteration_bytes(engine, batch=batch, context=context)
    if needed is None:
        return None
    target, proposer = cast("Decoder", engine.model), engine.proposer
    rows = batch * (1 + proposer.depth)
    output = 2 * _elements(target.weights.head)
    operations = rows * (_layer_operations(target.weights.layers, target.config, context) + output)
    if isinstance(proposer, EagleProposer | BlockProposer):
        head = cast("EagleHead | MtpHead | DFlashHead", proposer.head)
        drafted = rows if isinstance(proposer, BlockProposer) else batch * proposer.depth
        draft_output = 2 * _elements(cast("Decoder", head.output).weights.head)
        own = 0 if head.weights.fusion is None else 2 * _elements(head.weights.fusion)
        layers = head.weights.layers
        operations += drafted * (_layer_operations(layers, head.config, context) + draft_output + own)
    return Cost(needed, float(operations))


def prefill_cost(engine: Engine, tokens: int) -> Cost | None:
    """Return the bytes and the operations of the target's pass over a prompt, up to its first token; None for an unknown
    model.

    The bytes are each weight once, and the keys and values that are written. A query reads half of the prompt on average.
    """
    from outrider.model import Decoder

    target = engine.model
    if not isinstance(target, Decoder):
        return None
    output = target.weights.head
    weights = _bytes(target.weights.layers) - _idle_expert_bytes(target, tokens) + target.weights.norm.nbytes + output.nbytes
    cached = tokens * _cached_bytes(target.config, target.cache_dtype)
    layers = _layer_operations(target.weights.layers, target.config, tokens / 2)
    return Cost(float(weights + cached), tokens * layers + 2 * _elements(output))


def quantized_weights(engine: Engine) -> list[QuantizedWeight]:
    """Return the quantised weights of the target's first and last layers and of its output head."""
    from outrider.model import Decoder

    target = engine.model
    if not isinstance(target, Decoder):
        return []
    some = (target.weights.layers[0], target.weights.layers[-1], target.weights.head)
    experts = {id(layer.gate_up) for layer in some[:2] if layer.router is not None}
    experts |= {id(layer.down) for layer in some[:2] if layer.router is not None}
    return [each for each in _matrices(some) if isinstance(each, QuantizedWeight) and id(each) not in experts]


def _layer_operations(layers: Sequence[LayerWeights], config: ModelConfig, context: float) -> float:
    """Return the operations of one token in these layers, with ``context`` cached tokens."""
    operations = 0.0
    for layer in layers:
        matrices = float(sum(map(_elements, _matrices(layer))))
        if layer.router is not None and config.experts is not None:
            stacks = _elements(layer.gate_up) + _elements(layer.down)
            matrices -= stacks * (1 - config.experts.per_token / config.experts.count)
        operations += 2 * matrices
    for number in config.attention_layers:
        reach = config.windows[number] or context
        operations += 2 * config.num_heads * config.of_layer(number).attended_size * min(context, reach)
    recurrent = config.recurrent
    if recurrent is not None:
        state = recurrent.value_heads * recurrent.key_size * recurrent.value_size
        operations += 6 * state * len(recurrent.layers)  # the state times the key and the query, and its update
    return operations


def _elements(weight: Weight) -> int:
    return prod(weight.shape)


def _matrices(value: Any) -> Iterator[Tensor | QuantizedWeight]:
    """Yield the matrices among the weights of layers; stacked experts are one matrix."""
    return (weight for weight in _weights(value) if isinstance(weight, QuantizedWeight) or weight.dim() > 1)


def _weights(value: Any) -> Iterator[Tensor | QuantizedWeight]:
    if isinstance(value, Tensor | QuantizedWeight):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _weights(item)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _weights(getattr(value, each.name))


def _idle_expert_bytes(target: Decoder, tokens: int) -> float:
    """Return the mean number of bytes of the experts that no token reaches."""
    experts = target.config.experts
    if experts is None:
        return 0.0
    idle: float = (1 - experts.per_token / experts.count) ** tokens
    stacks = [layer for layer in target.weights.layers if layer.router is not None]
    return idle * sum(layer.gate_up.nbytes + layer.down.nbytes for layer in stacks)


def _output_head_bytes(head: EagleHead | MtpHead | DFlashHead) -> int:
    """Return the bytes of the output head that the draft samples with, that of the target or a copy; 0 for one of its own,
    which is among its weights.
    """
    from outrider.model import Decoder

    if head.has_own_output_head:
        return 0
    assert isinstance(head.output, Decoder)
    return head.output.weights.head.nbytes


def _key_value_weight_bytes(drafter: DFlashHead) -> float:
    """Return the bytes of the weights that compute keys and values."""
    config = drafter.config
    share = 2 * config.num_kv_heads / (config.num_heads + 2 * config.num_kv_heads)
    return share * sum(layer.qkv.nbytes for layer in drafter.weights.layers)


def _cached_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token of context, over all layers."""
    from outrider.model import KVCache

    return KVCache.page_bytes(config, page_size=1, dtype=dtype)


def _bytes(weights: Any) -> int:
    return sum(weight.nbytes for weight in {id(weight): weight for weight in _weights(weights)}.values())


# -- collectives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective call on one rank's tensor [rows, width]."""

    group: str
    """The group of ranks: ``"tensor"`` or ``"data"``."""
    kind: str
    """The kind of collective, as in ``outrider bench collectives``."""
    rows: int
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The number of collectives of one iteration, and the sum of their times in seconds."""

    calls: int
    seconds: float


def collective_costs(engine: Engine, batches: Iterable[int]) -> Mapping[int, CollectiveCost]:
    """Return the cost of an iteration's collectives for each batch size; zero for one rank.

    Every rank of the engine calls this function at the same time with the same ``batches``, while the engine is idle.
    """
    ranks = engine.model.ranks
    found: dict[int, CollectiveCost] = {}
    times: dict[CollectiveCall, float] = {}
    for batch in batches:
        calls = iteration_calls(engine, batch)
        for call in calls:
            if call not in times:
                group = ranks.tensor if call.group == "tensor" else ranks.data
                assert group is not None
                times[call] = collective_seconds(group, call.kind, call.rows, call.width, call.dtype)
        found[batch] = CollectiveCost(calls.total(), sum(count * times[call] for call, count in calls.items()))
    return found


def iteration_calls(engine: Engine, batch: int) -> Counter[CollectiveCall]:
    """Return the collectives of one decode iteration of ``batch`` requests with a chain of draft tokens; none for one rank.

    Tensor-parallel ranks reduce the embedding, the attention output and the MLP output, and gather logits. Two broadcasts
    share the draft tokens and the accepted tokens. Data-parallel ranks gather the tokens before each MLP and scatter its sum.
    """
    from outrider.model import Decoder
    from outrider.speculative.eagle import EagleProposer

    model = engine.model
    calls: Counter[CollectiveCall] = Counter()
    if model.ranks.is_single or not isinstance(model, Decoder):
        return calls
    depth = engine.proposer.depth
    rows = batch * (depth + 1)
    _count_pass(calls, model, rows, rows, layers=model.config.num_layers, normed=2 * model.config.num_layers)
    if isinstance(engine.proposer, EagleProposer):
        for number in range(depth):
            _count_pass(calls, model, batch if number else rows, batch, layers=1, normed=1)
    if model.ranks.tensor is not None:
        calls[CollectiveCall("tensor", "broadcast", batch, depth + 2, torch.int64)] += 2 if depth else 1
    return calls


def _count_pass(calls: Counter[CollectiveCall], model: Decoder, rows: int, sampled: int, *, layers: int, normed: int) -> None:
    """Add the collective calls of one forward pass to ``calls``. ``normed``: number of reductions that a norm follows."""
    ranks, width, dtype = model.ranks, model.config.hidden_size, model.dtype
    if ranks.tensor is not None:
        calls[CollectiveCall("tensor", "all_reduce", rows, width, dtype)] += 1 + (2 * layers - normed)
        calls[CollectiveCall("tensor", "all_reduce_rms_norm", rows, width, dtype)] += normed
        calls[CollectiveCall("tensor", "all_gather", sampled, model.weights.head.shape[0], dtype)] += 1
    if ranks.data is not None:
        calls[CollectiveCall("data", "all_gather", rows, width, dtype)] += layers
        calls[CollectiveCall("data", "reduce_scatter", rows, width, dtype)] += layers
