"""The least work of an iteration and of a prompt: bytes, operations of products, and the time of collectives."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from outrider.device import KernelSet, OutriderError, QuantizedWeight, Reduction
from outrider_bench.rates import Cost, seconds_on_stream

if TYPE_CHECKING:
    from outrider.device import Group, Stream, Weight
    from outrider.engine.engine import Engine
    from outrider.model import Decoder, DFlashHead, EagleHead, ModelConfig, ModelRanks, MtpHead
    from outrider.model.layers.layer_weights import LayerWeights
    from outrider_conformance.ranks.runner import RankHandle


def iteration_bytes(engine: Engine, *, batch: int, context: float) -> float | None:
    """Return the bytes that one decode iteration reads at least; None for an unknown model or proposer.

    The bytes are each weight once a pass, and the keys and values of the context. Activations don't count. Experts of a
    mixture count as often as tokens reach them if all experts are equally likely. The embedding table counts only if it is
    the output head too, since otherwise a few rows are read. A chain of K draft tokens costs K passes of the head, each with
    the output head. A block costs one pass, and the weights of keys and values once more for the text. A recurrent state is
    read and written, and with drafts read once more, because verification leaves the states unchanged.
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
    cached = _cached_bytes(target.config, target.cache_dtype.itemsize)
    proposer = engine.proposer
    if isinstance(proposer, EagleProposer) and isinstance(proposer.head, EagleHead | MtpHead):
        head = proposer.head
        passes = proposer.depth
        embedding = head.weights.embedding.nbytes if isinstance(head, EagleHead) else 0
        weights += passes * (_bytes(head.weights) - embedding + _output_head_bytes(head))
        cached += passes * _cached_bytes(head.config, target.dtype.itemsize)
    elif isinstance(proposer, BlockProposer):
        drafter = proposer.head
        weights += _bytes(drafter.weights) + _key_value_weight_bytes(drafter) + _output_head_bytes(drafter)
        cached += _cached_bytes(drafter.config, target.dtype.itemsize)
    elif not isinstance(proposer, NonSpeculativeProposer):
        return None
    recurrent = target.config.recurrent
    states = 0 if recurrent is None else (3 if proposer.depth else 2) * recurrent.state_bytes(target.dtype)
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
        inputs = [getattr(head.weights, name, None) for name in ("fusion", "projection")]
        own = 2 * sum(_elements(each) for each in inputs if each is not None)
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
    cached = tokens * _cached_bytes(target.config, target.cache_dtype.itemsize)
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
        operations += 4 * config.num_heads * config.head_size * min(context, reach)
    recurrent = config.recurrent
    if recurrent is not None:
        state = recurrent.value_heads * recurrent.key_size * recurrent.value_size
        operations += 6 * state * len(recurrent.layers)  # the state times the key and the query, and its update
    return operations


def _elements(weight: Weight) -> int:
    return prod(weight.shape)


def _matrices(value: Any) -> Iterator[Tensor | QuantizedWeight]:
    """Yield the matrices among the weights of layers; stacked experts are one matrix."""
    if isinstance(value, QuantizedWeight) or (isinstance(value, Tensor) and value.dim() > 1):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _matrices(item)
    elif is_dataclass(value) and not isinstance(value, Tensor):
        for each in fields(value):
            yield from _matrices(getattr(value, each.name))


def _idle_expert_bytes(target: Decoder, tokens: int) -> float:
    """Return the mean number of bytes of the experts that no token reaches."""
    experts = target.config.experts
    if experts is None:
        return 0.0
    idle: float = (1 - experts.per_token / experts.count) ** tokens
    stacks = [layer for layer in target.weights.layers if layer.router is not None]
    return idle * sum(layer.gate_up.nbytes + layer.down.nbytes for layer in stacks)


def _output_head_bytes(head: EagleHead | MtpHead | DFlashHead) -> int:
    """Return the bytes of the output head that the draft samples with: that of the target, or a copy."""
    from outrider.model import Decoder

    assert isinstance(head.output, Decoder)
    return head.output.weights.head.nbytes


def _key_value_weight_bytes(drafter: DFlashHead) -> float:
    """Return the bytes of the weights that compute keys and values."""
    config = drafter.config
    share = 2 * config.num_kv_heads / (config.num_heads + 2 * config.num_kv_heads)
    return share * sum(layer.qkv.nbytes for layer in drafter.weights.layers)


def _cached_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of the keys and values of one token of context, over all layers."""
    return 2 * len(config.attention_layers) * config.num_kv_heads * config.head_size * itemsize


def _bytes(weights: Any) -> int:
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in _tensors(weights)}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _tensors(getattr(value, each.name))


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


def measure_collectives(engine: Engine, batches: Iterable[int]) -> Mapping[int, CollectiveCost]:
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
                times[call] = _seconds(ranks, call)
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


def _seconds(ranks: ModelRanks, call: CollectiveCall) -> float:
    """Return the seconds of a call by the group's best implementation, in a graph if collectives can be captured."""
    group = ranks.tensor if call.group == "tensor" else ranks.data
    assert group is not None
    stream = group.backend.create_stream("collectives")
    fused = call.kind == "all_reduce_rms_norm"
    work, check = _implementation(group, stream, call.kind, call.rows, call.width, call.dtype, fused=fused)
    check()
    return _microseconds(group, stream, work)[0] / 1e6


_FUSED = "fused"
_CALLS = 64
_EAGER_CALLS = 8
_COLLECTIVE_REPEATS = 9
_EPS = 1e-6


def measure(rank: RankHandle, *, kinds: Sequence[str], tokens: Sequence[int], width: int, dtype: str) -> dict[str, Any]:
    """Return the measured rows of the table, timed by this rank's clock. Every rank calls this function at the same time."""
    backend = rank.backend
    group = backend.create_group("bench", ranks=range(rank.size), rank=rank.index, store=rank.store)
    stream = backend.create_stream("bench")
    rows = []
    try:
        for kind in kinds:
            for count in tokens:
                for way, work, check in _implementations(group, stream, kind, count, width, getattr(torch, dtype)):
                    check()
                    median, captured = _microseconds(group, stream, work)
                    rows.append({"kind": kind, "tokens": count, "way": way, "us": median, "in_graph": captured})
    finally:
        backend.synchronize()
        group.close()
    return {
        "rows": rows,
        "device": str(backend.device),
        "backend": backend.name,
        "versions": dict(backend.versions()),
        "bytes_per_token": width * getattr(torch, dtype).itemsize,
    }


def _implementations(
    group: Group, stream: Stream, kind: str, tokens: int, width: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Yield (name, call, check) for each implementation of a collective; fused kernels come last, then their choice."""
    kernels = group.backend.kernels_in_use
    first, *others = group.implementations
    has_others = kind in ("all_reduce", "all_reduce_rms_norm", "all_gather", "broadcast")
    is_fused = kind == "all_reduce_rms_norm" and type(kernels).all_reduce_rms_norm is not KernelSet.all_reduce_rms_norm
    for way in (first, *(others if has_others else [])):
        group.restrict_implementations(way)
        yield way, *_implementation(group, stream, kind, tokens, width, dtype, fused=False)
    for way in others if is_fused else []:
        group.restrict_implementations(way)
        yield f"{_FUSED}, {way}", *_implementation(group, stream, kind, tokens, width, dtype, fused=True)
    group.restrict_implementations(*group.implementations)
    if is_fused:
        yield _FUSED, *_implementation(group, stream, kind, tokens, width, dtype, fused=True)


def _implementation(
    group: Group, stream: Stream, kind: str, tokens: int, width: int, dtype: torch.dtype, *, fused: bool
) -> tuple[Callable[[], None], Callable[[], None]]:
    backend, size, rank = group.backend, group.size, group.rank
    device, kernels = backend.device, backend.kernels_in_use
    with backend.on(stream):
        x = torch.zeros((tokens, width), dtype=dtype, device=device)
        every = torch.zeros((size, tokens, width), dtype=dtype, device=device)
        part = torch.zeros_like(every)
        residual, weight = torch.zeros_like(x), torch.ones(width, dtype=dtype, device=device)

    def all_reduce_rms_norm() -> None:
        with backend.on(stream):
            if fused:
                kernels.all_reduce_rms_norm(x, residual, weight, _EPS, group=group, stream=stream)
            else:
                group.all_reduce(x, stream=stream)
                kernels.add_rms_norm(x, residual, weight, _EPS)

    def send() -> None:
        if rank == 0:
            group.send(x, to=1, stream=stream)
        elif rank == 1:
            group.receive(x, source=0, stream=stream)

    works: dict[str, tuple[Callable[[], None], Callable[[], Tensor], Callable[[], Any]]] = {
        "all_reduce": (lambda: group.all_reduce(x, stream=stream), lambda: x, lambda: sum(range(1, size + 1))),
        "all_reduce_rms_norm": (all_reduce_rms_norm, lambda: residual, lambda: sum(range(1, size + 1))),
        "all_gather": (lambda: group.all_gather(every, x, stream=stream), lambda: every[-1], lambda: size),
        "reduce_scatter": (
            lambda: group.reduce_scatter(x, every, stream=stream, reduction=Reduction.SUM),
            lambda: x,
            lambda: sum(range(1, size + 1)),
        ),
        "broadcast": (lambda: group.broadcast(x, root=size - 1, stream=stream), lambda: x, lambda: size),
        "all_to_all": (lambda: group.all_to_all(part, every, stream=stream), lambda: part[-1], lambda: size),
        "send": (send, lambda: x, lambda: 1 if rank < 2 else rank + 1),
    }
    work, made, expected = works[kind]

    def check() -> None:
        with backend.on(stream):
            x.fill_(rank + 1)
            every.fill_(rank + 1)
            residual.zero_()
        work()
        stream.synchronize()
        if kind != "send" or size > 1:
            found = made().float()
            if not bool((found == expected()).all()):
                raise OutriderError(
                    f"{kind} of {tokens} x {width} {dtype} gave {found.flatten()[:4].tolist()} on rank {rank}"
                )
        with backend.on(stream):
            for tensor in (x, every, residual):
                tensor.zero_()  # so that nothing overflows over many calls
        stream.synchronize()

    return work, check


def _microseconds(group: Group, stream: Stream, work: Callable[[], None]) -> tuple[float, bool]:
    """Return the microseconds of one call, the median of 9 runs, and True if they were replayed as a graph."""
    backend = group.backend
    captured = backend.capabilities.captures_graphs and backend.capabilities.captures_collectives
    calls = _CALLS if captured else _EAGER_CALLS

    def repeat_call(context: object = None) -> None:
        del context
        for _ in range(calls):
            work()

    enqueue: Callable[[], object] = repeat_call
    if captured:
        graph = backend.capture("collectives", repeat_call, stream=stream, inputs={}, outputs={})
        enqueue = partial(graph.replay, stream)
    seconds = []
    for _ in range(_COLLECTIVE_REPEATS + 1):
        stream.synchronize()
        with backend.on(stream):
            gate = torch.zeros(1, device=backend.device)
        group.all_reduce(gate, stream=stream)  # all ranks begin together
        seconds.append(seconds_on_stream(backend, stream, enqueue))
    return 1e6 * statistics.median(seconds[1:]) / calls, captured  # the first run warms up
