"""Fixed cases of every kernel: host operands, the call, and the operands that the kernel writes.

The reference is the interface's KernelSet on the host. It computes floating results from the same operands in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from outrider.device import HeadNorms, KernelSet, Product, RotaryArgs
from outrider_conformance.bookkeeping_cases import BOOKKEEPING
from outrider_conformance.fixed_case import Call, FixedKernelCase, Operands, attention_metadata, call_kernel


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=_draw(seed)).to(dtype)


# -- dense ---------------------------------------------------------------------------------------------------------


def _linear(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "x": _normal(5, 32, dtype=dtype),
        "weight": _normal(24, 32, dtype=dtype, seed=1) * 0.2,
        "bias": _normal(24, dtype=dtype, seed=2),
    }


def _embedding(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"tokens": torch.tensor([3, 0, 3, 9]), "weight": _normal(10, 16, dtype=dtype)}


def _norm(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "x": _normal(3, 4, 16, dtype=dtype) * 3,
        "residual": _normal(3, 4, 16, dtype=dtype, seed=1),
        "weight": _normal(16, dtype=dtype, seed=2),
    }


def _gates(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"gate_up": _normal(3, 32, dtype=dtype) * 2}


def _gated(dtype: torch.dtype) -> dict[str, Tensor]:
    made = _linear(dtype)
    return {**made, "residual": _normal(5, 24, dtype=dtype, seed=3), "norm": _normal(24, dtype=dtype, seed=4)}


def _state(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "state": _normal(6, 2, 8, dtype=dtype),
        "rows": torch.tensor([4, 0, 1, 5, 0]),
        "values": _normal(5, 2, 8, dtype=dtype, seed=1),
    }


def _wide(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"source": _normal(5, 16, dtype=dtype), "wide": _normal(5, 48, dtype=dtype, seed=1)}


def _copied(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
    kernels.copy_rows(o["source"], o["wide"][:, 16:32])
    return (o["wide"],)


def _added(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
    normed = kernels.add_rms_norm(o["x"].flatten(0, 1), o["residual"].flatten(0, 1), o["weight"], 1e-5)
    return normed, o["residual"]


def _pair(dtype: torch.dtype) -> dict[str, Tensor]:
    angle = torch.rand(5, 8, generator=_draw(6)) * 6
    return {
        **_gated(dtype),
        "gates": _normal(40, 24, dtype=dtype, seed=7) * 0.2,
        "gates_bias": _normal(40, dtype=dtype, seed=8),
        "qkv": _normal(8 * 16, 24, dtype=dtype, seed=9) * 0.2,
        "qkv_bias": _normal(8 * 16, dtype=dtype, seed=10),
        "cos": angle.cos().repeat(1, 2).to(dtype),
        "sin": angle.sin().repeat(1, 2).to(dtype),
        "k_cache": _normal(5, 4, 2, 16, dtype=dtype, seed=11),
        "v_cache": _normal(5, 4, 2, 16, dtype=dtype, seed=12),
        "slots": torch.tensor([7, 18, 4, 11, 5]),
    }


def _heads(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        **_pair(dtype),
        "made": _normal(5, 8 * 16, dtype=dtype, seed=13),
        "q_norm": _normal(16, dtype=dtype, seed=14),
        "k_norm": _normal(16, dtype=dtype, seed=15),
    }


def _rotary(o: Operands) -> RotaryArgs:
    return RotaryArgs(o["cos"], o["sin"], o["k_cache"], o["v_cache"], o["slots"])


def _normed_gates(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
    added = Product(o["x"], o["weight"], o["bias"])
    made = kernels.norm_linear_silu_mul(added, o["residual"], o["norm"], 1e-5, o["gates"], o["gates_bias"])
    return made, o["residual"]


def _normed_queries(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
    added = Product(o["x"], o["weight"], o["bias"])
    weights = (o["qkv"], o["qkv_bias"])
    q = kernels.norm_linear_rope_write_cache(added, o["residual"], o["norm"], 1e-5, *weights, _rotary(o))
    return q, o["residual"], o["k_cache"], o["v_cache"]


def _normed_heads(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
    norms = HeadNorms(o["q_norm"], o["k_norm"], 1e-5)
    q = kernels.head_norm_rope_write_cache(o["made"], norms, _rotary(o))
    return q, o["k_cache"], o["v_cache"]


def _queries(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
    q = kernels.linear_rope_write_cache(Product(o["residual"], o["qkv"], None), _rotary(o))
    return q, o["k_cache"], o["v_cache"]


# -- cache ---------------------------------------------------------------------------------------------------------


def _rope(dtype: torch.dtype) -> dict[str, Tensor]:
    angle = torch.rand(4, 4, generator=_draw(3)) * 6
    return {
        "q": _normal(4, 4, 8, dtype=dtype),
        "k": _normal(4, 2, 8, dtype=dtype, seed=1),
        "v": _normal(4, 2, 8, dtype=dtype, seed=2),
        "cos": angle.cos().repeat(1, 2).to(dtype),
        "sin": angle.sin().repeat(1, 2).to(dtype),
        "k_cache": _normal(5, 4, 2, 8, dtype=dtype, seed=4),
        "v_cache": _normal(5, 4, 2, 8, dtype=dtype, seed=5),
        "slots": torch.tensor([7, 18, 4, 11]),
    }


def _moves(dtype: torch.dtype) -> dict[str, Tensor]:
    # Overlapping moves: each source is the destination of another move.
    return {
        "k_cache": _normal(4, 4, 2, 8, dtype=dtype),
        "v_cache": _normal(4, 4, 2, 8, dtype=dtype, seed=1),
        "sources": torch.tensor([5, 6, 7, 9]),
        "destinations": torch.tensor([6, 7, 8, 9]),
    }


# -- attention -----------------------------------------------------------------------------------------------------

_PAGE = 4


def _attention(
    new: tuple[int, ...], context: tuple[int, ...], *, tree: bool = False, padding: int = 0, poisoned: bool = False
) -> Callable[..., dict]:  # type: ignore[type-arg]
    def make(dtype: torch.dtype) -> dict[str, Tensor]:
        tokens, batch, width = sum(new) + padding, len(new), 4
        pages = 1 + batch * width
        starts = [sum(new[:index]) for index in range(batch + 1)]
        mask = torch.ones(tokens, max(new), dtype=torch.bool).tril()
        if tree:  # two branches: even nodes don't see odd ones, and each node sees itself
            lane = torch.arange(max(new))
            mask = (lane[:, None] >= lane) & (((lane[:, None] - lane) % 2 == 0) | (lane == 0))
            mask = mask.repeat(batch, 1)[:tokens]
        lens = torch.tensor([n + c for n, c in zip(new, context, strict=True)], dtype=torch.int32)
        table = (torch.randperm(pages - 1, generator=_draw(6)) + 1).view(batch, width).to(torch.int32)
        caches = [_normal(pages, _PAGE, 2, 8, dtype=dtype, seed=seed) for seed in (1, 2)]
        if poisoned:  # unused table entries lead to page 0; page 0 and all slots after a sequence hold NaN
            table = torch.where(torch.arange(width) * _PAGE < lens.unsqueeze(1), table, 0)
            used = (torch.arange(width * _PAGE) < lens.unsqueeze(1)).view(batch, width, _PAGE)
            kept = torch.zeros(pages, _PAGE, dtype=torch.bool)
            kept[table.long()] = used
            kept[0] = False
            for cache in caches:
                cache[~kept] = torch.nan
        return {
            "q": _normal(tokens, 4, 8, dtype=dtype),
            "k_cache": caches[0],
            "v_cache": caches[1],
            "query_start": torch.tensor(starts, dtype=torch.int32),
            "seq_lens": lens,
            "block_table": table,
            "tree_mask": mask,
        }

    return make


def _attend(new: tuple[int, ...], *, tree: bool = False, window: int = 0) -> Call:
    def call(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
        metadata = attention_metadata(o, max_query=max(new), max_kv=4 * _PAGE, tree_mask=o["tree_mask"] if tree else None)
        out = kernels.paged_attention(o["q"], o["k_cache"], o["v_cache"], metadata, scale=0.3, window=window)
        return (out[: sum(new)],)  # rows of padding hold any finite numbers

    return call


# -- choices -------------------------------------------------------------------------------------------------------

_BATCH, _NODES, _VOCABULARY = 4, 4, 37


def _logits(dtype: torch.dtype) -> dict[str, Tensor]:
    del dtype  # tokens are compared exactly: both sides sample from the same float32
    return {
        "logits": _normal(_BATCH, _NODES, _VOCABULARY, dtype=torch.float32) * 3,
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.5]),
        "seeds": torch.tensor([1, 2, 3, 2**40 + 5]),
        "positions": torch.tensor([0, 7, 100, 3]),
    }


def _sampled(*, draft: bool) -> Call:
    def call(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
        return (kernels.sample(o["logits"][:, 0], o["temperature"], o["seeds"], o["positions"], draft=draft),)

    return call


def _chains(dtype: torch.dtype) -> dict[str, Tensor]:
    made = _logits(dtype)
    likely = made["logits"].argmax(-1)[:, : _NODES - 1]
    likely[1, 1] = (likely[1, 1] + 1) % _VOCABULARY
    probs = torch.softmax(_normal(_BATCH, _NODES - 1, _VOCABULARY, dtype=torch.float32, seed=8), dim=-1)
    return {**made, "draft_tokens": likely, "draft_probs": probs}


def _verified(*, sampling: bool) -> Call:
    def call(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
        temperature = o["temperature"] if sampling else torch.zeros_like(o["temperature"])
        probs = o["draft_probs"] if sampling else None
        return kernels.verify_chain(o["logits"], o["draft_tokens"], probs, temperature, o["seeds"], o["positions"])

    return call


def _poisoned_chains(dtype: torch.dtype) -> dict[str, Tensor]:
    made = _chains(dtype)
    made["logits"][2, 1, [5, 30]] = made["logits"][2, 3, 0] = float("nan")
    made["logits"][0, 0, 3] = float("inf")
    return {**made, "found": torch.full((_BATCH, 4), 9)}


def _verified_checked(kernels: KernelSet, o: Operands, drafts: int) -> tuple[Tensor, ...]:
    heat, found = torch.zeros_like(o["temperature"]), o["found"][:, 1:3]
    logits, tokens = o["logits"][:, : drafts + 1], o["draft_tokens"][:, :drafts]
    tokens, accepted = kernels.verify_checked(logits, tokens, heat, o["seeds"], o["positions"], found)
    if drafts:  # row 2 has NaN and may choose any token; an index list would copy from pageable memory in a capture
        tokens, accepted = (torch.cat((each[:2], each[3:])) for each in (tokens, accepted))
    return tokens, accepted, o["found"]


def _tree(dtype: torch.dtype) -> dict[str, Tensor]:
    made = _logits(dtype)
    best = made["logits"].argmax(-1)
    tokens = torch.stack((best[:, 3], best[:, 0], best[:, 0] + 1, best[:, 1]), dim=1) % _VOCABULARY
    return {**made, "tokens": tokens, "parents": torch.tensor([[-1, 0, 0, 1]] * _BATCH)}


# -- logits --------------------------------------------------------------------------------------------------------


def _shaping(dtype: torch.dtype) -> dict[str, Tensor]:
    made = _logits(dtype)
    rows = torch.tensor([1, 2, 3, 1])
    counts = torch.randint(0, 5, (4, _VOCABULARY), generator=_draw(9), dtype=torch.int32)
    return {
        **made,
        "tokens": torch.randint(0, _VOCABULARY, (_BATCH, _NODES), generator=_draw(10)),
        "rows": rows,
        "counts": counts,
        "penalties": torch.tensor([[1.3, 0.5, 0.2], [1.0, 0.0, 0.0], [0.8, 0.0, 0.1], [1.0, 1.0, 0.0]]),
        "node_positions": made["positions"].unsqueeze(1) + torch.arange(_NODES),
        "entries": torch.tensor([0, 1, 3, 2]),
        "biased": torch.randint(0, _VOCABULARY, (_BATCH, 3), generator=_draw(11)),
        "values": torch.tensor([[1.0, -2.0, 3.0]] * _BATCH),
        "until": torch.tensor([[1 << 40, 102, 2]] * _BATCH),
        "bitmask": torch.randint(-(2**31), 2**31, (_BATCH, _NODES, -(-_VOCABULARY // 32)), generator=_draw(12)).int(),
        "top_k": torch.tensor([0, 5, 0, 3]),
        "top_p": torch.tensor([1.0, 1.0, 0.7, 0.9]),
        "min_p": torch.tensor([0.0, 0.05, 0.0, 0.1]),
        "new_tokens": torch.tensor([[3, 3, -1], [0, 1, 2], [-1, -1, -1], [4, -1, -1]]),
        "count_rows": torch.tensor([1, 2, 3, 0]),
    }


_Make = Callable[[torch.dtype], dict[str, Tensor]]


def _case(
    name: str,
    make: _Make,
    *arguments: str | float | None,
    changed: tuple[str, ...] = (),
    exact: bool = False,
    **options: Any,
) -> FixedKernelCase:
    """Return a case of the kernel that ``name`` begins with. Its arguments are names of operands, or other values."""
    method = name.replace(",", " ").split()[0]

    def call(kernels: KernelSet, o: Operands) -> tuple[Tensor, ...]:
        return (*call_kernel(kernels, method, arguments, o, **options), *(o[each] for each in changed))

    return FixedKernelCase(name, make, call, exact=exact, changed=changed)


_ROPE = ("q", "k", "v", "cos", "sin", "k_cache", "v_cache", "slots")
_NODE_OPERANDS = ("logits", "tokens", "parents", "temperature", "seeds", "positions")
_DECODE, _RAGGED = (1, 1, 1), (3, 1, 5)
_CONTEXT = (7, 3, 10)
CASES: Mapping[str, FixedKernelCase] = MappingProxyType(
    {
        case.name: case
        for case in (
            _case("linear", _linear, "x", "weight"),
            _case("linear with bias", _linear, "x", "weight", "bias"),
            _case("linear_silu_mul", _linear, "x", "weight", "bias"),
            _case("linear_add_rms_norm", _gated, "x", "weight", "bias", "residual", "norm", 1e-5, changed=("residual",)),
            _case("linear_add", _gated, "x", "weight", "bias", "residual", changed=("residual",)),
            FixedKernelCase("linear_rope_write_cache", _pair, _queries, changed=("k_cache", "v_cache")),
            FixedKernelCase("norm_linear_silu_mul", _pair, _normed_gates, changed=("residual",)),
            FixedKernelCase(
                "norm_linear_rope_write_cache", _pair, _normed_queries, changed=("residual", "k_cache", "v_cache")
            ),
            FixedKernelCase("head_norm_rope_write_cache", _heads, _normed_heads, changed=("k_cache", "v_cache")),
            _case("gather_rows", _state, "state", "rows"),
            FixedKernelCase("copy_rows", _wide, _copied, changed=("wide",)),
            _case("scatter_rows", _state, "state", "rows", "values", changed=("state",)),
            _case("embedding", _embedding, "tokens", "weight"),
            _case("rms_norm", _norm, "x", "weight", 1e-5),
            FixedKernelCase("add_rms_norm", _norm, _added, changed=("residual",)),
            _case("silu_mul", _gates, "gate_up"),
            _case("rope_write_cache", _rope, *_ROPE, changed=("q", "k", "k_cache", "v_cache")),
            _case("move_cache", _moves, "k_cache", "v_cache", "sources", "destinations", changed=("k_cache", "v_cache")),
            FixedKernelCase("paged_attention of decoding", _attention(_DECODE, _CONTEXT), _attend(_DECODE)),
            FixedKernelCase("paged_attention of a ragged batch", _attention(_RAGGED, _CONTEXT), _attend(_RAGGED)),
            FixedKernelCase("paged_attention in a window", _attention(_RAGGED, _CONTEXT), _attend(_RAGGED, window=4)),
            FixedKernelCase("paged_attention over a tree", _attention((5, 5), (7, 2), tree=True), _attend((5, 5), tree=True)),
            FixedKernelCase("paged_attention beside NaN", _attention(_RAGGED, _CONTEXT, poisoned=True), _attend(_RAGGED)),
            FixedKernelCase(
                "paged_attention over a tree beside NaN",
                _attention((5, 5), (7, 2), tree=True, poisoned=True),
                _attend((5, 5), tree=True),
            ),
            FixedKernelCase("paged_attention with padding", _attention(_RAGGED, _CONTEXT, padding=3), _attend(_RAGGED)),
            FixedKernelCase("sample", _logits, _sampled(draft=False), exact=True),
            FixedKernelCase("sample for a draft", _logits, _sampled(draft=True), exact=True),
            FixedKernelCase("verify_chain, greedy", _chains, _verified(sampling=False), exact=True),
            FixedKernelCase("verify_chain, sampling", _chains, _verified(sampling=True), exact=True),
            *(
                FixedKernelCase(
                    f"verify_checked, {drafts} drafts",
                    _poisoned_chains,
                    partial(_verified_checked, drafts=drafts),
                    exact=True,
                    changed=("found",),
                )
                for drafts in (_NODES - 1, 0)
            ),
            _case("verify_tree, greedy", _tree, *_NODE_OPERANDS, depth=2, sampling=False, exact=True),
            _case("verify_tree, sampling", _tree, *_NODE_OPERANDS, depth=2, sampling=True, exact=True),
            _case("apply_token_bitmask", _shaping, "logits", "bitmask", exact=True),
            _case("bias_logits", _shaping, "logits", "node_positions", "entries", "biased", "values", "until"),
            _case("penalize_logits", _shaping, "logits", "tokens", None, "rows", "counts", "penalties"),
            _case("count_tokens", _shaping, "counts", "count_rows", "new_tokens", exact=True, changed=("counts",)),
            _case("truncate_logits", _shaping, "logits", "temperature", "top_k", "top_p", "min_p"),
            _case("logprobs", _shaping, "logits", "tokens", 4),
            *BOOKKEEPING,
        )
    }
)
