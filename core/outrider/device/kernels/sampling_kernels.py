"""The part of a KernelSet that decides tokens: logits before a draw, draws, and which drafted tokens are accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device.kernels import ops as _ops  # noqa: F401  (registers the operators)
from outrider.device.kernels.bookkeeping_kernels import BookkeepingKernels
from outrider.device.kernels.reference import LANE_DRAFT, LANE_SAMPLE


class SamplingKernels(BookkeepingKernels):
    """Sampling and verification. Rules and letters: :class:`~outrider.device.KernelSet`."""

    # -- draws and verification ------------------------------------------------------------------------------------

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

    def verify_checked(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        found: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What :meth:`find_nan` says of each request's logits, and what :meth:`verify_chain` or, with K = 0, :meth:`sample`
        decides by them: both read them all, so kernels may do it at once. No row samples: ``temperature`` is 0 everywhere.

        ``found`` int64 [B, 2]: of the (K + 1) * V numbers of each request. The other operands, and what is returned, are
        those of :meth:`verify_chain`. Where a request has NaN, of its choices only this is certain that they are tokens.
        """
        self.find_nan(target_logits.flatten(1), found)
        if draft_tokens.shape[1]:
            return self.verify_chain(target_logits, draft_tokens, None, temperature, seeds, positions)
        tokens = self.sample(target_logits.squeeze(1), temperature, seeds, positions)
        return tokens.unsqueeze(1), torch.zeros_like(tokens)

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

    # -- logits before a draw --------------------------------------------------------------------------------------
    # ``logits`` [B, N, V]: N nodes of each request, of which node 0 is the last committed token and the others are
    # drafted; the logits at a node decide the token after it. Each method returns new logits of the same dtype and leaves
    # a row whose parameters are neutral bit for bit as it is. The order is masks, bias, penalties, truncation.

    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor) -> Tensor:
        """``-inf`` for the tokens that a grammar doesn't allow.

        ``bitmask`` int32 [B, N, W], W words of 32 bits: token 32w + i is allowed where bit i of word w is set. W is V / 32,
        rounded up. Neutral: -1 everywhere.
        """
        return torch.ops.outrider.apply_token_bitmask(logits, bitmask)  # type: ignore[no-any-return]

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
        negative, anything), then of the ``count`` likeliest tokens, in order, of equals the lower id first; and their ids,
        int64 [B, N, count].
        """
        return torch.ops.outrider.logprobs(logits, tokens, count)  # type: ignore[no-any-return]
