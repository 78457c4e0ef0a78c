"""TritonKernels: a KernelSet in Triton with measured configurations, and derived ones where nothing was measured."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.device import (
    LANE_ACCEPT,
    LANE_DRAFT,
    LANE_RESIDUAL,
    LANE_SAMPLE,
    AttentionMetadata,
    CorrectedRouting,
    ExpertActivation,
    ExpertBiases,
    ExpertsBlock,
    Group,
    HeadNorms,
    KernelSet,
    QuantizedWeight,
    RecurrentBatch,
    RequestInputs,
    RequestRows,
    RotaryArgs,
    Stream,
    Weight,
)
from outrider.device.kernels.weights import linear, plain
from outrider_triton import bookkeeping as _bookkeeping_ops  # noqa: F401  (these register the operators)
from outrider_triton import recurrent as _recurrent_ops  # noqa: F401
from outrider_triton import selection as _selection_ops  # noqa: F401
from outrider_triton.attention.cached import CacheAttention, attends
from outrider_triton.attention.latent import (
    HEAD_LINEAR_ROWS,
    attends_to_latents,
    head_linear_rows,
    latent_launch,
    writes_latents,
)
from outrider_triton.attention.prefill import PrefillOperands, PromptAttention
from outrider_triton.blocks import FusedBlocks
from outrider_triton.experts.mixtures import ExpertProducts
from outrider_triton.launch import compile_only, has_kernel
from outrider_triton.peers import PeerExchange
from outrider_triton.products.dense import DenseProducts
from outrider_triton.products.operands import rows_like
from outrider_triton.quantized.plan import plan
from outrider_triton.quantized.products import QuantizedProducts
from outrider_triton.rows import rotates
from outrider_triton.tiles.facts import DeviceFacts
from outrider_triton.tiles.selection import TileSelection, compiled
from outrider_triton.tiles.store.choices import ChoiceRow, PromptStore, TunedStore, merge_choices
from outrider_triton.tiles.store.table import Table, layer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from outrider.device import DecoderShape, TuningProgress, TuningResult

_TRITON = torch.ops.outrider
_MAX_MOVES = 256
_MAX_EXPERTS = 1024
"""Maximum number of experts that the routing kernel holds in one program."""
_MAX_HEAD_SIZE = 256
"""Maximum size of keys and values of a head of a recurrent layer, whose state or products must fit in one program."""
_MAX_ELEMENTS_PER_PROGRAM = 1 << 14
"""Maximum number of elements of a row that one program checks for NaN; several programs share a longer row."""


class TritonKernels(FusedBlocks):
    """Kernels in Triton for one device.

    ``facts`` describes the device. ``table`` has its measurements, or is None. Configurations that the table lacks are
    derived from the facts (:mod:`outrider_triton.tiles`). ``device`` is where tuning runs. ``takes_over`` uses choices that
    an earlier process stored on this machine. ``tiles`` selects configurations by another rule.

    The references compute float64, which they do exactly, and shapes that a kernel's docstring excludes. The library
    computes float32 products.

    The methods decide which kernel computes a call. The parts hold the state of these decisions: ``tiles`` the tile
    configurations, and ``dense``, ``quantized``, ``attention`` and ``mixtures`` the launches that need them.
    """

    name = "triton"
    optional_operands = KernelSet.optional_operands
    tunes = True

    def __init__(
        self,
        facts: DeviceFacts,
        *,
        table: Table | None = None,
        device: torch.device | None = None,
        takes_over: bool = True,
        tiles: TileSelection | None = None,
    ) -> None:
        self.facts, self.pdl, self.device, self.takes_over = facts, facts.pdl, device, takes_over
        # NVIDIA's drivers load kernels during a capture since CUDA 12.3.
        self.loads_in_capture = device is not None and facts.capability > 0 and _driver_version() >= (12, 3)
        self.mixtures = ExpertProducts(facts)
        self._exchanges: WeakKeyDictionary[Group, PeerExchange] = WeakKeyDictionary()
        self._compose(tiles or TileSelection(facts, table), PromptAttention(facts))
        kinds = type(self).__mro__
        declared = {name for kind in kinds[: kinds.index(TritonKernels)] for name in vars(kind)}
        if "cache_formats" not in declared:  # a subclass with its own cache kernels states its own formats
            # Without e4m3 instructions Triton has no conversions from and to e4m3.
            self.cache_formats = frozenset({"fp8"} if facts.fp8 else ())
        if "name" not in declared:
            tuned = f"derived for {facts.architecture}" if table is None else f"tuned for {table.device}"
            self.name = f"triton, {tuned}"

    def _compose(self, tiles: TileSelection, prompts: PromptAttention) -> None:
        """Create the parts that depend on the layer's shape: products and attention."""
        self.tiles = tiles
        self.dense = DenseProducts(self, tiles)
        self.quantized = QuantizedProducts(self, tiles)
        self.attention = CacheAttention(self, tiles, self.quantized, prompts)

    def is_native(self, name: str, block: object = None) -> bool:
        """Return False also for a block with weights of 32 or 64 bits, whose products torch's library computes."""
        weight = getattr(block, "qkv", getattr(block, "gate_up", getattr(block, "projections", (None,))[0]))
        wide = isinstance(weight, Tensor) and weight.dtype.itemsize > 2
        return super().is_native(name, block) and not wide

    def every_variant(self) -> AbstractContextManager[None] | None:
        """Return a scope in which each call compiles every configuration of its weight, and every split of cached tokens and
        of the vocabulary.
        """
        return self.tiles.scope.entered()

    def compile_ahead(self) -> AbstractContextManager[None] | None:
        """Return a scope in which launches only compile their kernel and operators return zeros."""
        return compile_only()

    def compiled(self) -> Mapping[str, int]:
        """Return the number of compiled variants per kernel, read from Triton's caches."""
        return compiled()

    def chosen(self) -> Mapping[str, str]:
        """Return the name of the kernel that computes prefill attention, and unusable candidates with reasons."""
        return self.attention.prompts.reports

    def batch_invariant(self) -> KernelSet:
        """Return kernels with a fixed order of each row's sums (:mod:`outrider_triton.exact`)."""
        from outrider_triton.exact import ExactKernels

        return ExactKernels(self)

    # -- measurements ----------------------------------------------------------------------------------------------

    def for_shape(self, shape: DecoderShape) -> Self:
        """Return a copy that shares all state with this kernel set and prefers choices that were measured in layers of
        ``shape``.
        """
        copied = copy(self)
        copied._compose(self.tiles.for_layer(layer_of(shape)), self.attention.prompts)
        return copied

    def tune(
        self,
        shapes: Sequence[DecoderShape],
        *,
        deadline_s: float,
        directory: Path,
        progress: TuningProgress | None = None,
    ) -> tuple[TuningResult, ...]:
        """Measure and store choices for bfloat16 and up to 128 tokens; see :mod:`outrider_triton.tiles.measure.tuner`."""
        from outrider_triton.tiles.measure.tuner import tune

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
        self.attention.prompts.use_store(PromptStore(store.home / "prompts"))
        return len(rows)

    def use_choices(self, rows: Sequence[ChoiceRow]) -> None:
        """Use these tuned choices from now on, before those of the table and the estimates."""
        self.tiles.table = merge_choices(self.tiles.table, self.facts, rows)

    # -- products --------------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply with Triton's kernel if it was measured to be faster than the library's for this weight shape and token
        count.
        """
        for count in self.dense.samples("linear", x, weight, bias is None):
            self.linear(rows_like(x, count), weight, bias)
        config = self.dense.matmul_config("linear", x, weight)
        if config is None:
            return super().linear(x, weight, bias)
        return _TRITON.linear.triton(x, weight, bias, config.as_list(), self.pdl)  # type: ignore[no-any-return]

    def linear_quantized(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        """Multiply by a quantised weight.

        Up to 128 tokens (64 in e4m3 with row scales), Triton's kernel multiplies, after a kernel that quantises the tokens.
        For more tokens the library multiplies: the operands as stored if it supports their format, else the dequantized
        weight. The reference computes float32 and float64.
        """
        if not self.quantized.multiplies(x, weight):
            return super().linear_quantized(x, weight, bias)
        return self.quantized.multiply(x, weight, bias)

    # -- rows ------------------------------------------------------------------------------------------------------

    def fuse_embedding(
        self, tokens: Tensor, table: Tensor, hidden: Tensor, weight: Weight, bias: Tensor | None = None
    ) -> Tensor:
        """Join embeddings and hidden states in one kernel before the product; for a quantised weight, the same kernel
        quantises them.
        """
        fused = None
        if isinstance(weight, QuantizedWeight):
            fused = self.quantized.fuse_embedding_quantized(tokens, table, hidden, weight, bias)
        return linear(self, self._embed_beside(tokens, table, hidden), weight, bias) if fused is None else fused

    def _embed_beside(self, tokens: Tensor, weight: Tensor, hidden: Tensor) -> Tensor:
        """Write each token's embedding and hidden state side by side, [T, 2 H], with one program per token and block of
        columns.
        """
        if not has_kernel(weight, hidden) or weight.dtype is not hidden.dtype or hidden.stride(-1) != 1:
            return torch.cat((self.gather_rows(weight, tokens), hidden), dim=-1)
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
        estimated to be faster than the library.
        """
        if group.has_peer_memory and group.size > 1:
            exchange = self._exchanges.get(group)
            if exchange is None:
                exchange = self._exchanges[group] = PeerExchange(group, pdl=self.pdl)
            shots = exchange.row_shots(x, residual, weight)
            if shots:
                out = torch.empty_like(residual)
                group.announce(x, stream=stream, reads=(residual, weight), writes=(residual, out))
                exchange.all_reduce_rms_norm(x, residual, weight, eps, out, shots=shots)
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
        if not has_kernel(q) or not contiguous:
            super().rope_write_cache(q, k, v, cos, sin, k_cache, v_cache, slots)
            return
        _TRITON.rope_write_cache.triton(q, k, v, cos, sin, k_cache, v_cache, slots, self.pdl)

    def head_norm_rope_write_cache(self, qkv: Tensor, norms: HeadNorms | None, rotary: RotaryArgs) -> Tensor:
        """Normalise the heads of queries and keys, rotate them and write the cache in one kernel, one program per token and
        head.
        """
        supported = has_kernel(qkv) and rotates(rotary, qkv, partly=True) and qkv.stride(1) == 1
        if (
            norms is None
            or norms.joint
            or not supported
            or not has_kernel(*norms[:2])
            or norms.queries.dtype is not norms.keys.dtype
        ):
            return super().head_norm_rope_write_cache(qkv, norms, rotary)
        queries: Tensor = _TRITON.rope_write_cache.triton_parts(qkv, None, *rotary, qkv.dtype, self.pdl, *norms[:3])
        return queries

    def move_cache(self, k_cache: Tensor, v_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Move cache rows in one launch, up to 256 rows."""
        if not has_kernel(k_cache) or sources.shape[0] > _MAX_MOVES:
            super().move_cache(k_cache, v_cache, sources, destinations)
            return
        powers = (1 << exponent for exponent in range(_MAX_MOVES.bit_length()))
        for count in self.tiles.scope.each(("move_cache", k_cache.dtype, k_cache.stride(1), v_cache.stride(1)), powers):
            reserved = torch.zeros(count, dtype=sources.dtype, device=sources.device)
            _TRITON.move_cache.triton(k_cache, v_cache, reserved, reserved, self.pdl)
        _TRITON.move_cache.triton(k_cache, v_cache, sources, destinations, self.pdl)

    def gather_rows(self, state: Tensor, rows: Tensor) -> Tensor:
        """Copy the selected rows of ``state`` to a new tensor, one program per row and block of columns."""
        if not has_kernel(state) or not state[:1].is_contiguous():  # a single row has no distance to another
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

    # -- attention, experts and recurrent layers -------------------------------------------------------------------

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention over the cache's pages with an online softmax.

        Few queries split the cached tokens among programs. Prefill uses the kernel that was measured to be fastest for it.
        Prompts and decoding requests in one batch are computed by a kernel each.
        """
        if not attends(q):
            return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window, sinks=sinks)
        if metadata.parts:
            parts = zip(q.split([tokens for tokens, _ in metadata.parts]), metadata.parts, strict=True)
            attend = partial(self.paged_attention, scale=scale, window=window, sinks=sinks)
            return torch.cat([attend(rows, k_cache, v_cache, each) for rows, (_, each) in parts])
        call = PrefillOperands(q, k_cache, v_cache, metadata, scale, window, sinks)
        self.attention.compile_variants(call, 0)
        if self.attention.prompts.serves(q, metadata):
            if self.tiles.scope.depth:
                self.attention.prompts.measure(call)
            return self.attention.prompts.attend(call)
        config = self.attention.config(q, k_cache, metadata)
        return _TRITON.paged_attention.triton(*self.attention.operands(call, config), 0, sinks)  # type: ignore[no-any-return]

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply each head by its own weight in tiles of tokens. The library computes float32."""
        if x.dtype.itemsize > 2 or x.stride(2) != 1:
            return super().head_linear(x, weight)
        key = "head_linear", x.dtype, x.shape[1:], weight.shape, weight.stride()
        for rows in self.tiles.scope.each(key, HEAD_LINEAR_ROWS):
            _TRITON.head_linear.triton(x, weight, rows, self.pdl)
        return _TRITON.head_linear.triton(x, weight, head_linear_rows(x.shape[0]), self.pdl)  # type: ignore[no-any-return]

    def latent_norm_rope_write_cache(
        self, latent: Tensor, norm: Tensor, eps: float, q: Tensor, k: Tensor, rotary: RotaryArgs
    ) -> None:
        """Normalise the latent vector, rotate and write the cache in one kernel, one program per token."""
        if not writes_latents(latent, norm, q, k, rotary):
            super().latent_norm_rope_write_cache(latent, norm, eps, q, k, rotary)
            return
        _TRITON.rope_write_cache.triton_latent(latent, norm, eps, q, k, *rotary, self.pdl)

    def latent_attention(
        self,
        q: Tensor,
        q_rotated: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
    ) -> Tensor:
        """Compute attention to latent vectors with an online softmax. Few queries split the cached tokens among programs."""
        if not attends_to_latents(self.facts, q, q_rotated):
            return super().latent_attention(q, q_rotated, k_cache, v_cache, metadata, scale=scale)
        config = latent_launch(self.facts, q, q_rotated, metadata)
        batch = metadata.query_start, metadata.seq_lens, metadata.block_table, metadata.tree_mask
        operands = q, q_rotated, k_cache, v_cache, *batch, metadata.max_query, metadata.max_kv, scale, False
        shape = q.shape[1:], q_rotated.shape[2], k_cache.shape[1], metadata.tree_mask is None
        key = "latent_attention", q.dtype, k_cache.dtype, config.block_rows, *shape
        for split in self.tiles.scope.each(key, (1, 2, 4, 8, 16, 32)):
            _TRITON.latent_attention.triton(*operands, config._replace(split=split)[:5], self.pdl)
        return _TRITON.latent_attention.triton(*operands, config[:5], self.pdl)  # type: ignore[no-any-return]

    def route(
        self,
        logits: Tensor,
        count: int,
        *,
        renormalize: bool,
        held: tuple[int, int] | None = None,
        routing: CorrectedRouting | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of the ``count`` experts of each token, with one program per token. There are at most
        1024 experts.
        """
        if not has_kernel(logits) or logits.shape[1] > _MAX_EXPERTS or logits.stride(1) != 1:
            return super().route(logits, count, renormalize=renormalize, held=held, routing=routing)
        span = held or (0, logits.shape[1])
        weights, chosen = _TRITON.route.triton(logits, count, renormalize, *span, self.pdl, *(routing or ()))
        return weights, chosen

    def experts(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        biases: ExpertBiases | None = None,
        activation: ExpertActivation = "silu",
        summed: bool = True,
    ) -> Tensor:
        """Compute the chosen experts in three kernels. Above 32 tokens, a fourth kernel first sorts the pairs of token and
        expert. The reference computes float32 and float64. Without ``summed``, a token's results [T, C, H] aren't added where
        a kernel of its own would do that.
        """
        is_half = x.dtype in (torch.bfloat16, torch.float16) and gate_up.dtype is x.dtype
        if not is_half or not x.numel() or not has_kernel(x, weights) or not gate_up.is_contiguous():
            return super().experts(x, weights, chosen, gate_up, down, biases=biases, activation=activation)
        samples = self.mixtures.samples(x, weights, chosen, gate_up.shape[0])
        key = "experts", x.dtype, gate_up.shape, chosen.shape[1], biases is not None, activation
        launched = partial(self.mixtures.launch_experts, biases=biases, activation=activation, summed=summed)
        for sample in self.tiles.scope.each(key, samples):
            launched(*sample, gate_up, down)
        return launched(x, weights, chosen, gate_up, down)

    def experts_quantized(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        *,
        biases: ExpertBiases | None = None,
        activation: ExpertActivation = "silu",
        summed: bool = True,
    ) -> Tensor:
        """Compute experts with quantised weights: :meth:`experts` plus a kernel that quantises activations.

        The reference computes weights that ``linear_quantized`` would have to dequantise first.
        """
        plans = [plan(self.facts, each, planes=False) for each in (gate_up, down)]
        is_half = x.dtype in (torch.bfloat16, torch.float16) and x.numel()
        if None in plans or not is_half or not has_kernel(x, weights, gate_up.scales):
            return super().experts_quantized(x, weights, chosen, gate_up, down, biases=biases, activation=activation)
        first, second = (each for each in plans if each is not None)
        key = "experts_quantized", x.dtype, gate_up.label, gate_up.shape, chosen.shape[1], biases is not None, activation
        launched = partial(self.mixtures.launch_quantized_experts, biases=biases, activation=activation, summed=summed)
        for sample in self.tiles.scope.each(key, self.mixtures.samples(x, weights, chosen, down.shape[0] // x.shape[1])):
            launched(*sample, gate_up, down, first, second)
        return launched(x, weights, chosen, gate_up, down, first, second)

    def _expert_results(self, x: Tensor, shares: Tensor, chosen: Tensor, block: ExpertsBlock) -> Tensor:
        """Return each token's results [T, C, H] of ``block``'s experts for ``x``, or their sums [T, H]."""
        if isinstance(block.gate_up, QuantizedWeight) and isinstance(block.down, QuantizedWeight):
            stacked = block.gate_up, block.down
            return self.experts_quantized(x, shares, chosen, *stacked, **block.expert_options, summed=False)
        stacks = plain(block.gate_up), plain(block.down)
        return self.experts(x, shares, chosen, *stacks, **block.expert_options, summed=False)

    def short_convolution(
        self, x: Tensor, weight: Tensor, state: Tensor, batch: RecurrentBatch, window: Tensor | None = None
    ) -> Tensor:
        """Compute the short convolution, with one program per block of tokens, block of channels and sequence."""
        if not has_kernel(x, weight, state) or x.stride(1) != 1 or not (weight.is_contiguous() and state.is_contiguous()):
            return super().short_convolution(x, weight, state, batch, window)
        operands = x, weight, state, *batch.operands, batch.pending, window
        return _TRITON.short_convolution.triton(*operands, batch.settled and self.pdl, batch.uniform, self.pdl)  # type: ignore[no-any-return]

    def gated_delta_rule(
        self,
        mixed: Tensor,
        gates: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        batch: RecurrentBatch,
        updates: Tensor | None = None,
    ) -> Tensor:
        """Compute the rule token by token, one program per head and block of values."""
        if not _has_rule(mixed, gates, state):
            return super().gated_delta_rule(mixed, gates, a_log, dt_bias, state, batch, updates)
        operands = mixed, gates, a_log, dt_bias, state, *batch.operands, batch.pending, updates
        return _TRITON.gated_delta_rule.triton(*operands, batch.settled and self.pdl, batch.uniform, self.pdl)  # type: ignore[no-any-return]

    def chunk_gated_delta_rule(
        self, mixed: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, batch: RecurrentBatch
    ) -> Tensor:
        """Compute the rule for 64 tokens at once. Of three kernels, only the second goes through each sequence."""
        if not _has_rule(mixed, gates, state):
            return super().chunk_gated_delta_rule(mixed, gates, a_log, dt_bias, state, batch)
        operands = mixed, gates, a_log, dt_bias, state, *batch.operands
        return _TRITON.chunk_gated_delta_rule.triton(*operands, self.pdl)  # type: ignore[no-any-return]

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the gated RMS norm, with several heads per program."""
        if not has_kernel(x, gate, weight):
            return super().gated_rms_norm(x, gate, weight, eps)
        return _TRITON.gated_rms_norm.triton(x, gate, weight, eps, self.pdl)  # type: ignore[no-any-return]

    # A class that overrides primitives states its blocks, too.
    attention_block, mlp_block = FusedBlocks.attention_block, FusedBlocks.mlp_block
    experts_block, recurrent_block = FusedBlocks.experts_block, FusedBlocks.recurrent_block

    # -- selection of tokens ---------------------------------------------------------------------------------------

    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor) -> Tensor:
        """Mask logits by the grammar's bitmask, one program per row and block of tokens."""
        if not has_kernel(logits):
            return super().apply_token_bitmask(logits, bitmask)
        return _TRITON.apply_token_bitmask.triton(logits, bitmask, self.pdl)  # type: ignore[no-any-return]

    def sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, draft: bool = False) -> Tensor:
        """Sample one token per row of ``logits`` [B, V] → int64 [B]; several programs share the vocabulary."""
        if not has_kernel(logits):
            return super().sample(logits, temperature, seeds, positions, draft=draft)
        lane = LANE_DRAFT if draft else LANE_SAMPLE
        for count in self.tiles.vocabulary_shares(logits.shape):
            tokens = _TRITON.sample.triton(logits, temperature, seeds, positions, lane, count, self.pdl)
        return tokens  # type: ignore[no-any-return]

    def verify_chain(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor | None,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Verify a chain of drafts: two launches if no row samples, else three."""
        operands = target_logits, draft_tokens, draft_probs, temperature, seeds, positions
        if not has_kernel(target_logits) or not draft_tokens.numel():
            return super().verify_chain(*operands)
        for count in self.tiles.vocabulary_shares(target_logits.shape):
            verdict = _TRITON.verify_chain.triton(*operands, [LANE_ACCEPT, LANE_RESIDUAL], count, self.pdl)
        return verdict  # type: ignore[no-any-return]

    def verify_checked(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        found: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Verify drafts greedily and report NaN: two launches, of which one reads the logits."""
        if not has_kernel(target_logits):
            return super().verify_checked(target_logits, draft_tokens, temperature, seeds, positions, found)
        if self.tiles.scope.depth and draft_tokens.numel():
            with compile_only():  # a grammar or a penalty between logits and verification needs this kernel
                self.verify_chain(target_logits, draft_tokens, None, temperature, seeds, positions)
        for count in self.tiles.vocabulary_shares(target_logits.shape):
            verdict = _TRITON.verify_checked.triton(target_logits, draft_tokens, found, count, self.pdl)
        return verdict  # type: ignore[no-any-return]

    def verify_tree(
        self,
        target_logits: Tensor,
        tokens: Tensor,
        parents: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        depth: int,
        sampling: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose a token at every node of the tree, then follow the accepted path from the root; several programs share the
        vocabulary.
        """
        operands = target_logits, tokens, parents, temperature, seeds, positions
        if not has_kernel(target_logits):
            return super().verify_tree(*operands, depth=depth, sampling=sampling)
        for count in self.tiles.vocabulary_shares(target_logits.shape):
            verdict = _TRITON.verify_tree.triton(*operands, depth, sampling, LANE_SAMPLE, count, self.pdl)
        return verdict  # type: ignore[no-any-return]

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def gather_requests(
        self,
        rows: Tensor,
        lens: Tensor,
        state: RequestRows,
        own: RequestInputs,
        found: Tensor,
        *,
        lens_by_row: bool,
    ) -> None:
        """Copy each request's state rows to the iteration's own tensors, one program per request."""
        _TRITON.gather_requests.triton(rows, lens, lens_by_row, *state, *own, found, self.pdl)

    def gather_checked(
        self, source: Tensor, rows: Tensor | None, out: Tensor, found: Tensor, *, bounds: tuple[int, int] | None
    ) -> None:
        """Copy rows to ``out`` and report their first invalid values, with one program per row.

        Distributions over a vocabulary are long: one pass finds NaN, another copies.
        """
        if not has_kernel(source) or not source.is_contiguous():
            super().gather_checked(source, rows, out, found, bounds=bounds)
        elif bounds is None and source[0].numel() > _MAX_ELEMENTS_PER_PROGRAM:
            value = source if rows is None else source.index_select(0, rows)
            self.find_nan(value.flatten(1), found)
            out.copy_(value)
        else:
            low, high = bounds or (0, 0)
            _TRITON.gather_checked.triton(source, rows, low, high, out, found, self.pdl)

    def place_tokens(
        self, lens: Tensor, tables: Tensor, page_size: int, last: int, positions: Tensor, slots: Tensor, seq_lens: Tensor
    ) -> None:
        """Compute positions, slots and lengths of the new tokens, one program per request."""
        _TRITON.place_tokens.triton(lens, tables, page_size, last, positions, slots, seq_lens, self.pdl)

    def publish_accepted(
        self,
        rows: Tensor,
        lens: Tensor,
        decided: tuple[Tensor, Tensor],
        lengths: Tensor,
        last_tokens: Tensor,
        results: Tensor,
        own: tuple[Tensor, Tensor],
        pending: Tensor | None = None,
    ) -> None:
        """Publish accepted tokens and lengths to state rows and results, one program per request."""
        _TRITON.publish_accepted.triton(rows, lens, *decided, lengths, last_tokens, results, *own, pending, self.pdl)

    def place_accepted(
        self, lens: Tensor, tokens: Tensor, accepted: Tensor, following: Tensor, last: Tensor, positions: Tensor
    ) -> None:
        """Compute the draft pass's tokens and positions from the accepted ones, one program per request."""
        _TRITON.place_accepted.triton(lens, tokens, accepted, following, last, positions, self.pdl)

    def find_nan(self, x: Tensor, found: Tensor) -> None:
        """Report the first NaN of each row to ``found``; several programs share a row."""
        if not has_kernel(x) or not x.is_contiguous():
            super().find_nan(x, found)
            return
        for count in self.tiles.vocabulary_shares(x.shape):
            _TRITON.find_nan.triton(x, found, count, self.pdl)


def _has_rule(mixed: Tensor, gates: Tensor, state: Tensor) -> bool:
    is_laid_out = state.is_contiguous() and mixed.stride(1) == gates.stride(1) == 1
    return has_kernel(mixed, gates, state) and is_laid_out and max(state.shape[2:]) <= _MAX_HEAD_SIZE


def _driver_version() -> tuple[int, int]:
    """Return the version of CUDA that NVIDIA's driver supports, such as (13, 0); (0, 0) without the driver."""
    version = ctypes.c_int()
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10
