"""From a checkpoint's directory to what an engine is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.device import Backend
from outrider.engine.config import EngineConfig
from outrider.model import (
    Decoder,
    LanguageModel,
    Progress,
    Tokenizer,
    VisionTower,
    load_decoder,
    load_through_transformers,
    load_vision,
)
from outrider.registry.proposers import plugin_builders
from outrider.speculative.build import Builder, DraftOptions, build
from outrider.speculative.proposer import Proposer


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint and its draft hold; ``vision`` None for a model of text alone."""

    model: LanguageModel
    proposer: Proposer
    tokenizer: Tokenizer
    vision: VisionTower | None


def load_checkpoint(
    directory: Path,
    backend: Backend,
    config: EngineConfig,
    *,
    draft_dir: Path | None,
    speculate: str,
    builders: Mapping[str, Builder] | None = None,
    through_transformers: bool = False,
    progress: Progress | None = None,
) -> Loaded:
    """See :meth:`outrider.engine.engine.Engine.from_checkpoint`."""
    builders = dict(builders or {})
    builders |= plugin_builders(speculate, given=builders)  # before anything is loaded: it raises for an unknown name
    model = _load_model(directory, backend, config, through_transformers, progress)
    options = DraftOptions(
        target=model,
        backend=backend,
        dtype=config.torch_dtype,
        directory=draft_dir,
        draft_tokens=config.draft_tokens,
        topk=config.draft_topk,
        nodes=config.draft_nodes,
        progress=progress,
    )
    proposer = build(speculate, options, builders=builders)
    tokenizer = Tokenizer.from_checkpoint(directory)
    vision = None
    if model.config.vision is not None:
        vision = load_vision(directory, backend=backend, dtype=config.torch_dtype, progress=progress)
    return Loaded(model, proposer, tokenizer, vision)


def _load_model(
    directory: Path, backend: Backend, config: EngineConfig, through_transformers: bool, progress: Progress | None
) -> LanguageModel:
    """The model of a checkpoint, native or by transformers' own code, with the kernels that the config asks for."""
    if through_transformers:
        return load_through_transformers(directory, backend=backend, dtype=config.torch_dtype)
    model = load_decoder(directory, backend=backend, dtype=config.torch_dtype, progress=progress)
    if config.batch_invariant:
        return Decoder(model.config, model.weights, backend.kernels_in_use.batch_invariant())
    return model
