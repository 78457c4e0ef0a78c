"""Drafts of a head that draws from some of the target's tokens. Letters: V vocabulary, Vd draft vocabulary."""

from __future__ import annotations

from torch import Tensor

from outrider.device import ConfigError, KernelSet


def target_tokens(kernels: KernelSet, drafted: Tensor, ids: Tensor | None) -> Tensor:
    """The target's tokens of ``drafted`` ones, any shape; ``ids`` int64 [Vd] names them, None where they're the same."""
    return drafted if ids is None else kernels.gather_rows(ids, drafted.flatten()).view(drafted.shape)


def over_target(probs: Tensor, ids: Tensor | None, vocabulary: int) -> Tensor:
    """Distributions [B, K, Vd] over the draft vocabulary, as ones over the target's [B, K, V]."""
    if ids is None:
        return probs
    full = probs.new_zeros((*probs.shape[:-1], vocabulary))
    return full.index_copy_(-1, ids, probs)


def too_many_branches(branches: int, vocabulary: int) -> ConfigError:
    """A tree branches into more tokens than drafts are drawn from."""
    return ConfigError(
        f"draft_topk is {branches}, and drafts are drawn from {vocabulary} tokens; expected at most as many branches"
    )
