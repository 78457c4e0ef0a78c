"""KernelSet: the computations that a backend may do faster than torch does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device.kernels import ops as _ops  # noqa: F401  (registers the operators)
from outrider.device.kernels.metadata import AttentionMetadata
from outrider.device.kernels.reference import LANE_DRAFT, LANE_SAMPLE

if TYPE_CHECKING:
    from outrider.device.stream import Stream


class KernelSet:
    """Kernels as plain methods; the defaults are the torch references. A plugin overrides what it does better.

    *Placement.* Every method enqueues on the stream whose scope the caller opened, and returns tensors of that stream.
    *Capture.* Every method may be captured; none reads a device value on the host.
    *Numerics.* A result may differ from the reference by rounding alone. Rows of a batch don't influence each other
    except through rounding.
    *Padding.* Token rows beyond a batch's real tokens hold valid indices (row and page 0) and may compute anything
    finite.
    *Errors.* A shape or dtype that a kernel can't do raises before anything is enqueued.

    Letters: T new tokens, B sequences, Hq and Hkv heads, D head size, H hidden size, V vocabulary, K draft tokens,
    N nodes of a draft tree with its root, L the longest path from the root.
    """

    name = "torch"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [T, in] @ weight[out, in].T + bias`` → [T, out]."""
        return F.linear(x, weight, bias)

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of ``weight`` [V, H] for int64 ``tokens`` [T] → [T, H]."""
        return F.embedding(tokens, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of ``x`` [..., H] with ``weight`` [H]."""
        return torch.ops.outrider.rms_norm(x, weight, eps)  # type: ignore[no-any-return]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += x`` in place (both [T, H]), then its norm."""
        return torch.ops.outrider.add_rms_norm(x, residual, weight, eps)  # type: ignore[no-any-return]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` for ``gate_up`` [T, 2*I] → [T, I]."""
        return torch.ops.outrider.silu_mul(gate_up)  # type: ignore[no-any-return]

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
        """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by cos and sin [T, D]; write k, v into the cache.

        Caches are [pages, page size, Hkv, D]; ``slots`` int64 [T] is page * page size + offset. Padding tokens write to
        the reserved page 0; other slots are distinct.
        """
        torch.ops.outrider.rope_write_cache(q, k, v, cos, sin, k_cache, v_cache, slots)

    def plan_attention(self, metadata: AttentionMetadata, *, stream: Stream) -> AttentionMetadata:
        """Let a library that plans on the host prepare for this batch; returns the metadata with its plan.

        Called on the plan stream's scope, before the tensors of ``metadata`` are used on another stream. The reference
        plans nothing. A kernel that plans documents its workspace and which tensors it reads on the host.
        """
        del stream
        return metadata

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
        """Attention of q [T, Hq, D] over the pages of each sequence → [T, Hq, D].

        The new tokens' keys and values are in the cache already. ``window`` > 0: a token sees that many positions, its
        own included.
        """
        return torch.ops.outrider.paged_attention(  # type: ignore[no-any-return]
            q,
            k_cache,
            v_cache,
            metadata.query_start,
            metadata.kv_lens,
            metadata.block_table,
            metadata.tree_mask,
            metadata.max_query,
            metadata.max_kv,
            scale,
            window,
        )

    def sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, draft: bool = False) -> Tensor:
        """One int64 token a row of ``logits`` [B, V].

        ``temperature`` float32 [B]: 0 takes the argmax (the lowest index among equals), else a draw from
        softmax(logits / temperature) that depends on ``seeds`` int64 [B] and ``positions`` int64 [B] alone (Philox).
        ``draft`` takes the draws of the draft, which are independent of the target's.
        """
        lane = LANE_DRAFT if draft else LANE_SAMPLE
        return torch.ops.outrider.sample(logits, temperature, seeds, positions, lane)  # type: ignore[no-any-return]

    def verify_chain(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor | None,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Accept a prefix of each draft chain and decide the token after it.

        ``target_logits`` [B, K+1, V], ``draft_tokens`` int64 [B, K], ``draft_probs`` float32 [B, K, V] (the distribution
        that each draft token was drawn from; None when no row samples), ``positions`` int64 [B]: position of the first
        draft token. Rows at temperature 0 accept what equals the argmax; the others by lossless rejection sampling.

        Returns tokens int64 [B, K+1] (accepted drafts, then the decided token, then -1) and accepted int64 [B] (0..K).
        """
        return torch.ops.outrider.verify_chain(  # type: ignore[no-any-return]
            target_logits, draft_tokens, draft_probs, temperature, seeds, positions
        )

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
        """Accept a path of each draft tree and decide the token after it.

        ``target_logits`` [B, N, V], one row a node. ``tokens`` int64 [B, N], the root (the last token) first. ``parents``
        int64 [B, N]: index of each node's parent, smaller than its own; -1 for the root and for nodes that aren't used.
        ``positions`` int64 [B]: position of the root's children. ``depth``: L; what lies deeper is never accepted.
        ``sampling``: some row has a temperature above 0; when False, temperatures aren't looked at.

        From the root on, the target's token after the node is chosen just as :meth:`sample` chooses it with the same
        seed and position, and the walk goes on at the first child that holds this token; it ends where there is none. So
        every token is the target's own draw, whatever was drafted and however: lossless for any tree, and the very tokens
        that plain decoding samples with this seed (where rounding doesn't decide). Against children that were
        chosen deterministically (the k likeliest) no lossless rule accepts more often, since acceptance has just the
        probability that the target gives to the children together (for point masses, the recursive rejection of Miao et
        al. 2023, SpecInfer, comes to the same).

        Returns tokens int64 [B, L+1] (accepted drafts, then the decided token, then -1), path int64 [B, L+1] (the node
        that each of these follows, so the root first; 0 behind the last accepted node) and accepted int64 [B] (0..L).
        """
        return torch.ops.outrider.verify_tree(  # type: ignore[no-any-return]
            target_logits, tokens, parents, temperature, seeds, positions, depth, sampling
        )

    def move_cache(self, k_cache: Tensor, v_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Copy keys and values [pages, page size, Hkv, D] from slots ``sources`` to ``destinations``, both int64 [M].

        As if every source were read before any destination is written: the two may overlap. Destinations are distinct,
        except in the reserved page 0, where padding goes. A source equal to its destination leaves it as it is.
        """
        torch.ops.outrider.move_cache(k_cache, v_cache, sources, destinations)
