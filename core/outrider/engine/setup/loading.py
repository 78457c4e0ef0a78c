"""Loading: reads a checkpoint directory and creates the parts of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch

from outrider.device import Backend, ConfigError
from outrider.device.kernels.weights import quantized_products
from outrider.engine.config import DTYPES, Choice, DecidedConfig, DtypeName, EngineConfig
from outrider.engine.ranks.ranks import Ranks, part_of_model
from outrider.engine.setup.checks import check_type, predict_memory
from outrider.engine.setup.facts import collect_facts
from outrider.engine.setup.resolve import choose_draft_weights, choose_dtype, draft_weights_choice, resolve
from outrider.model import (
    Decoder,
    DecoderPlan,
    DraftVocabulary,
    LanguageModel,
    Progress,
    QuantizedMode,
    Tokenizer,
    VisionTower,
    check_draft_kind,
    check_quantized_mode,
    check_same_tokens,
    checkpoint_dtype,
    find_checkpoint,
    has_tokenizer,
    has_vision_tower,
    load_through_transformers,
    load_vision,
    plan_decoder,
)
from outrider.model.quantization import read_quantization
from outrider.registry.engine_plugins import plugin_builders
from outrider.speculative.build import Builder, DraftOptions, build_proposer, check_draft_settings
from outrider.speculative.plugin import BUILTIN_PROPOSERS, DRAFT_HEADS, DRAFTLESS, INSIDE_MODEL, STORED, SUFFIX_PREFIX
from outrider.speculative.proposer import Proposer


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingArguments:
    """The arguments of :meth:`Engine.from_checkpoint` that are equal on all ranks. Raises :class:`ConfigError` for values of
    a wrong type, and for code of the checkpoint that nothing runs.
    """

    draft_dir: Path | None = None
    speculate: str = "none"
    config: EngineConfig | DecidedConfig | None = None
    through_transformers: bool = False
    trust_remote_code: bool = False
    quantized: str = "kernels"
    draft_weights: str | None = None
    draft_vocabulary: Path | int | None = None

    def __post_init__(self) -> None:
        check_type("draft_dir", self.draft_dir, str, Path, type(None))
        check_type("speculate", self.speculate, str)
        check_type("config", self.config, EngineConfig, type(None))
        check_type("quantized", self.quantized, str)
        check_type("draft_weights", self.draft_weights, str, type(None))
        check_type("draft_vocabulary", self.draft_vocabulary, str, Path, int, type(None))
        if self.trust_remote_code and not self.through_transformers:
            raise ConfigError(
                "trust_remote_code runs code of the checkpoint, which only through_transformers runs; leave it out"
            )

    def arguments(self) -> dict[str, Any]:
        """Return the loading arguments by keyword."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def absolute(path: Path | str | None) -> Path | None:
    """Return the absolute path of an existing file or directory; a name on the Hub stays a name, and None stays None."""
    if not isinstance(path, str | Path):
        return path  # LoadingArguments checks its type
    return Path(path).resolve() if Path(path).exists() else Path(path)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A loaded checkpoint with its draft.

    ``vision`` is None for a text model, ``tokenizer`` for a checkpoint without one. ``config`` has all settings decided.
    """

    config: DecidedConfig
    model: LanguageModel
    proposer: Proposer
    tokenizer: Tokenizer | None
    vision: VisionTower | None


def load_checkpoint(
    directory: Path,
    backend: Backend,
    loading: LoadingArguments,
    *,
    builders: Mapping[str, Builder] | None = None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint and its draft; see :meth:`outrider.engine.engine.Engine.from_checkpoint` for the arguments.

    Raises :class:`ConfigError` for options that exclude each other.
    """
    config, speculate = loading.config or EngineConfig(), loading.speculate
    directory = find_checkpoint(directory, code=loading.trust_remote_code)
    draft_dir = None if loading.draft_dir is None else find_checkpoint(loading.draft_dir)
    builders = dict(builders or {})
    # plugin_builders raises for an unknown name, before any weights are loaded.
    builders |= plugin_builders(speculate, other_builders=builders)
    check_draft_settings(speculate, backend, loading.draft_weights, loading.draft_vocabulary)
    vocabulary = None if loading.draft_vocabulary is None else DraftVocabulary.load(loading.draft_vocabulary)
    mode = check_quantized_mode(loading.quantized)
    tokenizer = Tokenizer.from_checkpoint(directory) if has_tokenizer(directory) else None
    if tokenizer is not None and draft_dir is not None:
        check_same_tokens(tokenizer, draft_dir)
    chosen: tuple[Choice, ...] = ()
    if config.dtype is None:
        chosen = (choose_dtype(backend.capabilities, checkpoint_dtype(directory)),)
        config = replace(config, dtype=cast("DtypeName", str(chosen[0].value)))
    draft_dir = draft_dir if speculate in builders else _checked_draft(directory, draft_dir, speculate)
    assert config.dtype is not None
    dtype = DTYPES[config.dtype]
    if loading.through_transformers:
        _check_through_transformers(config, ranks)
        model: LanguageModel = load_through_transformers(
            directory, backend=backend, dtype=dtype, trust_remote_code=loading.trust_remote_code
        )
    else:
        plan = _plan_native(directory, backend, dtype, config, ranks, mode)
        predict_memory(plan, backend, config, None if speculate in builders else draft_dir)
        model = plan.load(progress)
    weights, head = loading.draft_weights, None if speculate in builders else speculate.removeprefix(SUFFIX_PREFIX)
    if weights is None and head in DRAFT_HEADS:
        weights = choose_draft_weights(backend.capabilities, model.kernels, dtype)
    options = DraftOptions(
        target=model,
        backend=backend,
        dtype=dtype,
        directory=draft_dir,
        draft_tokens=config.draft_tokens,
        topk=config.draft_topk,
        progress=progress,
        quantized=mode,
        weights=None if weights == STORED else weights,
        vocabulary=vocabulary,
    )
    proposer = build_proposer(speculate, options, builders=builders)
    chosen += (*_quantized_choices(model, mode, directory), *_recurrent_choices(model))
    chosen += _draft_head_choices(model, loading.draft_weights, weights, vocabulary)
    vision = None
    if model.config.vision is not None and has_vision_tower(directory):  # some copies hold the text model alone
        vision = load_vision(directory, backend=backend, dtype=dtype, progress=progress)
    decided = resolve(config, collect_facts(backend, model, proposer), chosen)
    return LoadedCheckpoint(decided, model, proposer, tokenizer, vision)


def _check_through_transformers(config: EngineConfig, ranks: Ranks | None) -> None:
    """Raise :class:`ConfigError` for settings that don't apply to a model run by transformers' own code."""
    if ranks is not None:
        raise ConfigError(
            "through_transformers runs a model by transformers' own code, which isn't shared out among ranks; leave it out, "
            "or run on one rank"
        )
    if config.kv_dtype not in ("auto", "plain"):
        raise ConfigError(
            f"kv_dtype is {config.kv_dtype}, and through_transformers runs a model by transformers' own code, whose KV cache "
            "is kept in the model's dtype; leave one of them out"
        )


def _checked_draft(directory: Path, draft_dir: Path | None, speculate: str) -> Path | None:
    """Return the draft's directory, which is the model's if the heads are in its checkpoint; None for a proposer without a
    draft.

    Its kind and its files' headers are checked here, before the target is read.
    """
    head = speculate.removeprefix(SUFFIX_PREFIX)
    if draft_dir is None and head in INSIDE_MODEL:
        draft_dir = directory
    if draft_dir is not None and head in BUILTIN_PROPOSERS.keys() - DRAFTLESS:
        check_draft_kind(draft_dir, head)
    return draft_dir


def _plan_native(
    directory: Path,
    backend: Backend,
    dtype: torch.dtype,
    config: EngineConfig,
    ranks: Ranks | None,
    quantized: QuantizedMode,
) -> DecoderPlan:
    """Return the plan of a checkpoint from the headers of its files. The plan loads the model later, with the kernels that
    the config selects.
    """
    kernels = backend.kernels_in_use
    return plan_decoder(
        directory,
        backend=backend,
        dtype=dtype,
        ranks=part_of_model(ranks),
        quantized=quantized,
        kv_dtype=config.kv_dtype,
        kernels=kernels.batch_invariant() if config.batch_invariant else kernels,
    )


def _draft_head_choices(
    model: LanguageModel, asked: str | None, weights: str | None, vocabulary: DraftVocabulary | None
) -> tuple[Choice, ...]:
    """Return the format ``weights`` of the draft's weights and the vocabulary of drafts, for :attr:`Engine.chosen`.

    ``asked``: the format that the user gave, or None.
    """
    made: tuple[Choice, ...] = ()
    if weights is not None:
        made += (draft_weights_choice(weights, asked=asked is not None),)
    if vocabulary is not None:
        why = f"as asked: drafts are drawn from {vocabulary.origin}; what is verified has all {model.config.vocab_size}"
        made += (Choice("draft_vocabulary", vocabulary.ids.numel(), why),)
    return made


def _recurrent_choices(model: LanguageModel) -> tuple[Choice, ...]:
    """Return the choice of kernels for the recurrent layers, for :attr:`Engine.chosen`; empty for a model without recurrent
    layers.
    """
    recurrent = model.config.recurrent
    if recurrent is None:
        return ()
    kernels = model.kernels
    names = ("short_convolution", "gated_delta_rule", "chunk_gated_delta_rule", "gated_rms_norm")
    own = [name for name in names if kernels.is_native(name)]
    why = f"{', '.join(own)} by the kernels {kernels.name!r}" if own else "computed by the torch references"
    return (Choice("recurrent_layers", len(recurrent.layers), why),)


def _quantized_choices(model: LanguageModel, mode: QuantizedMode, directory: Path) -> tuple[Choice, ...]:
    """Return the choice of weight kernels for a quantized checkpoint, for :attr:`Engine.chosen`; empty for an unquantized
    one.
    """
    if not isinstance(model, Decoder):
        return ()
    if mode == "dequantize":
        found = read_quantization(directory, mode=mode)
        plain = f"weights of {found.method} are plain now, and activations stay as they are" if found is not None else ""
        return (Choice("quantized", mode, f"as asked: {plain}"),) if plain else ()
    products = quantized_products(model.weights)
    if not products:
        found = read_quantization(directory, mode=mode)
        if found is None or found.stacks is None:
            return ()
        why = f"the experts are {found.method}, for which there are no kernels: they are plain now"
        return (Choice("quantized", "dequantize", why),)
    own = model.kernels.is_native("linear_quantized")
    ways = ", ".join(f"{label} in {count} weights" for label, count in sorted(products.items()))
    by = f"the kernels {model.kernels.name!r}" if own else "the torch reference, each weight made plain in each product"
    return (Choice("quantized", ways, f"the checkpoint's; multiplied by {by}"),)
