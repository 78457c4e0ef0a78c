"""What the kernels other than matrix products are measured on: the shapes of a model, at several batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from outrider.device import AttentionMetadata, KernelSet

_LAYERS = 8  # caches to rotate among
_PAGE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder's sizes; ``fused`` is the input of an EAGLE head's first product."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    fused: int


@dataclass(frozen=True, slots=True)
class Case:
    """One call of ``kernel`` on a KernelSet; the number picks one of a few sets of operands."""

    kernel: str
    name: str
    kernels: KernelSet
    call: Callable[[KernelSet, int], object]


def small_cases(shape: Shape, kernels: KernelSet, device: torch.device) -> Iterator[Case]:
    """Every kernel for plain decode at batch 1, and for verify of 4 tokens a request at batch 1, 8 and 32."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=device)

    hidden, size = shape.hidden, shape.head_size
    for batch, width in ((1, 1), (1, 4), (8, 4), (32, 4)):
        rows = batch * width
        label = f"batch {batch}, {width} tokens each"
        x, residual, weight = normal(rows, hidden), normal(rows, hidden), normal(hidden)
        yield Case("rms_norm", label, kernels, lambda k, i, x=x, w=weight: k.rms_norm(x, w, 1e-5))
        yield Case(
            "add_rms_norm", label, kernels, lambda k, i, x=x, r=residual, w=weight: k.add_rms_norm(x, r, w, 1e-5)
        )
        gates = normal(rows, 2 * shape.inner)
        yield Case("silu_mul", label, kernels, lambda k, i, g=gates: k.silu_mul(g))

        context = 640
        width_table = context // _PAGE + 1
        pages = 1 + batch * width_table
        caches = [(normal(pages, _PAGE, shape.kv_heads, size), normal(pages, _PAGE, shape.kv_heads, size)) for _ in range(_LAYERS)]
        table = (torch.randperm(pages - 1, device=device) + 1).view(batch, width_table).to(torch.int32)
        qkv = normal(rows, shape.heads + 2 * shape.kv_heads, size)
        q, key, value = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        cos, sin = normal(rows, size), normal(rows, size)
        lane = torch.arange(context - width, context, device=device)
        slots = (table[:, lane // _PAGE].to(torch.int64) * _PAGE + lane % _PAGE).flatten()
        yield Case(
            "rope_write_cache",
            label,
            kernels,
            lambda k, i, q=q, key=key, v=value, c=cos, s=sin, at=caches, t=slots: k.rope_write_cache(
                q, key, v, c, s, *at[i % _LAYERS], t
            ),
        )
        for tree in (False, True) if width > 1 else (False,):
            mask = torch.ones(rows, width, dtype=torch.bool, device=device) if tree else None
            metadata = AttentionMetadata(
                query_start=torch.arange(0, rows + 1, width, dtype=torch.int32, device=device),
                kv_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
                block_table=table,
                max_query=width,
                max_kv=context,
                tree_mask=mask,
            )
            yield Case(
                "paged_attention",
                f"{label}{', tree' if tree else ''}, {context} cached",
                kernels,
                lambda k, i, q=q, at=caches, m=metadata: k.paged_attention(q, *at[i % _LAYERS], m, scale=0.09),
            )
        if width > 1:
            moved = slots.view(batch, width)[:, 1:].flatten()
            yield Case(
                "move_cache", label, kernels, lambda k, i, at=caches, m=moved: k.move_cache(*at[i % _LAYERS], m, m)
            )

        logits = normal(batch, width, shape.vocabulary)
        seeds = torch.arange(batch, device=device)
        places = torch.full((batch,), context, device=device)
        for hot in (False, True):
            heat = torch.full((batch,), 0.8 if hot else 0.0, device=device)
            kind = f"{label}{', sampling' if hot else ''}"
            yield Case(
                "sample", kind, kernels, lambda k, i, x=logits, t=heat, s=seeds, p=places: k.sample(x[:, 0], t, s, p)
            )
            if width == 1:
                continue
            drafts = torch.randint(0, shape.vocabulary, (batch, width - 1), device=device)
            probs = torch.softmax(logits[:, 1:].float(), -1) if hot else None
            yield Case(
                "verify_chain",
                kind,
                kernels,
                lambda k, i, x=logits, d=drafts, q=probs, t=heat, s=seeds, p=places: k.verify_chain(x, d, q, t, s, p),
            )
            tokens = torch.randint(0, shape.vocabulary, (batch, width), device=device)
            parents = torch.tensor([-1, 0, 0, 1], device=device).expand(batch, width).contiguous()
            yield Case(
                "verify_tree",
                kind,
                kernels,
                lambda k, i, x=logits, n=tokens, a=parents, t=heat, s=seeds, p=places, h=hot: k.verify_tree(
                    x, n, a, t, s, p, depth=2, sampling=h
                ),
            )
        state = normal(257, hidden)
        rows_of = torch.randperm(256, device=device)[:batch] + 1
        yield Case("gather_rows", label, kernels, lambda k, i, x=state, r=rows_of: k.gather_rows(x, r))
        values = normal(batch, hidden)
        yield Case("scatter_rows", label, kernels, lambda k, i, x=state, r=rows_of, v=values: k.scatter_rows(x, r, v))
    new = 512
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, new], dtype=torch.int32, device=device),
        kv_lens=torch.tensor([new], dtype=torch.int32, device=device),
        block_table=torch.arange(1, 1 + new // _PAGE, device=device).view(1, -1).to(torch.int32),
        max_query=new,
        max_kv=new,
    )
    cache = normal(64, _PAGE, shape.kv_heads, size), normal(64, _PAGE, shape.kv_heads, size)
    q = normal(new, shape.heads, size)
    yield Case(
        "paged_attention", f"prefill of {new}", kernels, lambda k, i: k.paged_attention(q, *cache, metadata, scale=0.09)
    )
