"""What an engine refuses to be built with."""

from __future__ import annotations

from outrider.device import Backend, CapabilityError, ConfigError, StepMode
from outrider.engine.config import EngineConfig
from outrider.model import LanguageModel
from outrider.speculative.proposer import Proposer

DEFAULT_MAX_CONTEXT = 4096


def check_policy(backend: Backend) -> None:
    """Raise :class:`CapabilityError` for a policy that this step doesn't carry out."""
    sync = backend.speculative_sync
    if StepMode.STAGED not in sync.step_modes or sync.exact_host_lengths or sync.rebind_params:
        raise CapabilityError(
            f"{backend.label} declares a policy that this version's step doesn't carry out (staged mode without host "
            "lengths or rebound parameters is what it does)"
        )


def check_proposer(model: LanguageModel, proposer: Proposer) -> None:
    """Raise :class:`ConfigError` for drafts that can't be, or that the model can't verify."""
    if proposer.nodes < proposer.depth:
        raise ConfigError(
            f"the proposer {proposer.name!r} declares {proposer.nodes} nodes and paths of {proposer.depth}: a path has no "
            "more nodes than its tree"
        )
    if proposer.is_tree and any(model.config.windows):
        raise ConfigError(
            f"the proposer {proposer.name!r} drafts trees, and the model has layers with a sliding window, which count slots"
            " and not positions on a path; draft a chain (draft_topk=1)"
        )


def context_limit(config: EngineConfig, model: LanguageModel, proposer: Proposer) -> int:
    """Tokens of prompt and output together: the chosen limit, or the least of the models' own and the default."""
    limit = model.config.max_context
    if proposer.max_context is not None:
        limit = min(limit, proposer.max_context)
    if config.max_context is None:
        return min(limit, DEFAULT_MAX_CONTEXT)
    if config.max_context > limit:
        what = "model was" if limit == model.config.max_context else f"proposer {proposer.name!r} was"
        raise ConfigError(f"max_context is {config.max_context}, the {what} made for {limit} at most")
    return config.max_context
