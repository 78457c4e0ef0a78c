"""Operators of recurrent layers (:mod:`outrider_triton.jit.recurrent`, :mod:`outrider_triton.jit.recurrent_chunks`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.device.kernels.checks import expect
from outrider_triton.define import define
from outrider_triton.jit import recurrent as jit
from outrider_triton.jit import recurrent_chunks as jit_chunks
from outrider_triton.launch import launch, power_of_two

MAX_TAPS = 4
"""Maximum kernel size of a short convolution that the delta rule computes itself."""
_TOKENS_PER_PROGRAM = 16
_CHUNK = 64
_ROWS_PER_PROGRAM = 16
_STATE_NUMBERS = 128 * 128
"""Numbers of a state that one program holds in registers."""
_MAX_REGISTERS = 128
"""So few registers per thread that two programs of eight warps run on a multiprocessor."""
_VALUES_PER_WARP = 16
_FACTORS = 4


def _convolution(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    rows: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query: int,
    commit: Tensor | None,
    uniform: bool,
    pdl: bool,
) -> Tensor:
    out = _allocate(x, x.shape, uniform)
    width, block = x.shape[1], min(power_of_two(x.shape[1]), 256)
    launch(
        jit.short_convolution,
        (triton.cdiv(max_query, _TOKENS_PER_PROGRAM), triton.cdiv(width, block), rows.shape[0]),
        *(x, weight, state, rows, query_start, seq_lens, commit, out, x.stride(0), width),
        KERNEL=weight.shape[1],
        BLOCK_T=_TOKENS_PER_PROGRAM,
        BLOCK_C=block,
        pdl=pdl,
        warps=4,
    )
    return out


define(
    "short_convolution.triton",
    _convolution,
    lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format),
    writes=("state",),
)


def _commit_window(
    x: Tensor,
    state: Tensor,
    rows: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    commit: Tensor,
    kernel_size: int,
    pdl: bool,
) -> None:
    """Write the convolution's state after the committed tokens, without results."""
    width, block = x.shape[1], min(power_of_two(x.shape[1]), 256)
    launch(
        jit.commit_window,
        (triton.cdiv(width, block), rows.shape[0]),
        *(x, state, rows, query_start, seq_lens, commit, x.stride(0), width),
        KERNEL=kernel_size,
        BLOCK_C=block,
        pdl=pdl,
        warps=4,
    )


define("short_convolution.triton_commit", _commit_window, writes=("state",))


def fits_whole_heads(state: Tensor) -> bool:
    """Return True if one program can hold the state of one head, so that it sees a whole head's result."""
    return power_of_two(state.shape[2]) * power_of_two(state.shape[3]) <= _STATE_NUMBERS


def _rule_constants(state: Tensor, kernel: int) -> tuple[int, dict[str, Any]]:
    """Return the number of blocks of values, and the launch settings of :func:`outrider_triton.jit.recurrent.delta_rule`."""
    key_size, value_size = state.shape[2:]
    block_d = power_of_two(key_size)
    block_e = min(power_of_two(value_size), _STATE_NUMBERS // block_d)
    values = min(block_e, _VALUES_PER_WARP)  # a thread loads four
    constants = {"D": key_size, "E": value_size, "KERNEL": kernel, "BLOCK_D": block_d, "BLOCK_E": block_e}
    constants |= {"LANES": min(block_d, 128 // values), "VALUES": values, "warps": block_e // values}
    return triton.cdiv(value_size, block_e), constants | {"maxnreg": _MAX_REGISTERS}


def _empty_vectors(mixed: Tensor, programs: int, constants: dict[str, Any]) -> Tensor:
    """Return scratch memory for q, k and v of each token, which each program of a sequence prepares for itself."""
    size = mixed.shape[0] * programs * (2 * constants["BLOCK_D"] + constants["BLOCK_E"] + _FACTORS)
    return mixed.new_empty(size, dtype=torch.float32)


def _values(mixed: Tensor, state: Tensor) -> tuple[int, ...]:
    return mixed.shape[0], state.shape[1], state.shape[3]


def _allocate(x: Tensor, shape: Sequence[int], uniform: bool) -> Tensor:
    """Return memory for a result in x's dtype; zeros if there may be padding, which no program writes."""
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
    commit: Tensor | None,
    uniform: bool,
    pdl: bool,
) -> Tensor:
    del max_query  # every program reads its sequence's number of tokens
    _expect_rows(mixed, gates, state)
    out = _allocate(mixed, _values(mixed, state), uniform)
    heads = state.shape[1]
    blocks, constants = _rule_constants(state, 0)
    vectors = _empty_vectors(mixed, heads * blocks, constants)
    key_width = (mixed.shape[1] - heads * state.shape[3]) // 2
    launch(
        jit.delta_rule,
        (heads, blocks, rows.shape[0]),
        *(mixed, gates, None, None, a_log, dt_bias, None, None, state),
        *(rows, query_start, seq_lens, rows if commit is None else commit, vectors, out, 0.0),
        *(key_width, heads, heads * state.shape[2] // key_width, mixed.stride(0), gates.stride(0), 0),
        *(int(commit is not None), 1, 0),
        **constants,
        pdl=pdl,
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


define(
    "gated_delta_rule.triton",
    _rule,
    lambda mixed, gates, a_log, dt_bias, state, *rest: mixed.new_empty(_values(mixed, state)),
    writes=("state",),
)


def _rule_and_neighbours(
    mixed: Tensor,
    gates: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    inputs: Tensor,
    state: Tensor,
    rows: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    commit: Tensor | None,
    eps: float,
    settled: bool,
    uniform: bool,
    pdl: bool,
) -> Tensor:
    """Compute short convolution, delta rule and gated norm in one kernel.

    Without ``gate``, compute only the state after ``commit`` tokens, by the same machine code. The convolution's state
    ``inputs`` is only read. ``settled``: no kernel that may still run writes states or lengths.
    """
    _expect_rows(mixed, gates, state)
    whole = fits_whole_heads(state) and weight.shape[1] <= MAX_TAPS and inputs.is_contiguous() and weight.is_contiguous()
    expect(whole, lambda: f"a head's state of {tuple(state.shape[2:])} or {weight.shape[1]} taps don't fit in one program")
    writes_out = gate is not None
    out = _allocate(mixed, _values(mixed, state) if writes_out else (0,), uniform)
    heads = state.shape[1]
    blocks, constants = _rule_constants(state, weight.shape[1])
    vectors = _empty_vectors(mixed, heads * blocks, constants)
    key_width = (mixed.shape[1] - heads * state.shape[3]) // 2
    launch(
        jit.delta_rule,
        (heads, blocks, rows.shape[0]),
        *(mixed, gates, mixed if gate is None else gate, weight, a_log, dt_bias, norm, inputs, state),
        *(rows, query_start, seq_lens, rows if commit is None else commit, vectors, out if writes_out else mixed, eps),
        *(key_width, heads, heads * state.shape[2] // key_width, mixed.stride(0), gates.stride(0)),
        *(mixed.stride(0) if gate is None else gate.stride(0), int(commit is not None), int(writes_out), int(settled)),
        **constants,
        pdl=pdl,
    )
    return out


# Overloads of the operator that accesses the same rows of its states.
define(
    "gated_delta_rule.triton_fused",
    _rule_and_neighbours,
    lambda mixed, gates, gate, weight, a_log, dt_bias, norm, inputs, state, *rest: (
        mixed.new_empty(0) if gate is None else mixed.new_empty(_values(mixed, state))
    ),
    writes=("state",),
)


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
    """Compute the delta rule of prompts."""
    _expect_rows(mixed, gates, state)
    out = _allocate(mixed, _values(mixed, state), uniform=False)
    tokens, (heads, key_size, value_size) = mixed.shape[0], state.shape[1:]
    key_width = (mixed.shape[1] - heads * value_size) // 2
    w, u = mixed.new_empty((tokens, heads, key_size)), mixed.new_empty((tokens, heads, value_size))
    totals = mixed.new_empty((heads, tokens), dtype=torch.float32)
    sizes = key_width, heads, heads * key_size // key_width, mixed.stride(0)
    # The matrix unit multiplies 16 rows and columns or more.
    block_d, block_e = max(power_of_two(key_size), 16), max(power_of_two(value_size), 16)
    constants = {"D": key_size, "E": value_size, "BLOCK_D": block_d}
    launch(
        jit_chunks.corrections,
        (heads, triton.cdiv(max_query, _CHUNK), rows.shape[0]),
        *(mixed, gates, a_log, dt_bias, query_start, w, u, totals, tokens, *sizes, gates.stride(0)),
        **constants,
        BLOCK_E=block_e,
        pdl=pdl,
        warps=8,
    )
    block_e = min(block_e, 32 if block_d > 128 else 64)
    launch(
        jit_chunks.chunk_states,
        (heads, triton.cdiv(value_size, block_e), rows.shape[0]),
        *(mixed, w, u, totals, state, rows, query_start, seq_lens, out, tokens, *sizes),
        **constants,
        BLOCK_E=block_e,
        num_stages=2,
        pdl=pdl,
        warps=4,
    )
    return out


define(
    "chunk_gated_delta_rule.triton",
    _chunks,
    lambda mixed, gates, a_log, dt_bias, state, *rest: mixed.new_empty(_values(mixed, state)),
    writes=("state",),
)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    expect(x.shape[-1:] == weight.shape, lambda: f"norm of {tuple(x.shape)} with a weight of {tuple(weight.shape)}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, pdl: bool) -> Tensor:
    out = _normed(x, weight)
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


define("gated_rms_norm.triton", _gated_rms_norm, lambda x, gate, weight, eps, pdl: _normed(x, weight))


def _sigmoid_mul(x: Tensor, gate: Tensor, pdl: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = x.shape[-1]
    block = min(power_of_two(size), 1024)
    grid = (x.numel() // size if size else 0, triton.cdiv(size, block))
    launch(jit.sigmoid_mul, grid, x, gate, out, size, x.stride(0), gate.stride(0), BLOCK=block, pdl=pdl)
    return out


define(
    "sigmoid_mul.triton",
    _sigmoid_mul,
    lambda x, gate, pdl: torch.empty_like(x, memory_format=torch.contiguous_format),
)
