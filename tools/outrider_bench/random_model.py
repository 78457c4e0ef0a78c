"""An engine over random weights of a published shape, for ``outrider bench``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from outrider.cli.environment import backend_from_environment
from outrider.cli.models import Running, Sizes, prepare_device
from outrider.cli.rank_processes import Joined
from outrider.cli.starting import print_choices, print_start_report, show_progress
from outrider.device.errors import ConfigError
from outrider.registry import Registry

if TYPE_CHECKING:
    import torch

    from outrider.device import Backend
    from outrider.engine.config import Choice, EngineConfig
    from outrider.engine.engine import Engine
    from outrider.model import LanguageModel, ModelConfig, ModelRanks
    from outrider.model.tuning import Prepared
    from outrider.speculative.proposer import Proposer


RANDOM_PROPOSERS = ("eagle", "dflash", "none")
DRAFT_LAYERS = 5
"""Of a block drafter: as many as the published ones have."""


def check_acceptance(accept_length: float | None, shape: str | None) -> None:
    """Raise :class:`ConfigError` where synthetic acceptance is asked of a real model."""
    if accept_length is not None and shape is None:
        raise ConfigError("--accept-length is synthetic and goes with --shape alone: a real model accepts what it accepts")


def check_draft_quantize(draft_quantize: str | None, shape: str | None, quantize: str | None = None) -> None:
    """Raise :class:`ConfigError` for an unknown format, for a real draft, and where all of the model is quantised."""
    from outrider_tune.quantized import random_format

    if draft_quantize is None:
        return
    random_format(draft_quantize)
    if quantize is not None:
        raise ConfigError("--quantize takes the draft's layers too; leave --draft-quantize out")
    if shape is None:
        raise ConfigError(
            "--draft-quantize makes random weights and goes with --shape alone: write a real draft's with outrider quantize, "
            "and give its directory with --draft"
        )


def check_lengths(config: ModelConfig, of: str, *, prompt_tokens: int, new_tokens: int) -> None:
    """Raise :class:`ConfigError` where a request is longer than the context of the model of ``config``, which is ``of``."""
    if prompt_tokens + new_tokens > config.max_context:
        raise ConfigError(
            f"--prompt-tokens {prompt_tokens} and --new-tokens {new_tokens} don't fit in the context of {of}, which is "
            f"{config.max_context}; ask for fewer"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomModel:
    """A shape, its proposer (of :data:`RANDOM_PROPOSERS`), and the mean length of synthetic acceptance, if any, with equal
    chances for each drafted token. ``draft_layers``: of a block drafter.

    ``quantize``: the format of the layers' weights, also the draft's; ``quantize_head``: of the output head too;
    ``draft_quantize``: the format of the draft's alone.
    ``draft_output_head``: the format of the copy of the head that drafts are drawn with; ``draft_vocabulary``: the tokens
    that they're drawn from, as ``--draft-vocabulary`` names them.
    """

    shape: str
    speculate: str
    draft_tokens: int
    accept_length: float | None
    quantize: str | None = None
    quantize_head: bool = False
    draft_quantize: str | None = None
    draft_output_head: str | None = None
    draft_vocabulary: str | None = None
    draft_layers: int = DRAFT_LAYERS

    def __post_init__(self) -> None:
        if self.speculate not in RANDOM_PROPOSERS:
            raise ConfigError(
                f"--speculate {self.speculate} has no random weights; with --shape use {', '.join(RANDOM_PROPOSERS)}"
            )
        if self.accept_length is not None and self.speculate == "none":
            raise ConfigError("--accept-length needs drafts to accept; leave it out, or use --speculate eagle")
        if self.draft_quantize is not None and self.speculate == "none":
            raise ConfigError("--draft-quantize says what a draft's weights are; leave it out, or use --speculate eagle")
        if self.draft_output_head is not None and self.speculate == "none":
            raise ConfigError("--draft-output-head says how drafts are drawn; leave it out, or use --speculate eagle")
        if self.draft_vocabulary is not None and self.speculate == "none":
            raise ConfigError("--draft-vocabulary says what drafts are drawn from; leave it out, or use --speculate eagle")
        if self.accept_length is not None and not 1 <= self.accept_length <= self.draft_tokens + 1:
            raise ConfigError(
                f"--accept-length is {self.accept_length:g}; with {self.draft_tokens} drafted tokens it is 1 to "
                f"{self.draft_tokens + 1}"
            )

    @property
    def described(self) -> Mapping[str, object]:
        """What a report says about it."""
        return {
            "model": f"random weights of {self.shape}",
            "quantized": self.quantize and f"{self.quantize}, output head {'too' if self.quantize_head else 'plain'}",
            "draft": self._draft,
            "draft_output_head": self.draft_output_head,
            "draft_vocabulary": self.draft_vocabulary,
            "speculate": self.speculate,
            "acceptance": "real" if self.accept_length is None else f"synthetic, mean {self.accept_length:g}",
        }

    @property
    def _draft(self) -> str | None:
        if self.speculate == "none":
            return None
        layers = f", {self.draft_layers} layers" if self.speculate == "dflash" else ""
        return f"random weights{layers}" + (f", {self.draft_quantize}" if self.draft_quantize else "")

    def config(
        self, *, running: Running, max_requests: int, dtype: str | None, max_context: int, sizes: Sizes | None = None
    ) -> EngineConfig:
        """That of the engine. ``sizes`` go before the others."""
        from outrider.engine.config import EngineConfig

        least = {"max_requests": max_requests, "max_context": max_context}
        return EngineConfig(
            draft_tokens=self.draft_tokens,
            dtype=dtype,
            prefix_cache=False,
            **asdict(running),
            **least | (sizes or Sizes()).given,
        )

    def make(
        self, device: Backend, dtype: torch.dtype, ranks: ModelRanks | None = None, *, kv_dtype: str = "auto"
    ) -> tuple[LanguageModel, Proposer | None]:
        """The weights on a device, or this rank's part of them."""
        from outrider.cli.models import vocabulary_of
        from outrider.model import Decoder, DraftVocabulary, with_output_head
        from outrider.speculative.block import BlockProposer
        from outrider.speculative.eagle import EagleProposer
        from outrider_bench.random_weights import (
            RandomQuantization,
            random_decoder,
            random_dflash,
            random_eagle,
            shape_config,
        )
        from outrider_bench.synthetic import with_synthetic_acceptance

        given = vocabulary_of(self.draft_vocabulary)
        vocabulary = None if given is None else DraftVocabulary.read(given)
        whole = shape_config(self.shape)
        way = None if self.quantize is None else RandomQuantization(name=self.quantize, head=self.quantize_head)
        model = random_decoder(whole, backend=device, dtype=dtype, ranks=ranks, quantization=way, kv_dtype=kv_dtype)
        if self.accept_length is not None:
            kernels = with_synthetic_acceptance(
                model.kernels, self.accept_length, self.draft_tokens, context=whole.max_context
            )
            model = Decoder(model.config, model.weights, kernels, ranks)
        if self.speculate == "none":
            return model, None
        if self.draft_quantize is not None:
            way = RandomQuantization(name=self.draft_quantize, head=False)
            way.check(device)
        drawn = model
        if self.draft_output_head is not None or vocabulary is not None:
            drawn = with_output_head(model, backend=device, format=self.draft_output_head, vocabulary=vocabulary)
        if self.speculate == "dflash":
            block = self.draft_tokens + 1
            drafter = random_dflash(
                drawn, whole, layers=self.draft_layers, block_size=block, backend=device, quantization=way
            )
            return model, BlockProposer(drafter)
        head = random_eagle(drawn, whole, backend=device, quantization=way)
        return model, EagleProposer(head, draft_tokens=self.draft_tokens)

    def load(
        self,
        backend: str | None,
        *,
        running: Running,
        max_requests: int,
        dtype: str | None,
        max_context: int,
        sizes: Sizes | None = None,
        cached_tokens: int | None = None,
        say: bool = False,
        beside: Sequence[Choice] = (),
        joined: Joined | None = None,
        tune_seconds: float = 0.0,
        prepared: Callable[[Prepared], None] = lambda found: None,
    ) -> Engine:
        """Choose the backend and make the weights on it. ``say``: tell people what was chosen, also ``beside`` it.

        ``cached_tokens``: those that the cache holds, a partly used page of each request aside; None: chosen.
        ``tune_seconds``: kernels are measured first, for at most so long; ``prepared`` is told what came of it.
        """
        from outrider.engine.engine import Engine
        from outrider.engine.resolve import resolve
        from outrider.engine.situation import situation_of
        from outrider.model.shapes import shape_config
        from outrider.speculative.proposer import PlainProposer

        registry = Registry()
        joined = joined or Joined(1, 1)
        device = joined.backend(registry, backend, backend_from_environment())
        ranks = joined.join(device)
        with show_progress(joined.leads) as tell:
            prepared(prepare_device(device, lambda: shape_config(self.shape), tune_seconds, tell))
        own: tuple[Choice, ...] = ()
        if dtype is None:
            own = (self.dtype(device),)
            dtype = str(own[0].value)
        config = self.config(running=running, max_requests=max_requests, dtype=dtype, max_context=max_context, sizes=sizes)
        if cached_tokens is not None:
            pages = cached_tokens // (config.page_size or device.capabilities.page_size) + max_requests + 2
            config = replace(config, num_pages=pages)
        part = None if ranks is None else ranks.model
        model, proposer = self.make(device, config.torch_dtype, part, kv_dtype=config.kv_dtype)
        config = resolve(config, situation_of(device, model, proposer or PlainProposer()), own)
        with show_progress(joined.leads) as tell:
            engine = Engine(
                model,
                device,
                proposer=proposer,
                config=config,
                capture_progress=lambda done, total: tell("capturing graphs", done, total),
                ranks=ranks,
            )
        if not joined.leads:
            return engine
        if say:
            print_choices(engine, beside)
        print_start_report(engine)
        return engine

    def dtype(self, device: Backend) -> Choice:
        """The dtype of the weights where none is asked for: the config's, or that in which such models are published."""
        import torch

        from outrider.engine.resolve import choose_dtype
        from outrider.model.checkpoint_config import checkpoint_dtype
        from outrider.model.shapes import shape_file

        file = shape_file(self.shape)
        own = None if file is None else checkpoint_dtype(file.parent, file.name)
        chosen = choose_dtype(device.capabilities, own or torch.bfloat16)
        return replace(
            chosen, why=chosen.why.replace("the checkpoint", "the published checkpoint" if own is None else "the config")
        )
