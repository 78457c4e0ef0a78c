"""Kernels whose attention takes lengths as host integers, or is planned on the host like that of some libraries.

``sim:kernels=host-plans`` computes the references' results from the plan alone: the host fixes each sequence's pages and
token count when it plans. Attention without a plan, or with another batch's plan, raises an error instead of producing wrong
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.device import (
    CACHE_FORMATS,
    AttentionMetadata,
    AttentionShape,
    Backend,
    InterfaceError,
    KernelSet,
    Stream,
    WrappedKernels,
)
from outrider.device.kernels.operators import define_operator

# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider_sim", "DEF")


def _write_integers(out: Tensor, values: Sequence[int]) -> None:
    out.copy_(torch.tensor(values, dtype=out.dtype))


define_operator(_LIBRARY, "write_integers", _write_integers, writes=("out",))


class HostLengthKernels(KernelSet):
    """The torch reference kernels, with attention that uses the metadata's host lengths, if given, instead of device lengths.

    The host lengths are operands of the enqueued operations: a replay uses the lengths of its capture until a rebind.
    """

    cache_formats = frozenset(CACHE_FORMATS)
    optional_operands = KernelSet.optional_operands

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._reference = KernelSet()

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
        """Compute paged attention with the lengths in host memory if the metadata has them, else with those on the device."""
        exact = metadata.seq_lens_host
        options: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks}
        if exact is None:
            return super().paged_attention(q, k_cache, v_cache, metadata, **options)
        lens = torch.empty_like(metadata.seq_lens)

        def issue(values: tuple[int, ...]) -> None:
            torch.ops.outrider_sim.write_integers(lens, values)

        self._backend.reissue(exact, issue)
        exact_metadata = replace(metadata, seq_lens=lens, seq_lens_host=None)
        return self._reference.paged_attention(q, k_cache, v_cache, exact_metadata, **options)


def _check_plan(planned: Tensor, seq_lens: Tensor) -> None:
    if not torch.equal(planned, seq_lens):
        raise RuntimeError(
            f"attention runs with the plan of another batch: it was planned for lengths {planned.tolist()}, the batch has "
            f"{seq_lens.tolist()}"
        )


define_operator(_LIBRARY, "check_plan", _check_plan)


class HostPlan:
    """A plan of ``batch`` sequences of up to ``pages`` pages: lengths int32 [B] and the block table [B, P] on the device.

    The host writes lengths to pinned memory. It waits for the previous copy before it overwrites that memory.
    """

    def __init__(self, backend: Backend, batch: int, pages: int) -> None:
        self.lens = torch.zeros(batch, dtype=torch.int32, device=backend.device)
        self.table = torch.zeros((batch, pages), dtype=torch.int32, device=backend.device)
        self.shapes: frozenset[AttentionShape] = frozenset()
        self._backend = backend
        self._pinned = backend.empty_pinned("attention plan", (batch,), torch.int32)
        self._uploaded = backend.create_event("attention plan uploaded")

    def wait(self) -> None:
        """Block the host until the device has copied the lengths that the host wrote last."""
        if self._uploaded.generation:
            self._uploaded.synchronize()

    def retire(self) -> None:
        """Keep the pinned memory until the device has copied the lengths that the host wrote last."""
        if self._uploaded.generation:
            self._backend.keep_alive([self._pinned], until=self._uploaded)

    def fill(self, metadata: AttentionMetadata, lens: tuple[int, ...], stream: Stream) -> None:
        """Write the batch's lengths and block table into the plan, by copies on ``stream``."""
        self.shapes = frozenset(metadata.shapes)
        self.wait()
        self._pinned.renew()
        self._pinned.tensor.copy_(torch.tensor(lens, dtype=torch.int32))
        self._backend.copy_async(self.lens, self._pinned.tensor, stream=stream)
        stream.record(self._uploaded)
        starts = torch.arange(self.table.shape[1], device=self.table.device) * metadata.shapes[0].page_size
        self.table.copy_(torch.where(starts < self.lens.unsqueeze(1), metadata.block_table, 0))


class HostPlanKernels(WrappedKernels):
    """A kernel set that wraps another one and plans its attention on the host."""

    name = "host-plans"
    plans_on_host = True
    optional_operands = KernelSet.optional_operands

    def __init__(self, inner: KernelSet, backend: Backend) -> None:
        super().__init__(inner)
        self.cache_formats = inner.cache_formats
        self.backend = backend

    def plan_attention(self, metadata: AttentionMetadata, *, stream: Stream) -> AttentionMetadata:
        """Fill the plan of the batch with host lengths and with pages from the device's block table.

        Raises `InterfaceError` if lengths or offsets are missing on the host, or if the kept plan has another batch size.
        """
        if not metadata.shapes:
            return metadata
        batch, pages = metadata.block_table.shape
        if metadata.seq_lens_host is None or len(metadata.seq_lens_host.value) != batch:
            raise InterfaceError(
                f"a plan for {batch} sequences needs their lengths on the host, got {metadata.seq_lens_host}"
            )
        if not metadata.uniform and (metadata.host_query_start is None or len(metadata.host_query_start) != batch + 1):
            raise InterfaceError(f"a plan for a ragged batch needs its offsets on the host, got {metadata.host_query_start}")
        plan = metadata.plan
        if not isinstance(plan, HostPlan) or plan.table.shape != metadata.block_table.shape:
            if plan is not None and metadata.uniform:
                raise InterfaceError("a plan was kept for a batch of another size: a graph would go on with the old one")
            if isinstance(plan, HostPlan):
                plan.retire()
            plan = HostPlan(self.backend, batch, pages)
        plan.fill(metadata, metadata.seq_lens_host.value, stream)
        return replace(metadata, plan=plan)

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
        """Compute attention with the wrapped kernels, from the planned lengths and block table.

        Raises `InterfaceError` for a batch without a plan.
        """
        plan = metadata.plan
        options: dict[str, Any] = {"scale": scale, "window": window} | ({} if sinks is None else {"sinks": sinks})
        shape = AttentionShape.from_operands(q, k_cache, scale=scale, window=window)
        if isinstance(plan, HostPlan) and shape in plan.shapes:
            torch.ops.outrider_sim.check_plan(plan.lens, metadata.seq_lens)
            planned = replace(metadata, seq_lens=plan.lens, block_table=plan.table)
            return self.inner.paged_attention(q, k_cache, v_cache, planned, **options)
        if shape in metadata.shapes:
            raise InterfaceError(f"attention of {shape} was to be planned, and there is no plan for it")
        return super().paged_attention(q, k_cache, v_cache, metadata, **options)
