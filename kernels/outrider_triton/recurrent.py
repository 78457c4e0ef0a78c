"""Operators of recurrent layers (:mod:`outrider_triton.jit.recurrent_steps`, :mod:`outrider_triton.jit.recurrent_chunks`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from outrider.device.kernels.operators import expect
from outrider_triton.jit import recurrent_chunks as jit_chunks
from outrider_triton.jit import recurrent_steps as jit
from outrider_triton.jit.recurrent_steps_shared import LANES, delta_rule_shared
from outrider_triton.launch import define, launch, power_of_two

_FEW_TOKENS = 8
"""Maximum number of tokens of a sequence for which the convolution uses small blocks of tokens."""
_CHUNK = 64
_CHUNK_VALUES_PER_PROGRAM = 32
"""Number of values of a head whose states one program carries from chunk to chunk."""
_ROWS_PER_PROGRAM = 4
_VALUES_PER_PROGRAM = 32
"""Number of values of a head whose states one warp holds in registers."""
_MIN_KEYS = 64
"""Minimum number of keys in a block: two for each lane. A lane with a single product would add it exactly to another lane's
rounded one, so lanes would find different sums, and a settled state other bits than the state that verification used.
"""
_SHARING_WARPS = 4
"""Number of warps that share keys and queries of a head."""
_SHARING_CELLS = 2048
"""Number of cells of a state that each of these warps holds in registers, 64 in each thread."""
_SHARING_REGISTERS = 128
"""Maximum registers of a thread with 64 cells of a state: 16 warps share a multiprocessor."""


def _convolution(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    rows: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query: int,
    pending: Tensor | None,
    window: Tensor | None,
    settled: bool,
    uniform: bool,
    pdl: bool,
) -> Tensor:
    out = _allocate(x, x.shape, uniform)
    few = max_query <= _FEW_TOKENS
    # A block has as many tokens as the state, or more, so that the first block alone reads the state.
    tokens = max(4 if few else 16, power_of_two(weight.shape[1] - 1))
    width, block = x.shape[1], min(power_of_two(x.shape[1]), 128 if few else 256)
    launch(
        jit.short_convolution,
        (triton.cdiv(max_query, tokens), triton.cdiv(width, block), rows.shape[0]),
        *(x, weight, state, rows, query_start, seq_lens, pending, window, out, x.stride(0), width, int(settled)),
        KERNEL=weight.shape[1],
        TOKENS=0 if window is None else window.shape[1],
        BLOCK_T=tokens,
        BLOCK_C=block,
        pdl=pdl,
        warps=4,
    )
    return out


define("short_convolution.triton", _convolution, writes=("state", "window"))


def _values(mixed: Tensor, state: Tensor) -> tuple[int, ...]:
    return mixed.shape[0], state.shape[1], state.shape[3]


def _allocate(x: Tensor, shape: Sequence[int], uniform: bool) -> Tensor:
    """Return memory for a result of ``shape`` in x's dtype: zeros if the batch may have padding tokens, which no program
    writes.
    """
    return x.new_empty(shape) if uniform else x.new_zeros(shape)


def _rule(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query: int,
    pending: Tensor | None,
    updates: Tensor | None,
    settled: bool,
    uniform: bool,
    pdl: bool,
) -> Tensor:
    """Compute the gated delta rule token by token and return the results [T, Hv, E]. ``settled``: no kernel that may still
    run writes states, updates or lengths.
    """
    del max_query  # every program reads its sequence's number of tokens
    _expect_rows(mixed, gates, state)
    out = _allocate(mixed, _values(mixed, state), uniform)
    heads, key_size, value_size = state.shape[1:]
    block_d, block_e = max(power_of_two(key_size), _MIN_KEYS), min(power_of_two(value_size), _VALUES_PER_PROGRAM)
    kernel, settings = jit.delta_rule, {"warps": 1}
    if pdl:  # the devices of NVIDIA from Hopper on
        kernel, settings = delta_rule_shared, {"warps": _SHARING_WARPS, "maxnreg": _SHARING_REGISTERS}
        block_e = _SHARING_WARPS * max(min(power_of_two(value_size), _SHARING_CELLS // block_d), 32 // LANES.value)
    key_width, blocks = (mixed.shape[1] - heads * value_size) // 2, triton.cdiv(value_size, block_e)
    launch(
        kernel,
        (heads, blocks, rows.shape[0]),
        *(mixed, gates, a_log, dt_bias, state, rows, query_start, seq_lens, pending, updates, out, key_width, heads),
        *(heads * key_size // key_width, mixed.stride(0), gates.stride(0), int(settled)),
        D=key_size,
        E=value_size,
        TOKENS=0 if updates is None else updates.shape[2],
        BLOCK_D=block_d,
        BLOCK_E=block_e,
        pdl=pdl,
        **settings,
    )
    return out


def _expect_rows(mixed: Tensor, gates: Tensor, state: Tensor) -> None:
    heads, key_size, value_size = state.shape[1:]
    key_width = (mixed.shape[1] - heads * value_size) // 2
    fits = state.is_contiguous() and mixed.stride(1) == gates.stride(1) == 1 and gates.shape[1] == 2 * heads
    expect(
        fits and key_width > 0 and heads * key_size % key_width == 0,
        lambda: (
            f"the delta rule of {tuple(mixed.shape)} channels and {tuple(gates.shape)} gates with states "
            f"{tuple(state.shape)}; expected contiguous rows, whole key heads and two gates of each value head"
        ),
    )


define("gated_delta_rule.triton", _rule, writes=("state", "updates"))


def _chunks(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query: int,
    pdl: bool,
) -> Tensor:
    """Compute the gated delta rule of prompts, 64 tokens at a time, write the states, and return the results [T, Hv, E]."""
    _expect_rows(mixed, gates, state)
    out = _allocate(mixed, _values(mixed, state), uniform=False)
    tokens, sequences, (heads, key_size, value_size) = mixed.shape[0], rows.shape[0], state.shape[1:]
    key_width = (mixed.shape[1] - heads * value_size) // 2
    keys, w, u = (mixed.new_empty(tokens, size) for size in (key_width, heads * key_size, heads * value_size))
    totals = mixed.new_empty((heads, tokens), dtype=torch.float32)
    chunk_state = mixed.new_empty(tokens // _CHUNK + sequences, *state.shape[1:])
    sizes = key_width, heads, heads * key_size // key_width
    # Triton 3.6 compiles products of 16 and 32 columns wrongly in 16-bit dtypes on an H200; those of 64 are right.
    block_d, block_e = max(power_of_two(key_size), 64), max(power_of_two(value_size), 64)
    constants = {"D": key_size, "E": value_size, "BLOCK_D": block_d}
    chunks = heads, triton.cdiv(max_query, _CHUNK), sequences
    launch(
        jit_chunks.corrections,
        chunks,
        *(mixed, gates, a_log, dt_bias, query_start, keys, w, u, totals, tokens, *sizes, mixed.stride(0), gates.stride(0)),
        **constants,
        BLOCK_E=block_e,
        pdl=pdl,
        warps=4,
    )
    values = min(block_e, _CHUNK_VALUES_PER_PROGRAM)
    launch(
        jit_chunks.chunk_states,
        (heads, triton.cdiv(value_size, values), sequences),
        *(keys, w, u, totals, state, rows, query_start, seq_lens, chunk_state, out, tokens, *sizes),
        **constants,
        BLOCK_E=values,
        num_stages=2,
        pdl=pdl,
        warps=4,
    )
    launch(
        jit_chunks.chunk_results,
        chunks,
        *(mixed, keys, totals, query_start, chunk_state, out, tokens, *sizes, mixed.stride(0)),
        **constants,
        BLOCK_E=block_e,
        pdl=pdl,
        warps=4 if block_d <= 128 else 8,
    )
    return out


define("chunk_gated_delta_rule.triton", _chunks, writes=("state",))


def _gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, pdl: bool) -> Tensor:
    expect(x.shape[-1:] == weight.shape, lambda: f"norm of {tuple(x.shape)} with a weight of {tuple(weight.shape)}")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    expect(gate.shape == x.shape, lambda: f"a norm of {tuple(x.shape)} gated by {tuple(gate.shape)}; expected one shape")
    size = x.shape[-1]
    count = out.numel() // size if size else 0
    if gate.dim() == 3 and gate.stride(2) == 1:
        inner, gate_outer, gate_inner = gate.shape[1], gate.stride(0), gate.stride(1)
    else:
        gate = gate.contiguous()
        inner, gate_outer, gate_inner = 1, size, size
    launch(
        jit.gated_rms_norm,
        (triton.cdiv(count, _ROWS_PER_PROGRAM),),
        *(x.contiguous(), gate, weight, out, eps, count, inner, gate_outer, gate_inner),
        E=size,
        ROWS=_ROWS_PER_PROGRAM,
        BLOCK_E=power_of_two(size),
        pdl=pdl,
        warps=4,
    )
    return out


define("gated_rms_norm.triton", _gated_rms_norm)


def _sigmoid_mul(x: Tensor, gate: Tensor, pdl: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = x.shape[-1]
    block = min(power_of_two(size), 1024)
    grid = (x.numel() // size if size else 0, triton.cdiv(size, block))
    launch(jit.sigmoid_mul, grid, x, gate, out, size, x.stride(0), gate.stride(0), BLOCK=block, pdl=pdl)
    return out


define("sigmoid_mul.triton", _sigmoid_mul)
