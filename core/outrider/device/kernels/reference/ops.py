"""The kernels as torch custom operators in the namespace ``outrider``.

A schema declares which operands an operator reads and writes; the sanitizer relies on the schema. :data:`ROW_ACCESS` lists
the touched rows of operators whose accesses depend on data. The references are registered for every device at once; a
plugin overrides the method of its KernelSet. It may register its own kernel as an overload of the operator here
(``outrider::sample.mine``): an overload whose operands have the same names touches the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from outrider.device.kernels.operators import check_copy, define_operator, expect
from outrider.device.kernels.reference import bookkeeping, experts, model, recurrent, shaping

# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider", "DEF")
_define = partial(define_operator, _LIBRARY)


def _masked(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Check the operands of the mask; return an empty tensor like its result."""
    words = -(-logits.shape[-1] // 32)
    expect(
        bitmask.dtype == torch.int32 and bitmask.shape == (*logits.shape[:-1], words),
        lambda: (
            f"logits {tuple(logits.shape)} with a bitmask {tuple(bitmask.shape)} of {bitmask.dtype}; expected int32, {words} "
            "words a row"
        ),
    )
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    """Return an empty tensor like the norm's result. A queueing device calls this before it enqueues, so errors are raised
    here.
    """
    expect(x.shape[-1:] == weight.shape, lambda: f"norm of {tuple(x.shape)} with a weight of {tuple(weight.shape)}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _routed(
    logits: Tensor,
    count: int,
    first: int,
    last: int,
    correction: Tensor | None = None,
    groups: int = 1,
    chosen_groups: int = 1,
    *scoring: float,
) -> tuple[Tensor, Tensor]:
    """Check the operands of routing; return empty tensors like its results."""
    del scoring
    expect(
        logits.dim() == 2 and 0 < count <= logits.shape[1],
        lambda: f"{count} experts of a token, of router logits {tuple(logits.shape)}; expected [T, E], at most E of them",
    )
    expect(
        0 <= first < last <= logits.shape[1],
        lambda: f"experts {first} to {last} of {logits.shape[1]} are held; expected the first and last (exclusive) of them",
    )
    expect(
        correction is None or tuple(correction.shape) == (logits.shape[1],),
        lambda: f"router logits {tuple(logits.shape)} have a correction of another size; expected a number for each expert",
    )
    expect(
        1 <= chosen_groups <= groups and logits.shape[1] % groups == 0 and count * groups <= chosen_groups * logits.shape[1],
        lambda: (
            f"{count} of {logits.shape[1]} experts in {chosen_groups} of {groups} groups; expected groups of one size, and "
            "so many experts in those that are chosen"
        ),
    )
    shape = (logits.shape[0], count)
    weights = logits.new_empty(shape, dtype=torch.promote_types(logits.dtype, torch.float32))
    return weights, logits.new_empty(shape, dtype=torch.int64)


def _mixed(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *activation: float | str,
) -> Tensor:
    """Check the operands of experts; return an empty tensor like their result."""
    del activation
    fits = x.dim() == 2 and gate_up.dim() == 3 and chosen.dim() == 2 and weights.shape == chosen.shape
    fits = fits and chosen.shape[0] == x.shape[0] and gate_up.shape[2] == x.shape[1]
    fits = fits and down.shape == (gate_up.shape[0], x.shape[1], gate_up.shape[1] // 2)
    expect(
        fits,
        lambda: (
            f"experts of {tuple(x.shape)} with weights {tuple(weights.shape)} of {tuple(chosen.shape)}, gate and up "
            f"{tuple(gate_up.shape)}, down {tuple(down.shape)}; expected [T, H], [T, k] twice, [E, 2 I, H], [E, H, I]"
        ),
    )
    for bias, stack in ((gate_up_bias, gate_up), (down_bias, down)):
        expect(
            bias is None or bias.shape == stack.shape[:2],
            lambda: "a bias of experts has not the first two sizes of their weights; expected [E, 2 I] and [E, H]",
        )
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _empty_like(x: Tensor, *rest: Any) -> Tensor:
    """Return an empty, contiguous tensor like the first operand."""
    del rest
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _empty_values(mixed: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, *rest: Any) -> Tensor:
    """Return an empty tensor like the delta rule's result."""
    del gates, a_log, dt_bias, rest
    return mixed.new_empty((mixed.shape[0], state.shape[1], state.shape[3]))


def _multiplied(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Check a product with a weight [out, in]; return an empty tensor like its result."""
    expect(x.shape[-1] == shape[1], lambda: f"product of {tuple(x.shape)} with a quantised weight of {tuple(shape)}")
    return x.new_empty((*x.shape[:-1], shape[0]))


_define(
    "linear_quantized",
    model.linear_quantized,
    lambda x, data, scales, zero_points, input_scale, bias, format, block, shape, *rest: _multiplied(x, shape),
)
_define("rms_norm", model.rms_norm, lambda x, weight, eps: _normed(x, weight))
_define("add_rms_norm", model.add_rms_norm, lambda x, residual, weight, eps: _normed(residual, weight), writes=("residual",))
_define("silu_mul", model.silu_mul, lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)))
_define("sigmoid_mul", model.sigmoid_mul, lambda x, gate: _empty_like(x))
_define("rope_write_cache", model.rope_write_cache, writes=("q", "k", "k_cache", "v_cache"))
_define("paged_attention", model.paged_attention, lambda q, *rest: q.new_empty(q.shape))
_define("head_linear", model.head_linear, lambda x, weight: x.new_empty(*x.shape[:2], weight.shape[1]))
_define("latent_attention", model.latent_attention, lambda q, *rest: q.new_empty(q.shape))
_define(
    "route", experts.route, lambda logits, count, renormalize, first, last, *rest: _routed(logits, count, first, last, *rest)
)
_define("experts_quantized", experts.experts_quantized, _empty_like)
_define("experts", experts.experts, _mixed)
_define("short_convolution", recurrent.short_convolution, _empty_like, writes=("state", "window"))
_define("gated_delta_rule", recurrent.gated_delta_rule, _empty_values, writes=("state", "updates"))
_define("chunk_gated_delta_rule", recurrent.chunk_gated_delta_rule, _empty_values, writes=("state",))
_define("gated_rms_norm", recurrent.gated_rms_norm, lambda x, gate, weight, eps: _normed(x, weight))
_define(
    "sample",
    model.sample,
    lambda logits, temperature, seeds, positions, lane: logits.new_empty(logits.shape[:-1], dtype=torch.int64),
)
_define(
    "verify_chain",
    model.verify_chain,
    lambda target_logits, draft_tokens, draft_probs, temperature, seeds, positions: (
        draft_tokens.new_empty((draft_tokens.shape[0], draft_tokens.shape[1] + 1)),
        draft_tokens.new_empty((draft_tokens.shape[0],)),
    ),
)
_define("apply_token_bitmask", shaping.apply_token_bitmask, _masked)
_define("bias_logits", shaping.bias_logits, _empty_like)
_define("penalize_logits", shaping.penalize_logits, _empty_like)
_define("count_tokens", shaping.count_tokens, writes=("counts",))
_define("truncate_logits", shaping.truncate_logits, _empty_like)
_define(
    "logprobs",
    shaping.logprobs,
    lambda logits, tokens, count: (
        logits.new_empty((*tokens.shape, 1 + count), dtype=torch.float32),
        tokens.new_empty((*tokens.shape, count)),
    ),
)
_define(
    "verify_tree",
    model.verify_tree,
    lambda target_logits, tokens, parents, temperature, seeds, positions, depth, sampling: (
        tokens.new_empty((tokens.shape[0], depth + 1)),
        tokens.new_empty((tokens.shape[0], depth + 1)),
        tokens.new_empty((tokens.shape[0],)),
    ),
)
_define("gather_rows", model.gather_rows, lambda state, rows: state.new_empty((rows.shape[0], *state.shape[1:])))
_define("scatter_rows", model.scatter_rows, writes=("state",))
_define("copy_rows", model.copy_rows, check_copy, writes=("out",))
_define("move_cache", model.move_cache, writes=("k_cache", "v_cache"))
_define("find_nan", model.find_nan, writes=("found",))
_define(
    "gather_requests",
    bookkeeping.gather_requests,
    writes=("own_rows", "own_lens", "own_last_tokens", "own_seeds", "own_temperature", "own_tables", "found"),
)
_define("gather_checked", bookkeeping.gather_checked, writes=("out", "found"))
_define("place_tokens", bookkeeping.place_tokens, writes=("positions", "slots", "seq_lens"))
_define(
    "publish_accepted",
    bookkeeping.publish_accepted,
    writes=("lengths", "last_tokens", "results", "own_tokens", "own_accepted", "pending"),
)
_define("place_accepted", bookkeeping.place_accepted, writes=("following", "last", "positions"))


RowResolver = Callable[[Mapping[str, Any]], Tensor]


def _rows(operand: str) -> RowResolver:
    """Return the resolver of the rows that ``operand`` lists: cache rows (page * page size + offset), or request rows."""

    def resolve(arguments: Mapping[str, Any]) -> Tensor:
        rows: Tensor = arguments[operand]
        return rows.flatten()

    return resolve


def _cells(operand: str) -> RowResolver:
    """Return the resolver of the cells (of the first two dimensions) of ``operand`` in a call's ``rows``; None: all rows."""

    def resolve(arguments: Mapping[str, Any]) -> Tensor:
        state: Tensor = arguments[operand]
        rows: Tensor | None = arguments["rows"]
        if rows is None:
            rows = torch.arange(state.shape[0], device=state.device)
        if state.dim() < 2:
            return rows.flatten()
        width = state.shape[1]
        return (rows.unsqueeze(1) * width + torch.arange(width, device=rows.device)).flatten()

    return resolve


def _rows_of_pages(arguments: Mapping[str, Any]) -> Tensor:
    """Return the cache rows that attention reads: the rows of each sequence's pages below its length."""
    table: Tensor = arguments["block_table"]
    lens: Tensor = arguments["seq_lens"]
    page_size = arguments["k_cache"].shape[1]
    offset = torch.arange(table.shape[1] * page_size, device=table.device)
    rows = table.to(torch.int64).repeat_interleave(page_size, dim=1) * page_size + offset % page_size
    return torch.masked_select(rows, offset < lens.to(torch.int64).unsqueeze(1))


def _cells_of_tokens(arguments: Mapping[str, Any]) -> Tensor:
    """Return the cells of ``counts`` that counting touches; an ignored token touches cell 0 of the reserved row."""
    tokens: Tensor = arguments["tokens"]
    rows: Tensor = arguments["rows"]
    return torch.where(tokens >= 0, rows.unsqueeze(1) * arguments["counts"].shape[1] + tokens, 0).flatten()


def _rows_of_moves(arguments: Mapping[str, Any]) -> Tensor:
    """Return the cache rows that a move reads or writes: sources and destinations."""
    return torch.cat((arguments["sources"].flatten(), arguments["destinations"].flatten()))


def _rows_of_lens(arguments: Mapping[str, Any]) -> Tensor:
    """Return the rows of ``lens`` that a gather reads: the request rows, or the first rows in the order of the batch."""
    rows: Tensor = arguments["rows"]
    return rows.flatten() if arguments["lens_by_row"] else torch.arange(rows.shape[0], device=rows.device)


ROW_ACCESS: Mapping[str, Mapping[str, RowResolver]] = MappingProxyType(
    {
        "outrider::rope_write_cache": MappingProxyType({"k_cache": _rows("slots"), "v_cache": _rows("slots")}),
        "outrider::paged_attention": MappingProxyType({"k_cache": _rows_of_pages, "v_cache": _rows_of_pages}),
        "outrider::latent_attention": MappingProxyType({"k_cache": _rows_of_pages, "v_cache": _rows_of_pages}),
        "outrider::short_convolution": MappingProxyType(
            {"state": _cells("state"), "window": _cells("window"), "pending": _rows("rows")}
        ),
        "outrider::gated_delta_rule": MappingProxyType(
            {"state": _cells("state"), "updates": _cells("updates"), "pending": _rows("rows")}
        ),
        "outrider::chunk_gated_delta_rule": MappingProxyType({"state": _cells("state")}),
        "outrider::penalize_logits": MappingProxyType({"counts": _cells("counts")}),
        "outrider::count_tokens": MappingProxyType({"counts": _cells_of_tokens}),
        "outrider::gather_rows": MappingProxyType({"state": _cells("state")}),
        "outrider::scatter_rows": MappingProxyType({"state": _cells("state")}),
        "outrider::gather_requests": MappingProxyType(
            {
                "lens": _rows_of_lens,
                "last_tokens": _rows("rows"),
                "seeds": _rows("rows"),
                "temperature": _rows("rows"),
                "tables": _cells("tables"),
            }
        ),
        "outrider::gather_checked": MappingProxyType({"source": _cells("source")}),
        "outrider::publish_accepted": MappingProxyType(dict.fromkeys(("lengths", "last_tokens", "pending"), _rows("rows"))),
        "outrider::move_cache": MappingProxyType({"k_cache": _rows_of_moves, "v_cache": _rows_of_moves}),
    }
)
"""Operator → operand → resolver. A resolver takes the call's arguments by schema name (host tensors with the values at
run time) and returns int64 row numbers; a row is one index of the operand's first two dimensions flattened."""
