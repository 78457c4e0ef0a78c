"""TritonRows: the part of the kernel set that computes row by row: norms, activation, rotation, copies and embeddings."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.device import Group, HeadNorms, RotaryArgs, Stream
from outrider_triton.launch import compile_only, has_kernel
from outrider_triton.peers.exchange import FUSED_BYTES, PeerExchange
from outrider_triton.rows import operators as _ops  # noqa: F401  (registers the operators)
from outrider_triton.rows.rotary import rotates
from outrider_triton.tiles import variants
from outrider_triton.tiles.facts import DeviceFacts
from outrider_triton.tiles.store.table import Table

_TRITON = torch.ops.outrider
_MAX_MOVES = 256


class TritonRows(variants.WarmedKernels):
    """Kernels with one program per row."""

    def __init__(self, facts: DeviceFacts, table: Table | None = None) -> None:
        super().__init__(facts, table)
        self._exchanges: WeakKeyDictionary[Group, PeerExchange] = WeakKeyDictionary()

    def embed_beside(self, tokens: Tensor, weight: Tensor, hidden: Tensor) -> Tensor:
        """Concatenate embeddings and features, one program per token and block of columns."""
        if not has_kernel(weight, hidden) or weight.dtype is not hidden.dtype or hidden.stride(-1) != 1:
            return torch.cat((self.embedding(tokens, weight), hidden), dim=-1)
        return _TRITON.embed_beside.triton(tokens, weight, hidden, self.pdl)  # type: ignore[no-any-return]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the RMS norm of each row, one program per row."""
        if not has_kernel(x):
            return super().rms_norm(x, weight, eps)
        return _TRITON.rms_norm.triton(x, weight, eps, self.pdl)  # type: ignore[no-any-return]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add ``x`` to the residual in place and return the norm of each row, one program per row."""
        if not has_kernel(x) or not residual.is_contiguous():
            return super().add_rms_norm(x, residual, weight, eps)
        return _TRITON.add_rms_norm.triton(x, None, residual, weight, eps, self.pdl)  # type: ignore[no-any-return]

    def all_reduce_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, group: Group, stream: Stream
    ) -> Tensor:
        """Sum rows over the ranks, add them to the residual and normalise, in one kernel if peer memory is accessible and
        rows are few.
        """
        if group.has_peer_memory and group.size > 1:
            exchange = self._exchanges.get(group)
            if exchange is None:
                exchange = self._exchanges[group] = PeerExchange(group, most_bytes=FUSED_BYTES, pdl=self.pdl)
            if exchange.accepts_rows(x, residual, weight):
                out = torch.empty_like(residual)
                group.announce(x, stream=stream, reads=(residual, weight), writes=(residual, out))
                exchange.all_reduce_rms_norm(x, residual, weight, eps, out)
                return out
        return super().all_reduce_rms_norm(x, residual, weight, eps, group=group, stream=stream)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute SwiGLU of the gate half and the up half of each row."""
        if not has_kernel(gate_up):
            return super().silu_mul(gate_up)
        return _TRITON.silu_mul.triton(gate_up, self.pdl)  # type: ignore[no-any-return]

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply by the sigmoid of the gate, one program per row and block of columns."""
        if not has_kernel(x, gate) or x.stride(-1) != 1 or gate.stride(-1) != 1:
            return super().sigmoid_mul(x, gate)
        return _TRITON.sigmoid_mul.triton(x, gate, self.pdl)  # type: ignore[no-any-return]

    def rope_write_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> None:
        """Rotate queries and keys and write the cache, one program per token."""
        contiguous = all(x.stride(-1) == 1 for x in (q, k, v, cos, sin))
        if not has_kernel(q) or not contiguous or cos.shape[1] != q.shape[2]:
            super().rope_write_cache(q, k, v, cos, sin, k_cache, v_cache, slots)
            return
        _TRITON.rope_write_cache.triton(q, k, v, cos, sin, k_cache, v_cache, slots, self.pdl)

    def head_norm_rope_write_cache(self, qkv: Tensor, norms: HeadNorms | None, rotary: RotaryArgs) -> Tensor:
        """Normalise the heads of queries and keys, rotate them and write the cache in one kernel, one program per token and
        head.
        """
        supported = has_kernel(qkv) and rotates(rotary, qkv, partly=True) and qkv.stride(1) == 1
        if norms is None or not supported or not has_kernel(*norms[:2]) or norms.queries.dtype is not norms.keys.dtype:
            return super().head_norm_rope_write_cache(qkv, norms, rotary)
        queries: Tensor = _TRITON.rope_write_cache.triton_parts(qkv, None, *rotary, qkv.dtype, self.pdl, *norms)
        return queries

    def move_cache(self, k_cache: Tensor, v_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Move cache rows in one launch, up to 256 rows."""
        if not has_kernel(k_cache) or sources.shape[0] > _MAX_MOVES:
            super().move_cache(k_cache, v_cache, sources, destinations)
            return
        if self._scope.must_compile(("move_cache", k_cache.dtype, k_cache.stride(1))):
            for count in (1 << exponent for exponent in range(_MAX_MOVES.bit_length())):
                reserved = torch.zeros(count, dtype=sources.dtype, device=sources.device)
                with compile_only():
                    _TRITON.move_cache.triton(k_cache, v_cache, reserved, reserved, self.pdl)
        _TRITON.move_cache.triton(k_cache, v_cache, sources, destinations, self.pdl)

    def gather_rows(self, state: Tensor, rows: Tensor) -> Tensor:
        """Copy the selected rows of ``state`` to a new tensor, one program per row and block of columns."""
        if not has_kernel(state) or not state.is_contiguous():
            return super().gather_rows(state, rows)
        return _TRITON.gather_rows.triton(state, rows, self.pdl)  # type: ignore[no-any-return]

    def copy_rows(self, source: Tensor, out: Tensor) -> None:
        """Copy each row of ``source`` to ``out``, one program per row and block of columns."""
        if not has_kernel(source) or source.stride(-1) != 1 or out.stride(-1) != 1:
            super().copy_rows(source, out)
            return
        _TRITON.copy_rows.triton(source, out, self.pdl)

    def scatter_rows(self, state: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write rows to the selected rows of ``state``, one program per row and block of columns."""
        if not has_kernel(state) or not state.is_contiguous():
            super().scatter_rows(state, rows, values)
            return
        _TRITON.scatter_rows.triton(state, rows, values, self.pdl)

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Look up embeddings by gathering rows."""
        if tokens.dim() != 1 or not has_kernel(weight) or not weight.is_contiguous():
            return super().embedding(tokens, weight)
        return _TRITON.gather_rows.triton(weight, tokens, self.pdl)  # type: ignore[no-any-return]
