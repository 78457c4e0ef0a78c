"""A chain of decoder layers in the order of a decode step, on which kernel choices are measured.

A GEMM that is fast in isolation may delay its neighbours: its occupancy decides whether the next kernel can start early
and prefetch its weights. Each choice is therefore timed within the chain.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.errors import TritonError

from outrider.device import (
    AttentionBlock,
    AttentionMetadata,
    AttentionTokens,
    DecoderShape,
    HeadNorms,
    LayerRows,
    MlpBlock,
    ResidualStream,
    RotaryArgs,
)
from outrider_triton.tiles.store.table import Table

if TYPE_CHECKING:
    from outrider_triton.kernelset import TritonKernels

Call = Callable[[int], object]
"""A function that enqueues the measured work once. Its argument is the index of the operand set."""


def microseconds(module: Any, call: Call, *, calls: int, replays: int = 5) -> float:
    """Return the device microseconds of one ``call``: the median of ``replays`` replays of a graph of ``calls`` calls.

    ``module`` is the device's torch module. Two warm-up calls compile all kernels before the capture.
    """
    for number in range(2):
        call(number)
    module.synchronize()
    stream = module.Stream()
    graph = module.CUDAGraph()
    with module.graph(graph, stream=stream):
        for number in range(calls):
            call(number)
    graph.replay()
    module.synchronize()
    times: list[float] = []
    for _ in range(replays):
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        with module.stream(stream):
            start.record()
            graph.replay()
            end.record()
        module.synchronize()
        times.append(1e3 * start.elapsed_time(end) / calls)
    graph.reset()
    return statistics.median(times)


LAYERS = 8
"""Maximum number of layers of a chain."""
_ROTATE_BYTES = 1 << 30
"""Bytes of weights of a chain that has fewer layers: several times any second-level cache."""
_PAGE = 16
_EPS = 1e-5


def normal(device: torch.device, *size: int) -> Tensor:
    """Return random bfloat16 values whose variance is one over the last dimension's size."""
    made: Tensor = torch.randn(size, dtype=torch.bfloat16, device=device) * size[-1] ** -0.5
    return made


class Chain:
    """Layers with random weights, whose kernels read their configurations from a table.

    The number of layers is such that no cache holds their weights, at most LAYERS and at most ``most_bytes``.
    """

    def __init__(
        self, shape: DecoderShape, kernels: TritonKernels, device: torch.device, *, most_bytes: int | None = None
    ) -> None:
        self.shape, self.device = shape, device
        self.kernels: TritonKernels = kernels.for_shape(shape)
        self._module = torch.get_device_module(device)
        attention, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        qkv, output = (attention + 2 * kv, shape.hidden), (shape.hidden, attention)
        sizes = (qkv, output, (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
        layer = 2 * sum(n * k for n, k in sizes)
        wanted = max(3, min(LAYERS, -(-_ROTATE_BYTES // layer)))
        self.layers = wanted if most_bytes is None else max(1, min(wanted, most_bytes // layer))
        self._weights = [tuple(normal(device, n, k) for n, k in sizes) for _ in range(self.layers)]
        self._norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)
        self._head_norm = torch.ones(shape.head_size, dtype=torch.bfloat16, device=device)
        self._bias = normal(device, attention + 2 * kv) if shape.bias else None

    def prepare(self, batch: int, width: int, context: int, *, capacity: int | None = None) -> None:
        """Create inputs and KV caches of ``batch`` sequences of ``context`` tokens, of which ``width`` are new.

        ``capacity``: the bound of cached tokens passed to kernels; None: ``context``.
        """
        shape, device, rows = self.shape, self.device, batch * width
        self.rows, self.groups, self.width, self.context = rows, batch * shape.kv_heads, width, context
        per = -(-context // _PAGE)
        table = (torch.randperm(batch * per, device=device) + 1).view(batch, per).to(torch.int32)
        lane = torch.arange(context - width, context, device=device)
        self._slots = (table[:, lane // _PAGE].to(torch.int64) * _PAGE + lane % _PAGE).flatten()
        self._metadata = AttentionMetadata(
            query_start=torch.arange(0, rows + 1, width, dtype=torch.int32, device=device),
            seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
            block_table=table,
            max_query=width,
            max_kv=capacity or context,
            settled=True,
        )
        size = (1 + batch * per, _PAGE, shape.kv_heads, shape.head_size)
        angle = torch.rand(rows, shape.head_size, device=device)
        angles = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
        self._layers = [self._layer(weights, angles, size) for weights in self._weights]
        self._residual = torch.randn(rows, shape.hidden, dtype=torch.bfloat16, device=device)

    def _layer(
        self, weights: tuple[Tensor, ...], angles: tuple[Tensor, Tensor], cache_size: tuple[int, ...]
    ) -> tuple[AttentionBlock, AttentionTokens, MlpBlock]:
        qkv, output, gate_up, down = weights
        k_cache, v_cache = (torch.randn(cache_size, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        rotary = RotaryArgs(*angles, k_cache, v_cache, self._slots)
        attention = AttentionBlock(
            norm=self._norm,
            eps=_EPS,
            qkv=qkv,
            qkv_bias=self._bias,
            output=output,
            scale=self.shape.head_size**-0.5,
            head_norms=HeadNorms(self._head_norm, self._head_norm, _EPS) if self.shape.qk_norm else None,
        )
        mlp = MlpBlock(norm=self._norm, eps=_EPS, gate_up=gate_up, down=down)
        return attention, AttentionTokens(self._metadata, rotary, LayerRows()), mlp

    def run_layers(self, _: int) -> Tensor:
        """Run all layers once and return the norm of the last layer's residual sum."""
        kernels = self.kernels
        x = ResidualStream(kernels, self._residual.clone())
        for attention, tokens, mlp in self._layers:
            x = kernels.mlp_block(kernels.attention_block(x, attention, tokens), mlp)
        return x.norm(self._norm, _EPS)

    def layer_us(self) -> float:
        """Return the device microseconds of one layer with the currently chosen kernels."""
        return microseconds(self._module, self.run_layers, calls=1, replays=7) / self.layers

    def attempt(self, table: Table) -> float:
        """Install ``table`` and return the microseconds of one layer; infinite if one of its kernels can't be compiled."""
        self.kernels.tiles.table = table
        try:
            return self.layer_us()
        except TritonError:
            return float("inf")
