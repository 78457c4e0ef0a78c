"""The part of a KernelSet that decides tokens: logits processing, sampling, and acceptance of drafted tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device.kernels.bookkeeping_kernels import BookkeepingKernels
from outrider.device.kernels.metadata import composes
from outrider.device.kernels.reference import ops as _ops  # noqa: F401  (registers the operators)
from outrider.device.kernels.reference.model import LANE_DRAFT, LANE_SAMPLE


class SamplingKernels(BookkeepingKernels):
    """Sampling and verification. Rules and letters: :class:`~outrider.device.KernelSet`."""

    # -- sampling and verification ------------------------------------------------------------------------------------

    def sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, draft: bool = False) -> Tensor:
        """Sample one int64 token per row of ``logits`` [B, V].

        ``temperature`` float32 [B]: 0 selects the argmax (the lowest index among equals). Otherwise the token is a sample of
        softmax(logits / temperature) that depends only on ``seeds`` int64 [B] and ``positions`` int64 [B] (Philox).
        ``draft`` uses the random numbers of the draft, which are independent of the target's.
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

    @composes("find_nan", "verify_chain", "sample")
    def verify_checked(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        found: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Check each request's logits with :meth:`find_nan`, and decide with :meth:`verify_chain` or, with K = 0,
        :meth:`sample`.

        Both steps read all logits, so a kernel may fuse them. ``temperature`` is 0 in every row. ``found`` int64 [B, 2]
        receives the finding about the (K + 1) * V logits of each request. The other operands and the results are those of
        :meth:`verify_chain`. For a request with NaN, the results are arbitrary but valid tokens.
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
        ``positions`` int64 [B]: position of the root's children. ``depth``: L; deeper nodes are never accepted.
        ``sampling``: some row has a temperature above 0; if False, temperatures aren't read.

        The walk starts at the root. At each node, the target's next token is the token that :meth:`sample` returns for the
        same seed and position. The walk continues at the first child with this token, and ends if there is no such child.
        Every token is therefore the target's own sample, independent of the draft: the rule is lossless for any tree.
        Non-speculative decoding samples the same tokens with this seed, up to rounding. For children that were chosen
        deterministically (the k likeliest), no lossless rule accepts more often: the acceptance probability is the target's
        total probability of the children. For point masses, the recursive rejection of SpecInfer (Miao et al. 2023) is
        equivalent.

        Returns tokens int64 [B, L+1] (accepted drafts, then the decided token, then -1), path int64 [B, L+1] (the node
        that each token follows, so the root first; 0 after the last accepted node) and accepted int64 [B] (0..L).
        """
        return torch.ops.outrider.verify_tree(  # type: ignore[no-any-return]
            target_logits, tokens, parents, temperature, seeds, positions, depth, sampling
        )

    # -- logits processing --------------------------------------------------------------------------------------
    # ``logits`` [B, N, V]: N nodes of each request, of which node 0 is the last committed token and the others are
    # drafted; the logits at a node decide the token after it. Each method returns new logits of the same dtype, and
    # copies a row with neutral parameters bit for bit. The order is masks, bias, penalties, truncation.

    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor) -> Tensor:
        """Set the logits of tokens that a grammar doesn't allow to ``-inf``.

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
        """Apply repetition, presence and frequency penalties, exact at every node.

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
        """Set the logits of tokens that top-k, then top-p, then min-p drop from softmax(logits / temperature) to ``-inf``.

        ``temperature``, ``top_p``, ``min_p`` float32 [B], ``top_k`` int64 [B]; neutral: 0, 1, 0. Each filter sees the
        renormalised result of the previous filter. Tokens equal to the k-th largest stay. The nucleus (Holtzman et al.
        2020) is the fewest likeliest tokens whose mass reaches ``top_p``, the lowest index first among equals; min-p
        (Nguyen et al. 2024) keeps tokens with at least that fraction of the likeliest token's probability. The likeliest
        token always stays, and a row at temperature 0 keeps everything.
        """
        return torch.ops.outrider.truncate_logits(logits, temperature, top_k, top_p, min_p)  # type: ignore[no-any-return]

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities float32 [B, N, 1+count] and ids int64 [B, N, count] for ``logits`` [B, N, V].

        The first log-probability is that of ``tokens`` int64 [B, N]; it is undefined for a negative token. The others are
        those of the ``count`` likeliest tokens in order, the lower id first among equals. ``ids`` are their ids.
        """
        return torch.ops.outrider.logprobs(logits, tokens, count)  # type: ignore[no-any-return]
