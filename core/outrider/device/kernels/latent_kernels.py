"""The part of a KernelSet for latent attention: products of heads, the cache write, and attention to latent vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device.kernels.metadata import AttentionMetadata, RotaryArgs, composes
from outrider.device.kernels.model_kernels import ModelKernels


class LatentKernels(ModelKernels):
    """Kernels of multi-head latent attention (DeepSeek-V2, section 2.1). Rules: :class:`~outrider.device.KernelSet`.

    The cache holds two vectors of each token, which all heads share: the rotated dimensions of its key [Dr], and the latent
    vector [R] from which every head's other dimensions of the key, and its value, could be expanded. The expansion of keys is
    absorbed into queries, and that of values follows attention, both by :meth:`head_linear`.
    """

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product of each head of ``x`` [T, Hq, K] with the head's own ``weight`` [Hq, N, K] → [T, Hq, N].

        The last dimension of ``x`` is contiguous; ``weight`` may be transposed.
        """
        return torch.ops.outrider.head_linear(x, weight)  # type: ignore[no-any-return]  # torch.ops has no types

    @composes("rms_norm")
    def latent_norm_rope_write_cache(
        self, latent: Tensor, norm: Tensor, eps: float, q: Tensor, k: Tensor, rotary: RotaryArgs
    ) -> None:
        """Rotate ``q`` [T, Hq, Dr] and the shared key ``k`` [T, Dr] in place, and write the cache: k, and the norm of
        ``latent`` [T, R] with the weight ``norm`` [R].

        The caches of ``rotary`` are [pages, page size, 1, Dr] for k and [pages, page size, 1, R] for latent vectors.
        """
        normed = self.rms_norm(latent, norm, eps)
        torch.ops.outrider.rope_write_cache(q, k.unsqueeze(1), normed.unsqueeze(1), *rotary)

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
        """Return the attention of all heads to the latent vectors of each sequence's tokens → [T, Hq, R].

        A score is the dot product of ``q`` [T, Hq, R] and the latent vector, plus that of ``q_rotated`` [T, Hq, Dr] and the
        rotated key, times ``scale``. Caches are those of :meth:`latent_norm_rope_write_cache`; the rules of
        :meth:`paged_attention` hold for them. Attention is never planned.
        """
        return torch.ops.outrider.latent_attention(  # type: ignore[no-any-return]  # torch.ops has no types
            q,
            q_rotated,
            k_cache,
            v_cache,
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_table,
            metadata.tree_mask,
            metadata.max_query,
            metadata.max_kv,
            scale,
        )
