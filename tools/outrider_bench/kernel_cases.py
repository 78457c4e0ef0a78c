"""Cases of ``outrider bench kernels``: a decoder's shapes at several batch sizes, with the bytes that a kernel must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.device.graph import HostParam
from outrider.device.kernels.blocks import AttentionBlock, AttentionTokens, LayerRows, MlpBlock
from outrider.device.kernels.kernelset import KernelSet
from outrider.device.kernels.metadata import (
    AttentionMetadata,
    AttentionShape,
    DecoderShape,
    HeadNorms,
    RequestInputs,
    RequestRows,
    RotaryArgs,
)
from outrider.device.kernels.residual import ResidualStream
from outrider.device.kernels.weight_formats import weight_format
from outrider.device.kernels.weights import QuantizedWeight

if TYPE_CHECKING:
    from outrider.device.stream import Stream

_CACHES = 8
_PAGE = 16
_SCALE = 0.09
_EPS = 1e-5
_CONTEXT = 640
_BATCHES = ((1, 1), (1, 4), (8, 4), (32, 4))
"""Numbers of requests and of tokens per request: non-speculative decoding, and verification of a chain of 3 draft tokens."""


@dataclass(frozen=True, slots=True)
class TimedKernelCase:
    """One call of ``kernel``: ``call(kernels, i)`` runs it on the i-th of a few sets of operands.

    ``bytes`` is the minimum that the call moves: each required operand read once, each result written once. ``operations``
    are those of products; 0 for kernels that only move data. ``planned`` returns the case with attention planned by these
    kernels, on a stream in whose scope the caller is; None if the kernel plans nothing.
    """

    kernel: str
    name: str
    bytes: int
    call: Callable[[KernelSet, int], object]
    planned: Callable[[KernelSet, Stream], TimedKernelCase] | None = None
    operations: int = 0


def kernel_cases(shape: DecoderShape, *, dtype: torch.dtype, device: torch.device) -> Iterator[TimedKernelCase]:
    """Yield the cases of all kernels except GEMMs. Operands are created on demand, in the caller's stream scope."""
    for batch, width in _BATCHES:
        make = _Maker(shape, batch, width, dtype, device)
        yield from make.rows()
        yield from make.cache()
        yield from make.choices()
        if width > 1:
            yield from make.bookkeeping()
    yield _prefill(shape, dtype, device)


def product_cases(
    shape: DecoderShape,
    *,
    tokens: int,
    rotate_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    format: str | None = None,
) -> Iterator[TimedKernelCase]:
    """Yield GEMMs of a decoder and of a draft, and the blocks of a layer, for ``tokens`` tokens.

    Random weights rotate among ``rotate_bytes`` bytes. ``format``: name of the weights' quantization, in which only the GEMMs
    of the decoder are yielded.
    """
    attention = shape.heads * shape.head_size
    products = {
        "qkv": (attention + 2 * shape.kv_heads * shape.head_size, shape.hidden),
        "output": (shape.hidden, attention),
        "gate and up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
        "head": (shape.vocabulary, shape.hidden),
    }
    if format is None:
        products["fusion of a draft"] = (shape.hidden, shape.fused)
    for name, (rows, columns) in products.items():
        yield _product(name, rows, columns, tokens, rotate_bytes, dtype, device, format)
    if format is None:
        yield from _blocks(shape, tokens, rotate_bytes, dtype, device)


def _blocks(
    shape: DecoderShape, tokens: int, rotate_bytes: int, dtype: torch.dtype, device: torch.device
) -> Iterator[TimedKernelCase]:
    """Yield the blocks of a layer, with the norm that adds their contribution. Each token attends to itself alone."""
    attention = shape.heads * shape.head_size
    heads = attention + 2 * shape.kv_heads * shape.head_size
    hidden, inner, size = shape.hidden, shape.inner, dtype.itemsize
    copies = max(2, -(-rotate_bytes // ((heads + 3 * inner + attention) * hidden * size)))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device).mul_(size[-1] ** -0.5)

    residual, norm = normal(tokens, hidden), torch.ones(hidden, dtype=dtype, device=device)
    angles = torch.rand(tokens, shape.head_size, device=device)
    k_cache, v_cache = (normal(1 + tokens, 1, shape.kv_heads, shape.head_size) for _ in range(2))
    slots = torch.arange(1, tokens + 1, device=device)
    metadata = AttentionMetadata(
        query_start=torch.arange(tokens + 1, dtype=torch.int32, device=device),
        seq_lens=torch.ones(tokens, dtype=torch.int32, device=device),
        block_table=slots.unsqueeze(1).to(torch.int32),
        max_query=1,
        max_kv=1,
        uniform=True,
    )
    rotary = RotaryArgs(angles.cos().to(dtype), angles.sin().to(dtype), k_cache, v_cache, slots)
    batch = AttentionTokens(metadata, rotary, LayerRows())
    attentions = [
        AttentionBlock(norm=norm, eps=_EPS, qkv=normal(heads, hidden), output=normal(hidden, attention), scale=_SCALE)
        for _ in range(copies)
    ]
    mlps = [
        MlpBlock(norm=norm, eps=_EPS, gate_up=normal(2 * inner, hidden), down=normal(hidden, inner)) for _ in range(copies)
    ]
    rows = 3 * residual.nbytes
    yield TimedKernelCase(
        "attention_block",
        f"attention block, {tokens} tokens",
        hidden * (heads + attention) * size + rows + tokens * (heads + 2 * attention) * size,
        lambda k, i: k.attention_block(ResidualStream(k, residual), attentions[i % copies], batch).norm(norm, _EPS),
        operations=2 * tokens * hidden * (heads + attention),
    )
    yield TimedKernelCase(
        "mlp_block",
        f"MLP block, {tokens} tokens",
        3 * hidden * inner * size + rows + 2 * tokens * inner * size,
        lambda k, i: k.mlp_block(ResidualStream(k, residual), mlps[i % copies]).norm(norm, _EPS),
        operations=6 * tokens * hidden * inner,
    )


def _product(
    name: str,
    rows: int,
    columns: int,
    tokens: int,
    rotate_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    format: str | None,
) -> TimedKernelCase:
    def weight() -> Tensor | QuantizedWeight:
        if format is not None:
            return weight_format(format).random_weight(rows, columns, device=device, scales_dtype=dtype)
        return torch.randn(rows, columns, dtype=dtype, device=device).mul_(columns**-0.5)

    first = weight()
    copies = max(2, -(-rotate_bytes // first.nbytes))
    weights = [first, *(weight() for _ in range(copies - 1))]
    x = torch.randn(tokens, columns, dtype=dtype, device=device)
    kernel = "linear" if format is None else "linear_quantized"
    return TimedKernelCase(
        kernel,
        f"{name}, {tokens} tokens" if format is None else f"{format} {name}, {tokens} tokens",
        first.nbytes + x.nbytes + tokens * rows * dtype.itemsize,
        lambda kernels, number: getattr(kernels, kernel)(x, weights[number % copies]),
        operations=2 * tokens * rows * columns,
    )


class _Maker:
    """The maker of the timed cases for one batch."""

    def __init__(self, shape: DecoderShape, batch: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._batch, self._width, self._dtype, self._device = shape, batch, width, dtype, device
        self._count = batch * width
        self._label = f"batch {batch}, {width} tokens each"

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=self._dtype, device=self._device)

    def rows(self) -> Iterator[TimedKernelCase]:
        """Yield the cases of norms, SwiGLU and row gathers."""
        shape, count, item = self._shape, self._count, self._dtype.itemsize
        x, residual, weight = (
            self._normal(*size) for size in ((count, shape.hidden), (count, shape.hidden), (shape.hidden,))
        )
        row = x.nbytes
        yield TimedKernelCase("rms_norm", self._label, 2 * row + weight.nbytes, lambda k, i: k.rms_norm(x, weight, 1e-5))
        yield TimedKernelCase(
            "add_rms_norm", self._label, 4 * row + weight.nbytes, lambda k, i: k.add_rms_norm(x, residual, weight, 1e-5)
        )
        gates = self._normal(count, 2 * shape.inner)
        yield TimedKernelCase("silu_mul", self._label, 3 * count * shape.inner * item, lambda k, i: k.silu_mul(gates))
        state, values = self._normal(257, shape.hidden), self._normal(self._batch, shape.hidden)
        rows = torch.randperm(256, device=self._device)[: self._batch] + 1
        yield TimedKernelCase("gather_rows", self._label, 2 * values.nbytes, lambda k, i: k.gather_rows(state, rows))
        wide = self._normal(count, 3 * shape.hidden)[:, shape.hidden : 2 * shape.hidden]
        yield TimedKernelCase("copy_rows", self._label, 2 * row, lambda k, i: k.copy_rows(x, wide))
        yield TimedKernelCase(
            "scatter_rows", self._label, 2 * values.nbytes, lambda k, i: k.scatter_rows(state, rows, values)
        )

    def cache(self) -> Iterator[TimedKernelCase]:
        """Yield the cases of kernels that read or write the KV cache."""
        shape, batch, width, device = self._shape, self._batch, self._width, self._device
        size = shape.head_size
        per = _CONTEXT // _PAGE
        pages = (1 + batch * per, _PAGE, shape.kv_heads, size)
        caches = [(self._normal(*pages), self._normal(*pages)) for _ in range(_CACHES)]
        table = (torch.randperm(batch * per, device=device) + 1).view(batch, per).to(torch.int32)
        q, key, value = self._normal(self._count, shape.heads + 2 * shape.kv_heads, size).split(
            (shape.heads, shape.kv_heads, shape.kv_heads), dim=1
        )
        cos, sin = self._normal(self._count, size), self._normal(self._count, size)
        lane = torch.arange(_CONTEXT - width, _CONTEXT, device=device)
        slots = (table[:, lane // _PAGE].to(torch.int64) * _PAGE + lane % _PAGE).flatten()
        item = self._dtype.itemsize
        token = self._count * size * item
        yield TimedKernelCase(
            "rope_write_cache",
            self._label,
            token * (2 * shape.heads + 5 * shape.kv_heads) + 2 * token,
            lambda k, i: k.rope_write_cache(q, key, value, cos, sin, *caches[i % _CACHES], slots),
        )
        made, norms = self._normal(self._count, shape.heads + 2 * shape.kv_heads, size).flatten(1), self._normal(2, size)
        yield TimedKernelCase(
            "head_norm_rope_write_cache",
            self._label,
            token * (2 * shape.heads + 4 * shape.kv_heads) + 2 * token + norms.nbytes,
            lambda k, i: k.head_norm_rope_write_cache(
                made, HeadNorms(norms[0], norms[1], 1e-5), RotaryArgs(cos, sin, *caches[i % _CACHES], slots)
            ),
        )
        cached = 2 * batch * _CONTEXT * shape.kv_heads * size * item
        for tree in (False, True)[: 1 + (width > 1)]:
            metadata = AttentionMetadata(
                query_start=torch.arange(0, self._count + 1, width, dtype=torch.int32, device=device),
                seq_lens=torch.full((batch,), _CONTEXT, dtype=torch.int32, device=device),
                block_table=table,
                max_query=width,
                max_kv=_CONTEXT,
                tree_mask=torch.ones(self._count, width, dtype=torch.bool, device=device).tril() if tree else None,
                uniform=True,
            )
            yield self._attention(q, caches, metadata, cached + 2 * token * shape.heads)
        if width > 1:
            moved = slots.view(batch, width)[:, 1:].flatten()
            count = 4 * moved.numel() * shape.kv_heads * size * item
            yield TimedKernelCase(
                "move_cache", self._label, count, lambda k, i: k.move_cache(*caches[i % _CACHES], moved, moved)
            )

    def _attention(
        self, q: Tensor, caches: list[tuple[Tensor, Tensor]], metadata: AttentionMetadata, moved: int
    ) -> TimedKernelCase:
        tree = ", tree" if metadata.tree_mask is not None else ""
        return _attend(f"{self._label}{tree}, {_CONTEXT} cached", q, caches, metadata, moved)

    def bookkeeping(self) -> Iterator[TimedKernelCase]:
        """Yield the cases of kernels between the model passes. They move few bytes, so bandwidth says little about them."""
        batch, path, hidden, device = self._batch, self._width, self._shape.hidden, self._device
        pages = _CONTEXT // _PAGE

        def numbers(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.ones(size, dtype=dtype, device=device)

        def case(kernel: str, operands: tuple[Tensor, ...], call: Callable[[KernelSet, int], object]) -> TimedKernelCase:
            return TimedKernelCase(kernel, self._label, sum(operand.nbytes for operand in operands), call)

        rows = torch.arange(1, batch + 1, device=device)
        lens, accepted, temperature = numbers(batch), numbers(batch), numbers(batch, dtype=torch.float32)
        tables, found = numbers(batch, pages, dtype=torch.int32), numbers(batch, 10)
        by_row = RequestRows(
            numbers(257), numbers(257), numbers(257, dtype=torch.float32), numbers(257, pages, dtype=torch.int32)
        )
        own = RequestInputs(numbers(batch), numbers(batch), numbers(batch), numbers(batch), temperature, tables)
        yield case(
            "gather_requests",
            (*own, *own, found),
            lambda k, i: k.gather_requests(rows, by_row[0], by_row, own, found, lens_by_row=True),
        )
        state, copy, look = self._normal(257, hidden), self._normal(batch, hidden), found[:, :2]
        yield case("gather_checked", (copy, copy), lambda k, i: k.gather_checked(state, rows, copy, look, bounds=None))
        logits = self._normal(batch, path * self._shape.vocabulary)
        yield case("find_nan", (logits,), lambda k, i: k.find_nan(logits, look))
        places, slots, ends = numbers(batch, path), numbers(batch, path), numbers(batch, 1, dtype=torch.int32)
        yield case(
            "place_tokens",
            (lens, tables, places, slots, ends),
            lambda k, i: k.place_tokens(lens, tables, _PAGE, _CONTEXT, places, slots, ends),
        )
        lengths, last, results, kept = numbers(257), numbers(257), numbers(batch, path + 1), numbers(batch)
        decided = (places, accepted)
        yield case(
            "publish_accepted",
            (rows, lens, *decided, *decided, results),
            lambda k, i: k.publish_accepted(rows, lens, decided, lengths, last, results, (slots, kept)),
        )
        yield case(
            "place_accepted",
            (lens, *decided, slots, kept, kept),
            lambda k, i: k.place_accepted(lens, *decided, slots, kept, kept),
        )
        table, features, fusion = (
            self._normal(rows, hidden * more) for rows, more in ((1024, 1), (self._count, 1), (hidden, 2))
        )
        token = places.flatten()
        yield case(
            "fuse_embedding", (features,) * 3 + (fusion,), lambda k, i: k.fuse_embedding(token, table, features, fusion)
        )

    def choices(self) -> Iterator[TimedKernelCase]:
        """Yield the cases of sampling and acceptance kernels."""
        logits = self._normal(self._batch, self._width, self._shape.vocabulary)
        for hot in (False, True):
            yield from self._choices(logits, hot)

    def _choices(self, logits: Tensor, hot: bool) -> Iterator[TimedKernelCase]:
        batch, width, device, vocabulary = self._batch, self._width, self._device, self._shape.vocabulary
        seeds = torch.arange(batch, device=device)
        positions = torch.full((batch,), _CONTEXT, device=device)
        heat = torch.full((batch,), 0.8 if hot else 0.0, device=device)
        label = f"{self._label}{', sampling' if hot else ''}"
        first = logits[:, 0]
        moved = batch * vocabulary * logits.element_size()
        yield TimedKernelCase("sample", label, moved, lambda k, i: k.sample(first, heat, seeds, positions))
        drafts = torch.randint(0, vocabulary, (batch, width - 1), device=device)
        if not hot:
            found = torch.zeros((batch, 2), dtype=torch.int64, device=device)
            yield TimedKernelCase(
                "verify_checked",
                label,
                logits.nbytes,
                lambda k, i: k.verify_checked(logits, drafts, heat, seeds, positions, found),
            )
        if width == 1:
            return
        probs = torch.softmax(logits[:, 1:].float(), -1) if hot else None
        needed = logits.nbytes + (0 if probs is None else probs.nbytes)
        yield TimedKernelCase(
            "verify_chain", label, needed, lambda k, i: k.verify_chain(logits, drafts, probs, heat, seeds, positions)
        )
        tokens = torch.randint(0, vocabulary, (batch, width), device=device)
        parents = torch.arange(-1, width - 1, device=device).expand(batch, width).contiguous()
        yield TimedKernelCase(
            "verify_tree",
            label,
            logits.nbytes,
            lambda k, i: k.verify_tree(logits, tokens, parents, heat, seeds, positions, depth=width - 1, sampling=hot),
        )


def _prefill(shape: DecoderShape, dtype: torch.dtype, device: torch.device) -> TimedKernelCase:
    new = 512
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, new], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([new], dtype=torch.int32, device=device),
        block_table=torch.arange(1, 1 + new // _PAGE, device=device).view(1, -1).to(torch.int32),
        max_query=new,
        max_kv=new,
    )
    size = (1 + new // _PAGE, _PAGE, shape.kv_heads, shape.head_size)
    k_cache, v_cache = (torch.randn(size, dtype=dtype, device=device) for _ in range(2))
    q = torch.randn(new, shape.heads, shape.head_size, dtype=dtype, device=device)
    return _attend(f"prefill of {new}", q, [(k_cache, v_cache)], metadata, 2 * q.nbytes + 2 * k_cache.nbytes)


def _attend(
    label: str, q: Tensor, caches: list[tuple[Tensor, Tensor]], metadata: AttentionMetadata, moved: int
) -> TimedKernelCase:
    def planned(kernels: KernelSet, stream: Stream) -> TimedKernelCase:
        _, page_size, kv_heads, head_size = caches[0][0].shape
        shape = AttentionShape(
            heads=q.shape[1], kv_heads=kv_heads, head_size=head_size, page_size=page_size, dtype=q.dtype, scale=_SCALE
        )
        count = metadata.seq_lens.shape[0]
        batch = replace(
            metadata,
            shapes=(shape,),
            seq_lens_host=HostParam("planned", (metadata.max_kv,) * count),
            host_query_start=tuple(range(0, (count + 1) * metadata.max_query, metadata.max_query)),
        )
        return _attend(label, q, caches, kernels.plan_attention(batch, stream=stream), moved)

    width, requests = metadata.max_query, metadata.seq_lens.shape[0]
    pairs = requests * (width * metadata.max_kv - width * (width - 1) // 2)  # of a query and a key that it reads
    return TimedKernelCase(
        "paged_attention",
        label,
        moved,
        lambda k, i: k.paged_attention(q, *caches[i % len(caches)], metadata, scale=_SCALE),
        planned,
        operations=4 * pairs * q.shape[1] * q.shape[2],
    )
