"""Kernels of a personality whose attention takes lengths as host integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import CACHE_FORMATS, AttentionMetadata, Backend, KernelSet
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
    ) -> Tensor:
        """Compute paged attention with the lengths in host memory if the metadata has them, else with those on the device."""
        exact = metadata.seq_lens_host
        if exact is None:
            return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window)
        lens = torch.empty_like(metadata.seq_lens)

        def issue(values: tuple[int, ...]) -> None:
            torch.ops.outrider_sim.write_integers(lens, values)

        self._backend.reissue(exact, issue)
        return self._reference.paged_attention(
            q, k_cache, v_cache, replace(metadata, seq_lens=lens, seq_lens_host=None), scale=scale, window=window
        )
