"""Kernel set that computes planned attention with FlashInfer and delegates other operators to the wrapped kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from flashinfer.jit import gen_batch_prefill_module
from torch import Tensor

from outrider.device import (
    AttentionBlock,
    AttentionMetadata,
    AttentionShape,
    AttentionTokens,
    Backend,
    BackendLoadError,
    CapabilityError,
    KernelSet,
    ResidualStream,
    Stream,
    WrappedKernels,
)
from outrider.device.kernels.blocks import Attend
from outrider_flashinfer.plan import OPERATOR, AttentionPlan

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128, 256)
_POSITIONS = 0
"""FlashInfer's code for attention that applies no position encoding: queries and keys are already rotated."""

_log = logging.getLogger("outrider_flashinfer")


def supports_attention(shape: AttentionShape) -> bool:
    """Return whether FlashInfer supports the attention's dtype, head size and head counts."""
    return shape.dtype in DTYPES and shape.head_size in HEAD_SIZES and shape.heads % shape.kv_heads == 0


class Attention:
    """The scratch memory and the compiled FlashInfer modules that all attention plans of one backend share."""

    def __init__(self, backend: Backend, processors: int) -> None:
        self.backend = backend
        self.processors = processors
        self._scratch: WeakKeyDictionary[Stream, Tensor] = WeakKeyDictionary()
        self._built: set[tuple[torch.dtype, int, bool]] = set()

    def compiled(self) -> int:
        """Number of FlashInfer modules that this process has compiled or loaded."""
        return len(self._built)

    def scratch(self, stream: Stream, nbytes: int) -> Tensor:
        """Return at least ``nbytes`` of device memory for partial results. All plans of ``stream`` share it, because they run
        in order.
        """
        kept = self._scratch.get(stream)
        if kept is None or kept.numel() < nbytes:
            # Plans that have the smaller one keep it.
            kept = self._scratch[stream] = torch.empty(nbytes, dtype=torch.uint8, device=self.backend.device)
        return kept

    def build(self, shape: AttentionShape) -> None:
        """Compile or load FlashInfer's module for the attention ``shape``. A compilation is logged.

        Raises :class:`BackendLoadError` if it fails.
        """
        key = (shape.dtype, shape.head_size, shape.window > 0)
        if key in self._built:
            return
        kind = f"head size {shape.head_size}, {str(shape.dtype)[6:]}{', a window' if shape.window else ''}"
        dtype, size = shape.dtype, shape.head_size
        try:
            spec = gen_batch_prefill_module(
                "fa2", dtype, dtype, dtype, torch.int32, size, size, _POSITIONS, shape.window > 0, False, False
            )
            if not spec.is_compiled:
                _log.warning("FlashInfer compiles its attention for %s with nvcc, once on this machine: about a minute", kind)
            spec.build_and_load()
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or ["no message"]
            raise BackendLoadError(
                f"FlashInfer couldn't compile its attention for {kind}: {type(error).__name__}: {lines[-1]}; it needs ninja, "
                "and nvcc of the CUDA that torch is built for, on the PATH; or choose kernels=triton"
            ) from error
        self._built.add(key)

    def plan(self, metadata: AttentionMetadata, shapes: tuple[AttentionShape, ...], stream: Stream) -> AttentionPlan:
        """Return an attention plan for this batch: the plan in ``metadata``, renewed, if it fits the batch,
        else a new plan.
        """
        plan = metadata.plan
        if not (isinstance(plan, AttentionPlan) and plan.fits(metadata, shapes)):
            for shape in shapes:
                self.build(shape)
            if isinstance(plan, AttentionPlan):
                plan.wait()  # its pinned memory is given back
            plan = AttentionPlan(self, metadata, shapes, stream)
        plan.renew(metadata, stream)
        return plan


class FlashInferKernels(WrappedKernels):
    """A kernel set that adds FlashInfer's attention to another one. ``processors``: multiprocessors of the device.

    FlashInfer computes planned attention in bfloat16 or float16 with a head size of 64, 128 or 256: verify, draft-extend
    and prefill. The wrapped kernels compute other shapes and a draft's own passes, which have no plan.

    *Workspace.* Each plan holds 1 MiB of tables on the device and 1 MiB of pinned memory. Plans of one stream share
    scratch for partial results: 70 MiB for 32 heads of size 128 on 132 multiprocessors. *Read on the host*: exact lengths
    and query offsets, no device memory. A plan's copies run on the stream on which it is planned.
    """

    plans_on_host = True
    optional_operands = KernelSet.optional_operands

    def __init__(self, inner: KernelSet, backend: Backend, *, processors: int) -> None:
        super().__init__(inner)
        self.name = f"{inner.name}, attention of flashinfer"
        self.attention = Attention(backend, processors)

    def batch_invariant(self) -> KernelSet:
        """Raise :class:`CapabilityError`: a plan divides the work of the whole batch, and so the sums of each row."""
        raise CapabilityError(
            f"the kernels {self.name!r} can't be batch-invariant: FlashInfer plans the order of a row's sums for the whole "
            "batch; choose the backend's own kernels for batch_invariant (--exact)"
        )

    def plan_attention(self, metadata: AttentionMetadata, *, stream: Stream) -> AttentionMetadata:
        """Return the metadata with FlashInfer's plan for the shapes that FlashInfer supports."""
        shapes = tuple(shape for shape in metadata.shapes if supports_attention(shape))
        if not shapes or (metadata.tree_mask is not None and not metadata.uniform):
            return super().plan_attention(metadata, stream=stream)
        return replace(metadata, plan=self.attention.plan(metadata, shapes, stream))

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
        """Compute attention with FlashInfer if ``metadata`` has a plan for this shape, else with the wrapped kernels. These
        compute attention with sinks.
        """
        plan = metadata.plan
        if sinks is not None:
            return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window, sinks=sinks)
        if isinstance(plan, AttentionPlan):
            shape = AttentionShape.from_operands(q, k_cache, scale=scale, window=window)
            if shape in plan.wrappers and q.shape[0] == plan.tokens and k_cache.dtype is q.dtype:
                addressing = metadata.query_start, metadata.seq_lens, metadata.block_table, metadata.tree_mask
                limits = metadata.max_query, metadata.max_kv, scale, window
                memory = plan.indices, plan.mask, plan.scratch, plan.tables[shape]
                return OPERATOR(q, k_cache, v_cache, *addressing, *limits, *memory)  # type: ignore[no-any-return]
        return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window)

    def attention_block(
        self, x: ResidualStream, block: AttentionBlock, tokens: AttentionTokens, *, attend: Attend | None = None
    ) -> ResidualStream:
        """Run the attention block of the wrapped kernels, with FlashInfer's attention inside."""
        return self.inner.attention_block(x, block, tokens, attend=attend or self.paged_attention)

    def every_variant(self) -> AbstractContextManager[None] | None:
        """Return the wrapped kernels' warm-up scope. FlashInfer compiles its module when a shape is first planned."""
        return super().every_variant() or nullcontext()

    def compiled(self) -> Mapping[str, int]:
        """Return the number of compiled kernels by name: FlashInfer's modules and the entries of the wrapped kernels."""
        return {**super().compiled(), "flashinfer": self.attention.compiled()}
