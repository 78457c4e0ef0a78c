"""An engine over random weights of a published shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.cli.options.models import prepare_device, print_engine
from outrider.cli.options.rank_processes import open_rank
from outrider.cli.terminal.report import show_progress
from outrider.device.errors import ConfigError
from outrider_bench.acceptance import describe_acceptance, rates_of_requests

if TYPE_CHECKING:
    import torch

    from outrider.cli.options.rank_processes import JoinRanks
    from outrider.device import Backend
    from outrider.engine.config import Choice
    from outrider.engine.engine import Engine
    from outrider.model import LanguageModel, ModelRanks
    from outrider.model.layers.tuning import PreparedKernels
    from outrider.speculative.proposer import Proposer

RANDOM_PROPOSERS = ("eagle", "mtp", "dflash", "none")
DRAFT_LAYERS = 5
"""Number of layers of a block drafter, that of published ones."""
_DRAFT_OPTIONS = {
    "accept_length": "--accept-length needs drafts to accept",
    "draft_weights": "--draft-weights says what a draft's weights are",
    "draft_vocabulary": "--draft-vocabulary says which draft tokens are sampled",
}
"""Fields that need a draft, and the message that refuses each without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomModel:
    """A shape with random weights, its proposer, and its synthetic acceptance."""

    shape: str
    """Name of a shape for :func:`outrider.model.config.shapes.shape_config`, or the path of a ``config.json``."""
    speculate: str
    """Name of the proposer, one of :data:`RANDOM_PROPOSERS`."""
    draft_tokens: int
    accept_length: str | float | None
    """Synthetic acceptance, an argument of :func:`~outrider_bench.acceptance.rates_of_requests`. None: real acceptance."""
    quantize: str | None = None
    """Format of the layers' quantized weights, also of the draft's; None: unquantized."""
    quantize_head: bool = False
    """True if the output head also has the format of ``quantize``."""
    draft_weights: str | None = None
    """Format of the draft's products and of the output head that it samples with, or ``stored``. None: the engine's choice
    for a checkpoint.
    """
    draft_vocabulary: str | None = None
    """Tokens that the draft samples from, as ``--draft-vocabulary`` names them."""
    draft_layers: int = DRAFT_LAYERS
    """Number of layers of a block drafter."""

    def __post_init__(self) -> None:
        if self.speculate not in RANDOM_PROPOSERS:
            raise ConfigError(
                f"--speculate {self.speculate} has no random weights; with --shape use {', '.join(RANDOM_PROPOSERS)}"
            )
        if self.speculate == "none":
            for field, message in _DRAFT_OPTIONS.items():
                if getattr(self, field) is not None:
                    raise ConfigError(f"{message}; leave it out, or use --speculate eagle")
        if self.accept_length is not None:
            rates_of_requests(self.accept_length, self.draft_tokens)

    @property
    def quantized(self) -> str | None:
        """The weight format for a report, with a note whether the output head is quantised; None for unquantized weights."""
        return self.quantize and f"{self.quantize}, output head {'too' if self.quantize_head else 'unquantized'}"

    @property
    def description(self) -> Mapping[str, object]:
        """The model, its draft and its acceptance, as a report names them."""
        given = self.accept_length
        layers = f", {self.draft_layers} layers" if self.speculate == "dflash" else ""
        return {
            "model": f"random weights of {self.shape}",
            "quantized": self.quantized,
            "draft": None if self.speculate == "none" else f"random weights{layers}",
            "draft_weights": self.draft_weights,
            "draft_vocabulary": self.draft_vocabulary,
            "speculate": self.speculate,
            "acceptance": "real" if given is None else describe_acceptance(given, self.draft_tokens),
        }

    def make(
        self,
        device: Backend,
        dtype: torch.dtype,
        ranks: ModelRanks | None = None,
        *,
        kv_dtype: str = "auto",
        batch_invariant: bool = False,
        by_request: bool = False,
    ) -> tuple[LanguageModel, Proposer | None]:
        """Create the model with random weights, and its proposer, on a device; with ``ranks``, this rank's part of them.
        ``kv_dtype`` is the format of the KV cache. With ``batch_invariant``, the model uses batch-invariant kernels.
        ``by_request``: requests may have draft lengths of their own, which synthetic acceptance then follows.
        """
        from outrider.cli.options.models import vocabulary_of
        from outrider.model import Decoder, DraftVocabulary, with_output_head
        from outrider.speculative.eagle import EagleProposer
        from outrider.speculative.parallel import BlockProposer
        from outrider.speculative.plugin import STORED
        from outrider_bench.random_weights import (
            HeadFormats,
            RandomQuantization,
            random_decoder,
            random_dflash,
            random_eagle,
            random_mtp,
            shape_config,
        )
        from outrider_bench.synthetic import with_synthetic_acceptance

        tokens = vocabulary_of(self.draft_vocabulary)
        vocabulary = None if tokens is None else DraftVocabulary.load(tokens)
        whole = shape_config(self.shape)
        weights = None if self.quantize is None else RandomQuantization(name=self.quantize, head=self.quantize_head)
        model = random_decoder(whole, backend=device, dtype=dtype, ranks=ranks, quantization=weights, kv_dtype=kv_dtype)
        kernels = model.kernels.batch_invariant() if batch_invariant else model.kernels
        if self.accept_length is not None:
            kernels = with_synthetic_acceptance(
                kernels, self.accept_length, self.draft_tokens, context=whole.max_context, by_request=by_request
            )
        if kernels is not model.kernels:
            model = Decoder(model.config, model.weights, kernels, ranks)
        if self.speculate == "none":
            return model, None
        rounding = None if self.draft_weights == STORED else self.draft_weights
        output = model
        if rounding is not None or vocabulary is not None:
            output = with_output_head(model, backend=device, format=rounding, vocabulary=vocabulary)
        formats: HeadFormats = {"backend": device, "quantization": weights, "rounding": rounding}
        if self.speculate == "dflash":
            block = self.draft_tokens + 1
            drafter = random_dflash(model, whole, layers=self.draft_layers, block_size=block, **formats)
            drafter.output = output
            return model, BlockProposer(drafter)
        make_head = random_mtp if self.speculate == "mtp" else random_eagle
        head = make_head(model, whole, **formats)
        head.output = output
        return model, EagleProposer(head, draft_tokens=self.draft_tokens)

    def load_engine(
        self,
        backend: str | None,
        *,
        settings: Mapping[str, Any] | None = None,
        max_requests: int,
        dtype: str | None,
        max_context: int,
        cached_tokens: int | None = None,
        verbose: bool = False,
        other_choices: Sequence[Choice] = (),
        join: JoinRanks | None = None,
        tune_seconds: float = 0.0,
        on_prepared: Callable[[PreparedKernels], None] = lambda prepared: None,
    ) -> Engine:
        """Select the backend, make the weights on it and return the engine.

        ``settings``: fields of the engine's config, which replace ``max_requests`` and ``max_context``. ``cached_tokens``:
        capacity of the KV cache in tokens, in addition to a partly used page of each request; None: the engine chooses.
        ``verbose``: print the chosen settings and ``other_choices``. ``tune_seconds``: time limit for tuning kernels first;
        ``on_prepared`` gets the result of tuning.
        """
        from outrider.engine.config import EngineConfig
        from outrider.engine.engine import Engine
        from outrider.engine.ranks.ranks import part_of_model
        from outrider.engine.setup.facts import collect_facts
        from outrider.engine.setup.resolve import choose_draft_weights, draft_weights_choice, resolve
        from outrider.model.config.shapes import shape_config
        from outrider.speculative.proposer import NonSpeculativeProposer

        ranks, device, leads = open_rank(join, backend)
        with show_progress(leads) as tell:
            on_prepared(prepare_device(device, lambda: shape_config(self.shape), tune_seconds, tell))
        own: tuple[Choice, ...] = () if dtype is not None else (self._choose_dtype(device),)
        own_settings: dict[str, Any] = {
            "max_requests": max_requests,
            "max_context": max_context,
            "dtype": dtype or str(own[0].value),
        }
        config = EngineConfig(draft_tokens=self.draft_tokens, prefix_cache=False, **{**own_settings, **(settings or {})})
        if cached_tokens is not None:
            pages = cached_tokens // (config.page_size or device.capabilities.page_size) + max_requests + 2
            config = replace(config, num_pages=pages)
        part = part_of_model(ranks)
        random = self
        if self.speculate != "none" and self.draft_weights is None:
            kernels = device.kernels_in_use.batch_invariant() if config.batch_invariant else device.kernels_in_use
            chosen = choose_draft_weights(device.capabilities, kernels, config.torch_dtype)
            random = replace(self, draft_weights=chosen)
        if random.draft_weights is not None:
            own += (draft_weights_choice(random.draft_weights, asked=self.draft_weights is not None),)
        model, proposer = random.make(
            device,
            config.torch_dtype,
            part,
            kv_dtype=config.kv_dtype,
            batch_invariant=config.batch_invariant,
            by_request=config.draft_length == "request",
        )
        config = resolve(config, collect_facts(device, model, proposer or NonSpeculativeProposer()), own)
        with show_progress(leads) as tell:
            engine = Engine(
                model,
                device,
                proposer=proposer,
                config=config,
                capture_progress=lambda done, total: tell("capturing graphs", done, total),
                ranks=ranks,
            )
        if verbose and leads:
            print_engine(engine, other_choices)
        return engine

    def _choose_dtype(self, device: Backend) -> Choice:
        """Return the dtype of the ``config.json``, or the dtype in which models of this shape are published."""
        import torch

        from outrider.engine.setup.resolve import choose_dtype
        from outrider.model.config.checkpoint_config import checkpoint_dtype
        from outrider.model.config.shapes import shape_file

        file = shape_file(self.shape)
        own = None if file is None else checkpoint_dtype(file.parent, file.name)
        chosen = choose_dtype(device.capabilities, own or torch.bfloat16)
        return replace(
            chosen, why=chosen.why.replace("the checkpoint", "the published checkpoint" if own is None else "the config")
        )
