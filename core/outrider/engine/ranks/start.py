"""What the ranks of an engine agree on when it's made."""

from __future__ import annotations

from dataclasses import replace

from outrider.device import Backend, CapabilityError, ConfigError, StepMode
from outrider.engine.config import Choice, DecidedConfig
from outrider.engine.ranks.ranks import Ranks
from outrider.engine.requests.hand_over import HandOver
from outrider.model import LanguageModel
from outrider.speculative.proposer import Proposer


def alike(ranks: Ranks, config: DecidedConfig) -> DecidedConfig:
    """The config of the first rank, with as many pages and as long a context as every rank has room for."""
    all_of_them: list[DecidedConfig] = ranks.meet("the engine's config", config, DecidedConfig)
    first = all_of_them[0]
    pages, context = (min(getattr(each, name) for each in all_of_them) for name in ("num_pages", "max_context"))
    chosen = first.chosen
    if (pages, context) != (first.num_pages, first.max_context):
        why = "the rank with the least memory has room for no more"
        chosen = tuple(each for each in chosen if each.name not in ("num_pages", "max_context"))
        chosen += (Choice("num_pages", pages, why), Choice("max_context", context, why))
    return replace(first, num_pages=pages, max_context=context, chosen=chosen)


def join_engine(
    ranks: Ranks | None, backend: Backend, model: LanguageModel, proposer: Proposer, config: DecidedConfig
) -> DecidedConfig:
    """The config that all ranks have, once this engine was found to be one that several ranks can run.

    Raises :class:`ConfigError`, :class:`CapabilityError` and :class:`~outrider.engine.ranks.records.RanksDiffer`.
    """
    if ranks is None and model.ranks is None:
        return config
    if ranks is None or model.ranks is not ranks.model:
        raise ConfigError("an engine of several ranks has a model that was shared out among them; give both the same ranks")
    config = alike(ranks, config)
    replays = config.graphs or config.step_mode is StepMode.FUSED
    if replays and backend.capabilities.captures_graphs and not backend.capabilities.captures_collectives:
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
        proposer.prompt_passes(1, 1, 1)  # raises for one that doesn't say
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


def check_key(handed: HandOver, ranks: Ranks | None) -> None:
    """Raise :class:`ConfigError` unless the request comes from an engine of the same ranks, and wasn't taken over before."""
    if ranks is None or handed.key not in ranks.handed_over:
        raise ConfigError(
            "the request comes from an engine of other ranks, or was taken over already: it goes on where its state is"
        )
