"""KernelSet: the computations that a backend may do faster than torch does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device.kernels import ops as _ops  # noqa: F401  (registers the operators)
from outrider.device.kernels.metadata import AttentionMetadata, Product, Turn
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
    row_invariant = False
    """Whether a token's or request's results are bit for bit the same whatever else is in the batch."""

    plans_on_host = False
    """Whether :meth:`plan_attention` reads exact lengths on the host. They're brought there before each batch is planned
    (fence *lengths on host*), and each replay of a graph is planned anew; fused mode, where no length leaves the device, is
    refused."""

    def batch_invariant(self) -> KernelSet:
        """Kernels of this device that are ``row_invariant``, slower. The default wraps these, see
        :class:`~outrider.device.kernels.invariant.InvariantKernels`; a backend that has better ones returns them.
        """
        from outrider.device.kernels.invariant import InvariantKernels

        return InvariantKernels(self)

    def every_variant(self) -> AbstractContextManager[None] | None:
        """A scope for kernels that are compiled when they're first used; None: none of these is.

        A call inside also runs each other variant that such operands could take with another number of tokens, requests or
        cached tokens, so that none is compiled later. What the call returns and writes is what it does outside. An engine
        runs requests of its own in the scope before it serves any.
        """
        return None

    def compiled(self) -> Mapping[str, int]:
        """How many variants of each kernel this process has compiled so far, or loaded from a cache of compiled ones."""
        return {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [..., in] @ weight[out, in].T + bias`` → [..., out]."""
        return F.linear(x, weight, bias)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """:meth:`silu_mul` of :meth:`linear`: ``weight`` [2*I, in] holds the gate's rows, then those of up → [..., I]."""
        return self.silu_mul(self.linear(x, weight, bias))

    def linear_add_rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        """:meth:`add_rms_norm` of :meth:`linear`: ``residual`` [T, H] grows in place by ``x @ weight.T + bias``; returns its
        norm with ``norm`` [H]. The sum may be rounded once instead of twice.
        """
        return self.add_rms_norm(self.linear(x, weight, bias), residual, norm, eps)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """``residual`` [T, H] grows in place by :meth:`linear` of ``x``; returns it. The sum may be rounded once."""
        return residual.add_(self.linear(x, weight, bias))

    def linear_rope_write_cache(self, product: Product, turn: Turn) -> Tensor:
        """Queries, keys and values as one ``product`` with weights [(Hq + 2 Hkv) D, H], then :meth:`rope_write_cache` of
        them → queries [T, Hq, D].
        """
        kv_heads, size = turn.k_cache.shape[2:]
        heads = product.weight.shape[0] // size - 2 * kv_heads
        made = self.linear(*product).view(-1, heads + 2 * kv_heads, size)
        q, k, v = made.split((heads, kv_heads, kv_heads), dim=1)  # [T, heads, D] each
        self.rope_write_cache(q, k, v, *turn)
        queries: Tensor = q
        return queries

    def norm_linear_silu_mul(
        self, added: Product, residual: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """:meth:`linear_silu_mul` with ``weight`` and ``bias`` of :meth:`linear_add_rms_norm` of ``added``. What the norm
        returns need never be there as such: its factor may come behind the product.
        """
        return self.linear_silu_mul(self.linear_add_rms_norm(*added, residual, norm, eps), weight, bias)

    def norm_linear_rope_write_cache(
        self, added: Product, residual: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, turn: Turn
    ) -> Tensor:
        """:meth:`linear_rope_write_cache` with ``weight`` and ``bias`` of :meth:`linear_add_rms_norm` of ``added``, in the
        same way.
        """
        normed = self.linear_add_rms_norm(*added, residual, norm, eps)
        return self.linear_rope_write_cache(Product(normed, weight, bias), turn)

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

        Called on the plan stream's scope (of a prompt's chunks: on that of the stream that they run on), before the tensors
        of ``metadata`` are used on another stream, and never in a capture. A plan is for the ``shapes`` of the metadata;
        without any there is nothing to plan. Kernels that declare ``plans_on_host`` get ``seq_lens_host``, and
        ``host_query_start`` of a batch that isn't uniform. The reference plans nothing.

        *In place.* ``metadata.plan`` is None, and a plan is made, with room for lengths up to the whole block table; or it's
        what this method returned for the same requests' number and ``max_query`` (for chunks of prompts: of any), and that is
        brought up to date where it lies: a graph which was captured with it then computes this batch.

        *Lifetime.* The caller keeps a plan for as long as something may use it, and has ordered ``stream`` behind the last
        attention that used it before. What was planned on one ``stream`` runs on one stream, an attention at a time: such
        plans may share scratch memory. What the device reads of the host's memory is the kernels' to keep until it has.
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

        The new tokens' keys and values are in the cache already. What lies behind a sequence's length, or in page 0, belongs
        to somebody else and may be anything, NaN included: it doesn't reach the result. ``window`` > 0: a token sees that
        many positions, its own included.
        """
        return torch.ops.outrider.paged_attention(  # type: ignore[no-any-return]
            q,
            k_cache,
            v_cache,
            metadata.query_start,
            metadata.seq_lens,
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

    # -- state rows ------------------------------------------------------------------------------------------------

    def gather_rows(self, state: Tensor, rows: Tensor) -> Tensor:
        """Rows ``rows`` int64 [B] of ``state`` [R, ...] → [B, ...]."""
        return torch.ops.outrider.gather_rows(state, rows)  # type: ignore[no-any-return]

    def scatter_rows(self, state: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write ``values`` [B, ...] to rows ``rows`` int64 [B] of ``state`` [R, ...]. Rows are distinct, except row 0, which
        is reserved: what padding has for it isn't written.
        """
        torch.ops.outrider.scatter_rows(state, rows, values)

    # -- bookkeeping -----------------------------------------------------------------------------------------------
    # What lies between the passes of an iteration: little data, so that what it costs is the number of launches. Each
    # writes into tensors that are there already. What's written doesn't overlap with what is read.

    def embed_beside(self, tokens: Tensor, weight: Tensor, hidden: Tensor) -> Tensor:
        """:meth:`embedding` of ``tokens`` [T], and ``hidden`` [T, H'] behind it → [T, H + H']."""
        return torch.cat((self.embedding(tokens, weight), hidden), dim=-1)

    def gather_requests(
        self,
        rows: Tensor,
        lens: Tensor,
        state: tuple[Tensor, Tensor, Tensor, Tensor],
        own: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        found: Tensor,
        *,
        lens_by_row: bool,
    ) -> None:
        """Private copies of what an iteration reads of its B requests, and no findings yet.

        ``rows`` int64 [B]; ``lens`` int64 [B], or [R] ``lens_by_row``; ``state``: by row last_tokens int64 [R], seeds int64
        [R], temperature float32 [R], tables int32 [R, P]. ``own``: rows, lens, then the same of each request, in this
        order. ``found`` int64 [B, F] becomes -1.
        """
        torch.ops.outrider.gather_requests(rows, lens, lens_by_row, *state, *own, found)

    def gather_checked(
        self, source: Tensor, rows: Tensor | None, out: Tensor, found: Tensor, *, bounds: tuple[int, int] | None
    ) -> None:
        """Rows ``rows`` int64 [B] of ``source`` [R, ...] (None: all, in order) into ``out`` [B, ...], looked at on the way.

        ``found`` int64 [B, 2]: what :meth:`find_nan` says of each row of numbers (``bounds`` None). Whole numbers must be at
        least the first of ``bounds`` and below the second: the index of the first one that isn't, and that number; -1 and
        -1 where there is none. Those of a row with a bad one all become the lower bound: an index that is out of range
        would take the device down before anybody could be told.
        """
        low, high = bounds or (0, 0)
        torch.ops.outrider.gather_checked(source, rows, low, high, out, found)

    def place_tokens(
        self, lens: Tensor, tables: Tensor, page_size: int, last: int, positions: Tensor, slots: Tensor, seq_lens: Tensor
    ) -> None:
        """Where n tokens behind each request's ``lens`` int64 [B] go, under block tables int32 [B, P].

        Writes, strided as they may be: ``positions`` int64 [B, n], at most ``last``; cache ``slots`` int64 [B, n], in the
        reserved page 0 beyond the table; ``seq_lens`` int32 [B, m], m at most n: how many are cached with each of the last
        m tokens, at most what the table holds.
        """
        torch.ops.outrider.place_tokens(lens, tables, page_size, last, positions, slots, seq_lens)

    def publish_accepted(
        self,
        rows: Tensor,
        lens: Tensor,
        decided: tuple[Tensor, Tensor],
        lengths: Tensor,
        last_tokens: Tensor,
        results: Tensor,
        own: tuple[Tensor, Tensor],
    ) -> None:
        """What was ``decided``, tokens int64 [B, E] and accepted int64 [B], to everybody who must know.

        By rows int64 [B], of which row 0 becomes 0: ``lengths`` int64 [R], the new ``lens`` (accepted and one more), and
        ``last_tokens`` int64 [R], the last token. ``results`` int64 [B, 1 + E]: accepted, then tokens. ``own``: copies.
        """
        torch.ops.outrider.publish_accepted(rows, lens, *decided, lengths, last_tokens, results, *own)

    def place_accepted(
        self, lens: Tensor, tokens: Tensor, accepted: Tensor, following: Tensor, last: Tensor, positions: Tensor
    ) -> None:
        """What draft-extend takes in of ``tokens`` int64 [B, E], ``accepted`` int64 [B].

        ``following`` int64 [B, E]: the tokens, 0 where there is none; ``last`` int64 [B]: where each request's last one lies
        among all of them; ``positions`` int64 [B]: of the token to draft next, two behind ``lens + accepted``.
        """
        torch.ops.outrider.place_accepted(lens, tokens, accepted, following, last, positions)

    # -- logits before a draw --------------------------------------------------------------------------------------
    # ``logits`` [B, N, V]: N nodes of each request, of which node 0 is the last committed token and the others are
    # drafted; the logits at a node decide the token after it. Each method returns new logits of the same dtype and leaves
    # a row whose parameters are neutral bit for bit as it is. The order is bias, penalties, truncation.

    def bias_logits(
        self, logits: Tensor, positions: Tensor, entries: Tensor, tokens: Tensor, values: Tensor, until: Tensor
    ) -> Tensor:
        """Add biases to some tokens' logits.

        ``positions`` int64 [B, N]: position of the token that each node decides. Of a request's list ``tokens`` int64
        [B, M], ``values`` float32 [B, M] (-inf bans a token), ``until`` int64 [B, M], the first ``entries`` int64 [B]
        count, each for positions below its ``until``. The other tokens are valid indices.
        """
        return torch.ops.outrider.bias_logits(logits, positions, entries, tokens, values, until)  # type: ignore[no-any-return]

    def penalize_logits(
        self, logits: Tensor, tokens: Tensor, tree_mask: Tensor | None, rows: Tensor, counts: Tensor, penalties: Tensor
    ) -> Tensor:
        """Repetition, presence and frequency penalties, exact at every node.

        ``counts`` int32 [R, V], row ``rows`` int64 [B] of it: 2 for each time that the committed output has the token,
        plus 1 if the prompt has it. At a node the drafted tokens on the way to it, its own included, count as output:
        ``tokens`` int64 [B, N], and ``tree_mask`` bool [B*N, N] says which nodes lie on the way (None: a chain).

        ``penalties`` float32 [B, 3]: repetition divides a positive logit and multiplies another, for tokens of prompt
        or output (Keskar et al. 2019, CTRL); presence is subtracted once and frequency once for each occurrence, for
        tokens of the output alone. Neutral: 1, 0, 0.
        """
        return torch.ops.outrider.penalize_logits(  # type: ignore[no-any-return]
            logits, tokens, tree_mask, rows, counts, penalties
        )

    def count_tokens(self, counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Count output ``tokens`` int64 [B, N] (-1: none) in rows ``rows`` int64 [B] of ``counts`` int32 [R, V], in place.

        Row 0 is reserved: adding zero to it is harmless.
        """
        torch.ops.outrider.count_tokens(counts, rows, tokens)

    def truncate_logits(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """``-inf`` for tokens that top-k, then top-p, then min-p drop from softmax(logits / temperature).

        ``temperature``, ``top_p``, ``min_p`` float32 [B], ``top_k`` int64 [B]; neutral: 0, 1, 0. Each sees what the one
        before left, renormalised. Equals of the k-th largest stay. The nucleus (Holtzman et al. 2020) is the fewest
        likeliest tokens whose mass reaches ``top_p``, the lowest index first among equals; min-p (Nguyen et al. 2024)
        keeps what has at least that share of the likeliest token's probability. The likeliest token always stays, and a
        row at temperature 0 keeps everything.
        """
        return torch.ops.outrider.truncate_logits(logits, temperature, top_k, top_p, min_p)  # type: ignore[no-any-return]

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Log-softmax of ``logits`` [B, N, V]: float32 [B, N, 1+count], that of ``tokens`` int64 [B, N] (where it is
        negative, anything), then of the ``count`` likeliest tokens, in order; and their ids, int64 [B, N, count].
        """
        return torch.ops.outrider.logprobs(logits, tokens, count)  # type: ignore[no-any-return]

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

    # -- probes ----------------------------------------------------------------------------------------------------

    def find_nan(self, x: Tensor, found: Tensor) -> None:
        """Look at each row of ``x`` [B, n], n at least 1. ``found`` int64 [B, 2] becomes the index of the first NaN, or -1,
        and then -1.
        """
        torch.ops.outrider.find_nan(x, found)
