"""Agreement of all ranks on the config of a new engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.device import Backend, CapabilityError, ConfigError, StepMode
from outrider.engine.config import Choice, DecidedConfig
from outrider.engine.ranks.ranks import Ranks
from outrider.model import LanguageModel
from outrider.speculative.proposer import Proposer


def common_config(ranks: Ranks, config: DecidedConfig) -> DecidedConfig:
    """Return the config of the first rank, with the least that any rank's memory holds: pages, context, checkpoints."""
    configs: list[DecidedConfig] = ranks.exchange("the engine's config", config, DecidedConfig)
    first = configs[0]
    names = ("num_pages", "max_context", "state_checkpoints")
    least: dict[str, Any] = {name: min(getattr(each, name) for each in configs) for name in names}
    lowered = {name: value for name, value in least.items() if value < getattr(first, name)}
    reason = "the rank with the least memory has room for no more"
    choices = tuple(choice for choice in first.chosen if choice.name not in lowered)
    choices += tuple(Choice(name, value, reason) for name, value in lowered.items())
    return replace(first, **least, chosen=choices)


def join_engine(
    ranks: Ranks | None, backend: Backend, model: LanguageModel, proposer: Proposer, config: DecidedConfig
) -> DecidedConfig:
    """Return the config that all ranks share, after checking that several ranks can run this engine.

    Raises :class:`ConfigError` for a model of other ranks, :class:`CapabilityError` for a backend or kernels that can't run
    on several ranks, and :class:`~outrider.engine.ranks.records.RanksDiffer` if ranks have other models or proposers.
    """
    if ranks is None and model.ranks is None:
        return config
    if ranks is None or model.ranks is not ranks.model:
        raise ConfigError("an engine of several ranks has a model that was shared out among them; give both the same ranks")
    config = common_config(ranks, config)
    uses_graphs = config.graphs or config.step_mode is StepMode.FUSED
    if uses_graphs and backend.capabilities.captures_graphs and not backend.capabilities.captures_collectives:
        raise CapabilityError(
            f"{backend.label} captures graphs, but no collectives in them (captures_collectives), and several ranks have "
            "some in every stage; use mode staged without graphs"
        )
    if ranks.data is not None and model.kernels.plans_on_host:
        raise CapabilityError(
            f"the kernels {model.kernels.name!r} plan each batch on the host, which idle data-parallel groups have no batch "
            "for; use other kernels, or tensor parallelism alone"
        )
    if ranks.data is not None and proposer.extends:
        proposer.prompt_passes(1, 1, 1)  # raises if the proposer doesn't declare its passes
    ranks.check_same(
        "the engine",
        {
            "model": model.config,
            "dtype": model.dtype,
            "KV cache": model.cache_dtype,
            "proposer": proposer.name,
            "drafts": (proposer.depth, proposer.nodes, proposer.relay),
            "kernels": model.kernels.name,
        },
    )
    return config
