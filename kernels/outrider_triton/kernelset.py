"""TritonKernels: a KernelSet in Triton with measured configurations, and derived ones where nothing was measured."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.device import (
    Group,
    HeadNorms,
    KernelSet,
    Product,
    RotaryArgs,
    Stream,
)
from outrider.device.kernels import declared_below
from outrider_triton import fused_ops as _fused_ops  # noqa: F401  (these register the operators)
from outrider_triton import ops as _ops  # noqa: F401
from outrider_triton import variants
from outrider_triton.bookkeeping import TritonBookkeeping
from outrider_triton.cache_attention import TritonAttention
from outrider_triton.derive import MAX_TOKENS_TUNED, choose_config
from outrider_triton.device_facts import DeviceFacts
from outrider_triton.experts import TritonExperts
from outrider_triton.launch import compile_only, has_kernel
from outrider_triton.peers import FUSED_BYTES, PeerExchange
from outrider_triton.prefill_attention import PromptAttention
from outrider_triton.recurrent import TritonRecurrent
from outrider_triton.rotary import rotates
from outrider_triton.table import ANY_LAYER, STREAMED, MatmulConfig, Table, bucket, layer_of
from outrider_triton.token_choice import TritonChoices
from outrider_triton.tuned_store import ChoiceRow, PromptStore, TunedStore, merge_choices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from outrider.device import DecoderShape, TuningProgress, TuningResult

_TRITON = torch.ops.outrider
_MAX_MOVES = 256


class TritonKernels(
    TritonChoices, TritonBookkeeping, TritonAttention, TritonExperts, TritonRecurrent, KernelSet, complete=True
):
    """Kernels in Triton for one device.

    ``facts`` describes the device. ``table`` has its measurements, or is None. Configurations that the table lacks are
    derived from the facts (:mod:`outrider_triton.derive`). ``device`` is where tuning runs. ``takes_over`` uses choices that
    an earlier process stored on this machine.

    The references compute float64, which they do exactly, and shapes that a kernel's docstring excludes. The library
    computes float32 products.
    """

    name = "triton"
    tunes = True
    _layer: str = ANY_LAYER

    def __init__(
        self,
        facts: DeviceFacts,
        *,
        table: Table | None = None,
        device: torch.device | None = None,
        takes_over: bool = True,
    ) -> None:
        self.facts, self.device, self.takes_over = facts, device, takes_over
        self._tables = [table]
        self.processors, self.pdl = facts.processors, facts.pdl
        self._scope = variants.VariantScope()
        self._exchanges: WeakKeyDictionary[Group, PeerExchange] = WeakKeyDictionary()
        self._derived: dict[tuple[str, int, int, int, int], MatmulConfig | None] = {}
        self._derived_quantized, self._derived_experts = {}, {}
        self._prompts = PromptAttention(facts)
        declared = declared_below(type(self), TritonKernels)
        if "cache_formats" not in declared:  # a subclass with its own cache kernels states its own formats
            # Without e4m3 instructions Triton has no conversions from and to e4m3.
            self.cache_formats = frozenset({"fp8"} if facts.fp8 else ())
        if "name" not in declared:
            tuned = f"derived for {facts.architecture}" if table is None else f"tuned for {table.device}"
            self.name = f"triton, {tuned}"

    def every_variant(self) -> AbstractContextManager[None] | None:
        """Compile every table configuration of a weight, and every split of cached tokens and of the vocabulary."""
        return self._scope.entered()

    def compiled(self) -> Mapping[str, int]:
        """Return the number of compiled variants per kernel, read from Triton's caches."""
        return variants.compiled()

    def chosen(self) -> Mapping[str, str]:
        """Return the name of the kernel that computes prefill attention, and unusable candidates with reasons."""
        return self._prompts.reports

    def _products(
        self, operator: str, x: Tensor, weight: Tensor, *, scaled: bool = False, rotary: RotaryArgs | None = None
    ) -> Iterator[list[int]]:
        """Yield every configuration to compile for this weight, once, inside the scope.

        ``scaled``: ``x`` is still to be divided by its root mean square. ``rotary``: the product rotates and writes the
        cache.
        """
        if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype is not weight.dtype or not weight.is_contiguous():
            return
        n, k = weight.shape
        half, cache_dtype = (0, None) if rotary is None else (rotary.k_cache.shape[3] // 2, rotary.k_cache.dtype)
        if self._scope.must_compile((operator, x.dtype, n, k, scaled, cache_dtype, self._layer)):
            dtype = str(x.dtype)[6:]
            for config in variants.product_configs(
                self.facts, self.table, operator, dtype, n=n, k=k, half=half, layer=self._layer
            ):
                with compile_only():
                    yield config.as_list()

    def matmul_config(self, operator: str, x: Tensor, weight: Tensor, *, half: int = 0) -> MatmulConfig | None:
        """Return the configuration for ``x [..., K] @ weight.T``, or None for torch's product.

        ``operator`` is one of :data:`outrider_triton.derive.OPERATORS`. The weight of a gated product holds gate and up. The
        consumer of ``linear_parts`` adds the parts of a split product. ``half`` is half a head's size, for ``linear_rope``.
        """
        if x.dtype not in (torch.bfloat16, torch.float16) or not weight.is_contiguous() or x.dtype is not weight.dtype:
            return None
        m, (n, k) = x.numel() // x.shape[-1], weight.shape
        if not 0 < m <= MAX_TOKENS_TUNED:
            return None
        table = self.table
        entry = None if table is None else table.entry(operator, str(x.dtype)[6:], n=n, k=k, m=m, layer=self._layer)
        if entry is not None:
            return entry.config
        key = operator, n, k, half, bucket(m)
        if key not in self._derived:
            self._derived[key] = choose_config(self.facts, operator, m=m, n=n, k=k, half=half)
        return self._derived[key]

    # -- measurements ----------------------------------------------------------------------------------------------

    @property
    def table(self) -> Table | None:
        """Return the measurements in use, or None. All :meth:`for_shape` copies share them."""
        return self._tables[-1]

    @table.setter
    def table(self, table: Table | None) -> None:
        self._tables[:] = [table]

    def for_shape(self, shape: DecoderShape) -> Self:
        """Return a copy that shares all state and prefers choices measured in layers of this shape."""
        copied = copy(self)
        copied._layer = layer_of(shape)
        return copied

    def tune(
        self,
        shapes: Sequence[DecoderShape],
        *,
        deadline_s: float,
        directory: Path,
        progress: TuningProgress | None = None,
    ) -> tuple[TuningResult, ...]:
        """Measure and store choices for bfloat16 and up to 128 tokens; see :mod:`outrider_triton.tuner`."""
        from outrider_triton.tuner import tune

        return tune(self, shapes, deadline_s=deadline_s, directory=directory, progress=progress)

    def use_tuned(self, directory: Path) -> int:
        """Load stored choices for this device name, torch, Triton and kernel sources; return how many.

        Also load the ranking of prefill kernels, and store later warm-up measurements there. Does nothing, and returns 0, if
        the set ignores earlier measurements.
        """
        if not self.takes_over:
            return 0
        store = TunedStore(directory, self.facts)
        rows = store.load()
        self.use_choices(rows)
        self._prompts.use_store(PromptStore(store.home / "prompts"))
        return len(rows)

    def use_choices(self, rows: Sequence[ChoiceRow]) -> None:
        """Use these tuned choices from now on, before those of the table and the estimates."""
        self.table = merge_choices(self.table, self.facts, rows)

    # -- matrix products -------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply with Triton's kernel if it was measured to be faster than the library's for this weight shape and token
        count.
        """
        for config_list in self._products("linear", x, weight):
            _TRITON.linear.triton(_sample(x), weight, bias, config_list, self.pdl)
        config = self.matmul_config("linear", x, weight)
        if config is None:
            return super().linear(x, weight, bias)
        return _TRITON.linear.triton(x, weight, bias, config.as_list(), self.pdl)  # type: ignore[no-any-return]

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply by the gate and up weights and apply SwiGLU, in one kernel if that was faster."""
        for config_list in self._products("linear_silu_mul", x, weight):
            _TRITON.linear_silu_mul.triton(_sample(x), weight, bias, config_list, self.pdl)
        config = self.matmul_config("linear_silu_mul", x, weight)
        if config is None:
            return super().linear_silu_mul(x, weight, bias)
        return _TRITON.linear_silu_mul.triton(x, weight, bias, config.as_list(), self.pdl)  # type: ignore[no-any-return]

    def linear_add_rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        """Multiply, add the product to the residual and return the norm; the norm kernel sums the parts of a
        split product.
        """
        for config_list in self._products("linear_parts", x, weight) if has_kernel(residual) else ():
            parts = _TRITON.linear_parts.triton(_sample(x), weight, config_list, self.pdl)
            # The kernel writes the residual, so compile with a copy.
            _TRITON.add_rms_norm.triton(parts, bias, _sample(residual).clone(), norm, eps, self.pdl)
        config = self.matmul_config("linear_parts", x, weight)
        if config is None or not has_kernel(residual):
            return super().linear_add_rms_norm(x, weight, bias, residual, norm, eps)
        parts = _TRITON.linear_parts.triton(x, weight, config.as_list(), self.pdl)
        return _TRITON.add_rms_norm.triton(parts, bias, residual, norm, eps, self.pdl)  # type: ignore[no-any-return]

    def _pair(
        self, added: Product, residual: Tensor, norm: Tensor, consumer: str, weight: Tensor, *, half: int = 0
    ) -> tuple[MatmulConfig, MatmulConfig] | None:
        """Return configurations of a product that ends a residual row and of the product that takes its norm; None: not
        fused.

        Only bfloat16 is fused: a row before the division by its root mean square may overflow float16.
        """
        if residual.dtype is not torch.bfloat16 or not residual.is_contiguous() or not has_kernel(norm):
            return None
        adding = self.matmul_config("linear_add_scaled", added.x, added.weight)
        taking = self.matmul_config(consumer, residual, weight, half=half)
        return None if adding is None or taking is None else (adding, taking)

    def _scaled(self, added: Product, residual: Tensor, norm: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the scaled row and squares of each variant of a pair's first product; nothing outside the scope."""
        if residual.dtype is torch.bfloat16 and residual.is_contiguous() and has_kernel(norm):
            for config_list in self._products("linear_add_scaled", added.x, added.weight):
                yield _TRITON.linear_add_scaled.triton(
                    _sample(added.x), added.weight, added.bias, _sample(residual).clone(), norm, config_list, self.pdl
                )

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Add the product to the residual in place, in one kernel if that was measured to be faster."""
        for config_list in self._products("linear_add", x, weight) if residual.dtype is x.dtype else ():
            _TRITON.linear_add.triton(_sample(x), weight, bias, _sample(residual).clone(), config_list, self.pdl)
        config = self.matmul_config("linear_add", x, weight)
        if config is None or residual.dtype is not x.dtype or not residual.is_contiguous():
            return super().linear_add(x, weight, bias, residual)
        _TRITON.linear_add.triton(x, weight, bias, residual, config.as_list(), self.pdl)
        return residual

    def linear_rope_write_cache(self, product: Product, rotary: RotaryArgs) -> Tensor:
        """Multiply to queries, keys and values, rotate them and write the cache, in one kernel if that was faster."""
        half = rotary.k_cache.shape[3] // 2
        for config_list in (
            self._products("linear_rope", product.x, product.weight, rotary=rotary) if rotates(rotary, product.x) else ()
        ):
            if not _boxes_fit_heads(config_list, rotary):
                continue
            sample = _sample(product.x), None, product.weight, product.bias
            _TRITON.rope_write_cache.triton_linear(*sample, 0.0, *_sample_rotary(rotary), config_list, self.pdl)
        config = self.matmul_config("linear_rope", product.x, product.weight, half=half)
        if config is None or not rotates(rotary, product.x) or not _boxes_fit_heads(config.as_list(), rotary):
            return super().linear_rope_write_cache(product, rotary)
        return _TRITON.rope_write_cache.triton_linear(  # type: ignore[no-any-return]
            product.x, None, product.weight, product.bias, 0.0, *rotary, config.as_list(), self.pdl
        )

    def norm_linear_silu_mul(
        self, added: Product, residual: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Add a product to the residual, multiply its norm by the gate and up weights and apply SwiGLU.

        Uses two kernels if they were measured to be faster than three.
        """
        for scaled, squares in self._scaled(added, residual, norm):
            for config_list in self._products("scaled_silu_mul", scaled, weight):
                _TRITON.linear_silu_mul.triton(scaled, weight, bias, config_list, self.pdl, squares, eps)
        pair = self._pair(added, residual, norm, "scaled_silu_mul", weight)
        if pair is None:
            return super().norm_linear_silu_mul(added, residual, norm, eps, weight, bias)
        adding, taking = (config.as_list() for config in pair)
        scaled, squares = _TRITON.linear_add_scaled.triton(*added, residual, norm, adding, self.pdl)
        return _TRITON.linear_silu_mul.triton(scaled, weight, bias, taking, self.pdl, squares, eps)  # type: ignore[no-any-return]

    def norm_linear_rope_write_cache(
        self,
        added: Product,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        rotary: RotaryArgs,
    ) -> Tensor:
        """Add a product to the residual, multiply its norm to queries, keys and values, rotate them and write the cache.

        Uses two kernels if they were measured to be faster than four.
        """
        half = rotary.k_cache.shape[3] // 2
        for first in self._scaled(added, residual, norm) if rotates(rotary, residual) else ():
            for config_list in self._products("linear_rope", first[0], weight, scaled=True, rotary=rotary):
                if not _boxes_fit_heads(config_list, rotary):
                    continue
                _TRITON.rope_write_cache.triton_linear(
                    *first, weight, bias, eps, *_sample_rotary(rotary), config_list, self.pdl
                )
        pair = self._pair(added, residual, norm, "linear_rope", weight, half=half)
        if pair is None or not rotates(rotary, residual) or not _boxes_fit_heads(pair[1].as_list(), rotary):
            return super().norm_linear_rope_write_cache(added, residual, norm, eps, weight, bias, rotary)
        adding, taking = (config.as_list() for config in pair)
        scaled, squares = _TRITON.linear_add_scaled.triton(*added, residual, norm, adding, self.pdl)
        return _TRITON.rope_write_cache.triton_linear(  # type: ignore[no-any-return]
            scaled, squares, weight, bias, eps, *rotary, taking, self.pdl
        )

    # -- rows ------------------------------------------------------------------------------------------------------

    def embed_beside(self, tokens: Tensor, weight: Tensor, hidden: Tensor) -> Tensor:
        """Concatenate embeddings and features, one program per token and block of columns."""
        if not has_kernel(weight, hidden) or weight.dtype is not hidden.dtype or hidden.stride(-1) != 1:
            return super().embed_beside(tokens, weight, hidden)
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

    def head_norm_rope_write_cache(self, made: Tensor, norms: HeadNorms, rotary: RotaryArgs) -> Tensor:
        """Normalise the heads of queries and keys, rotate them and write the cache in one kernel, one program per token and
        head.
        """
        supported = has_kernel(made, *norms[:2]) and rotates(rotary, made, partly=True) and made.stride(1) == 1
        if not supported or norms.queries.dtype is not norms.keys.dtype:
            return super().head_norm_rope_write_cache(made, norms, rotary)
        queries: Tensor = _TRITON.rope_write_cache.triton_parts(made, None, *rotary, made.dtype, self.pdl, *norms)
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


def _sample(x: Tensor) -> Tensor:
    """Return at most the first rows of ``x``: the number of rows does not select a kernel variant."""
    return x.reshape(-1, x.shape[-1])[:4]


def _boxes_fit_heads(config: list[int], rotary: RotaryArgs) -> bool:
    """Return True unless boxes of rows straddle half a head; unstreamed kernels rotate row by row."""
    return config[7] != STREAMED or rotary.k_cache.shape[3] // 2 % config[1] == 0


def _sample_rotary(rotary: RotaryArgs) -> RotaryArgs:
    """Return the rotary arguments of the first rows."""
    return rotary._replace(cos=rotary.cos[:4], sin=rotary.sin[:4], slots=rotary.slots[:4])
