"""How fast an iteration could be: the bytes that it must read, over the bandwidth that this device shows now."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.device import Backend, Stream
    from outrider.engine.engine import Engine
    from outrider.model import Decoder, DFlashHead, EagleHead, ModelConfig

_HOST_BYTES = 256 << 20
_DEVICE_BYTES = 2 << 30
_REPEATS = 7


def measure_bandwidth(backend: Backend) -> float:
    """Bytes a second, the best of a copy (read and written) and two reductions (read), each the median of a few runs.

    The buffers are larger than any cache, and at most a quarter of the memory that is free. Which of torch's operators comes
    nearest to what the memory can do differs from device to device: on an H200 sums of 64-bit integers do, by 4 %.
    """
    import torch

    memory = backend.memory_info()
    size = min(_DEVICE_BYTES, memory.free // 4) if memory.total else _HOST_BYTES
    stream = backend.create_stream("bandwidth")
    with backend.on(stream):
        source = torch.ones(size // 8 * 2, dtype=torch.float32, device=backend.device)
        target = torch.empty_like(source)
    copy = _median_seconds(backend, stream, lambda: target.copy_(source))
    read = min(_median_seconds(backend, stream, each.sum) for each in (source, source.view(torch.int64)))
    return max(2 * source.nbytes / copy, source.nbytes / read)


def _median_seconds(backend: Backend, stream: Stream, work: Callable[[], object]) -> float:
    timed = backend.capabilities.event_timing
    seconds = []
    for repeat in range(_REPEATS + 1):
        stream.synchronize()
        began = time.perf_counter()
        if timed:
            start, end = (backend.create_event(name, timing=True) for name in ("bandwidth-start", "bandwidth-end"))
            stream.record(start)
        with backend.on(stream):
            work()
        if timed:
            stream.record(end)
        stream.synchronize()
        if repeat:  # the first one warms up
            seconds.append(start.elapsed_ms(end) / 1e3 if timed else time.perf_counter() - began)
    return statistics.median(seconds)


def iteration_bytes(engine: Engine, *, batch: int, context: float) -> float | None:
    """Bytes that one decode iteration must read: each weight once a pass, and the keys and values of the context. None for a
    model or a proposer whose bytes aren't counted here.

    Of a mixture those experts count that its tokens go to, if each expert is as likely as the next.

    The embedding table counts only where the output head is the same tensor: otherwise a few rows of it are read. A
    chain of K drafted tokens costs K passes of the head, each with the target's output head; a block costs one, and one
    of the weights of keys and values, for the text. Activations don't count.
    """
    from outrider.model import Decoder, EagleHead
    from outrider.speculative.block import BlockProposer
    from outrider.speculative.eagle import EagleProposer
    from outrider.speculative.proposer import PlainProposer

    target = engine.model
    if not isinstance(target, Decoder):
        return None
    output = target.weights.head.nbytes
    tokens = batch * (1 + engine.proposer.depth)
    weights = _bytes(target.weights.layers) - _idle_bytes(target, tokens) + target.weights.norm.nbytes + output
    cached = _cached_bytes(target.config, target.cache_dtype.itemsize)
    proposer = engine.proposer
    if isinstance(proposer, EagleProposer) and isinstance(proposer.head, EagleHead):
        head = proposer.head
        passes = proposer.depth
        weights += passes * (_bytes(head.weights) - head.weights.embedding.nbytes + _drawn_bytes(head))
        cached += passes * _cached_bytes(head.config, target.dtype.itemsize)
    elif isinstance(proposer, BlockProposer):
        drafter = proposer.head
        weights += _bytes(drafter.weights) + _text_bytes(drafter) + _drawn_bytes(drafter)
        cached += _cached_bytes(drafter.config, target.dtype.itemsize)
    elif not isinstance(proposer, PlainProposer):
        return None
    return float(weights + batch * context * cached)


def _idle_bytes(target: Decoder, tokens: int) -> float:
    """Bytes of the experts that none of so many tokens goes to, on average."""
    experts = target.config.experts
    if experts is None:
        return 0.0
    idle: float = (1 - experts.per_token / experts.count) ** tokens
    stacks = [layer for layer in target.weights.layers if layer.router is not None]
    return idle * sum(layer.gate_up.nbytes + layer.down.nbytes for layer in stacks)


def _drawn_bytes(head: EagleHead | DFlashHead) -> int:
    """Bytes of the output head that drafts are drawn with: the target's, or a copy of it."""
    from outrider.model import Decoder

    assert isinstance(head.target, Decoder)
    return head.target.weights.head.nbytes


def _text_bytes(drafter: DFlashHead) -> float:
    """Bytes of the weights that make keys and values of the text."""
    config = drafter.config
    share = 2 * config.num_kv_heads / (config.num_heads + 2 * config.num_kv_heads)
    return share * sum(layer.qkv.nbytes for layer in drafter.weights.layers)


def _cached_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of keys and values for each token of context."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_size * itemsize


def _bytes(weights: Any) -> int:
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in _tensors(weights)}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _tensors(getattr(value, each.name))
