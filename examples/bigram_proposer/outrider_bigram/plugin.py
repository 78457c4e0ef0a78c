"""Entry point of the proposer `bigram`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.device.errors import ConfigError
from outrider.speculative.plugin import ProposerInfo, hookimpl

if TYPE_CHECKING:
    from outrider.speculative.build import DraftOptions
    from outrider.speculative.proposer import Proposer


@hookimpl
def proposer_info() -> ProposerInfo:
    """Describe the proposer, which needs no checkpoint."""
    return ProposerInfo(name="bigram", description="what followed a token the last time, in any request")


@hookimpl
def create_proposer(options: DraftOptions) -> Proposer:
    """Create a chain proposer. It knows one successor per token, so it refuses trees."""
    if options.topk != 1:
        raise ConfigError(f"draft_topk is {options.topk}, but 'bigram' knows one token after each: it drafts chains alone")
    if options.directory is not None:
        raise ConfigError(f"'bigram' has no checkpoint, but draft_dir is {options.directory}; leave --draft out")
    from outrider_bigram.proposer import BigramProposer

    return BigramProposer(vocab_size=options.target.config.vocab_size, draft_tokens=options.draft_tokens)
