"""Options that the benchmarks share: each command states a model, a batch and an acceptance in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.options.models import (
    DraftOption,
    DraftTokensOption,
    DraftTopkOption,
    DraftVocabularyOption,
    DraftWeightsOption,
    DtypeOption,
    ExactOption,
    KvDtypeOption,
    KvMemoryOption,
    MaxContextOption,
    MaxRequestsOption,
    ModelOption,
    PageSizeOption,
    SpeculateOption,
    Speculation,
    TransformersOption,
    check_draft,
    given_settings,
    launched,
    load,
)
from outrider.cli.options.option_values import (
    SHAPE,
    WEIGHT_FORMATS,
    BackendOption,
    UsageError,
    Value,
    VerboseOption,
    closest,
    one_of,
    option,
    output_file,
    parsed,
    whole,
)
from outrider.device.errors import ConfigError
from outrider_bench.acceptance import check_acceptance
from outrider_bench.load import LENGTHS, MixedLoad
from outrider_bench.random_model import DRAFT_LAYERS, RandomModel

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.cli.options.rank_processes import JoinRanks
    from outrider.engine.config import Choice
    from outrider.engine.engine import Engine
    from outrider.model import ModelConfig


def some_of(*names: str) -> Value:
    """Return the kind of value that accepts some of ``names``, separated by commas."""
    return parsed(",".join(names), lambda given: parse_names(given, names))


def parse_names(given: str, known: Sequence[str]) -> list[str]:
    """Return the names in ``given``, which commas separate. Raises :class:`ConfigError` unless each is in ``known`` and
    appears once.
    """
    names = [name.strip() for name in given.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) != len(names):
        suggestion = closest(unknown[0], known) if unknown else ""
        raise ConfigError(f"expected some of {', '.join(known)}, each once, with commas between them{suggestion}")
    return names


def parse_sizes(given: str) -> list[int]:
    """Return the positive whole numbers in ``given``, which commas separate. Raises :class:`ConfigError` for other text."""
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) > 0 for part in parts):
        raise ConfigError("expected whole numbers of at least 1, with commas between them, such as 1,32")
    return [int(part) for part in parts]


def parse_range(given: str) -> tuple[int, int]:
    """Return the two numbers of a range such as ``32-1036``. Raises :class:`ConfigError` for other text."""
    least, dash, most = given.partition("-")
    if not dash or not all(each.isascii() and each.isdigit() for each in (least, most)) or not 1 <= int(least) <= int(most):
        raise ConfigError("expected the least and the most tokens, such as 32-1036")
    return int(least), int(most)


def parse_prompt_batches(given: str) -> list[tuple[int, int]]:
    """Return the batches of prompts in ``given``, such as ``16x4096``: their numbers of prompts and of tokens of each.
    Raises :class:`ConfigError` for other text.
    """
    sizes = [part.split("x") for part in given.split(",")]
    try:
        return [(requests, tokens) for requests, tokens in (parse_sizes(",".join(pair)) for pair in sizes)]
    except (ConfigError, ValueError):
        raise ConfigError("expected numbers of prompts and of their tokens, such as 16x4096, commas between them") from None


SIZES = parsed("N,N,…", parse_sizes)
PROMPT_BATCHES = parsed("NxT,NxT,…", parse_prompt_batches)
_RANGE = parsed("A-B", parse_range)

DraftLengthOption = Annotated[
    str | None,
    option(
        "--draft-length",
        value=one_of("fixed", "load", "request"),
        help="Draft K tokens in every iteration (fixed), or as many as make the batch fastest (load), also for each request "
        "by its own acceptance (request). "
        "Default: load where graphs are replayed concurrently with the host.",
    ),
]
ModeOption = Annotated[
    str | None,
    option(
        "--mode",
        value=one_of("staged", "fused"),
        help="Stages on their own streams, or the whole iteration in one graph. Default: fused where the backend has it.",
    ),
]
GraphsOption = Annotated[
    bool | None,
    option(
        "--graphs/--no-graphs",
        help="In staged mode too, replay each stage from a graph. Default: where the device captures graphs.",
    ),
]
OverlapOption = Annotated[
    bool | None,
    option(
        "--overlap/--no-overlap",
        help="Launch an iteration before the previous one's results are read. Default: where the device is asynchronous.",
    ),
]
PrefillChunkOption = Annotated[
    int | None,
    option("--prefill-chunk", value=whole(1, 2**20), help="Prompt tokens of an iteration. Default: by the device's memory."),
]
ShapeOption = Annotated[
    str | None,
    option("--shape", value=SHAPE, help="Random weights of this shape instead of a checkpoint: llama-3.1-8b."),
]
RequiredShapeOption = Annotated[str, option("--shape", value=SHAPE, help="Random weights of this shape.")]
ACCEPTANCE = parsed("X|HEAD:KIND,…", check_acceptance)
AcceptLengthOption = Annotated[
    str | None,
    option(
        "--accept-length",
        value=ACCEPTANCE,
        help="With random weights, synthetic acceptance: mean number of tokens that an iteration yields, or HEAD:KIND for "
        "the shares that a head reached on a kind of text, as smollm2_eagle3:chat. With commas, of requests in turn.",
    ),
]
QuantizeOption = Annotated[
    str | None,
    option("--quantize", value=one_of(*WEIGHT_FORMATS), help="Format of random weights of layers, also the draft's."),
]
LmHeadOption = Annotated[bool, option("--lm-head", help="With --quantize, quantise the output head too.")]
BatchOption = Annotated[str, option("--batch", value=SIZES, help="Batch sizes.")]
PromptLengthsOption = Annotated[str, option("--prompt-tokens", value=SIZES, help="Prompt lengths in tokens.")]
PromptTokensOption = Annotated[int, option("--prompt-tokens", value=whole(1), help="Tokens of each prompt.")]
NewTokensOption = Annotated[int, option("--new-tokens", value=whole(1), help="New tokens of each request.")]
TimedTokensOption = Annotated[int, option("--new-tokens", value=whole(2), help="New tokens of each request.")]
"""The option of a benchmark that measures the time between tokens: a single token has none."""
ProposerOption = Annotated[str, option("--speculate", value=one_of("eagle", "none"), help="Proposer.")]
PlotOption = Annotated[Path | None, option("--plot", value=output_file(".svg"), help="Write a plot of the results.")]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of a benchmark's engine: how iterations are launched, and the sizes of the engine."""

    dtype: DtypeOption = None
    mode: ModeOption = None
    graphs: GraphsOption = None
    overlap: OverlapOption = None
    exact: ExactOption = False
    max_context: MaxContextOption = None
    kv_memory: KvMemoryOption = None
    kv_dtype: KvDtypeOption = "auto"
    page_size: PageSizeOption = None
    max_requests: MaxRequestsOption = None
    prefill_chunk: PrefillChunkOption = None

    def settings(self) -> dict[str, Any]:
        """Return the settings of the engine that these options give, for :func:`~outrider.cli.options.models.load`."""
        own = {each.name: getattr(self, each.name) for each in fields(LaunchOptions) if each.name not in ("dtype", "exact")}
        return given_settings(batch_invariant=self.exact, **own)


@dataclass(frozen=True, kw_only=True)
class RandomWeightOptions:
    """Options of a model with random weights: shape, drafts, backend, and the formats of weights."""

    shape: ShapeOption = None
    draft_tokens: DraftTokensOption = 4
    accept_length: AcceptLengthOption = None
    backend: BackendOption = None
    quantize: QuantizeOption = None
    lm_head: LmHeadOption = False
    draft_weights: DraftWeightsOption = None
    draft_vocabulary: DraftVocabularyOption = None

    def __post_init__(self) -> None:
        if self.lm_head and self.quantize is None:
            raise UsageError("--lm-head says what --quantize takes too; leave it out, or name a format with --quantize")
        if self.quantize is not None and self.shape is None:
            raise UsageError(
                "--quantize makes random weights and goes with --shape alone: a checkpoint is quantised or it isn't"
            )
        if self.accept_length is not None and self.shape is None:
            raise UsageError("--accept-length is synthetic and goes with --shape alone: a real model accepts what it accepts")

    def random_model(self, shape: str, speculate: str, *, draft_layers: int = DRAFT_LAYERS) -> RandomModel:
        """Return the random weights that these options describe, with the proposer ``speculate``."""
        return RandomModel(
            shape=shape,
            speculate=speculate,
            draft_tokens=self.draft_tokens,
            accept_length=self.accept_length,
            quantize=self.quantize,
            quantize_head=self.lm_head,
            draft_weights=self.draft_weights,
            draft_vocabulary=self.draft_vocabulary,
            draft_layers=draft_layers,
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredEngineOptions(RandomWeightOptions, LaunchOptions):
    """The engine of a benchmark: a checkpoint or random weights, how iterations are launched, and sizes."""

    model: ModelOption = None
    draft: DraftOption = None
    speculate: SpeculateOption = None
    draft_topk: DraftTopkOption = 1
    draft_length: DraftLengthOption = None
    draft_layers: Annotated[
        int | None,
        option(
            "--draft-layers", value=whole(1), help="With --shape and --speculate dflash: layers of the drafter. Default: 5."
        ),
    ] = None
    through_transformers: TransformersOption = False
    verbose: VerboseOption = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_draft(self.speculate, self.draft)
        if self.draft_layers is not None and (self.shape is None or self.speculate != "dflash"):
            raise UsageError(
                "--draft-layers is the size of a random block drafter: it goes with --shape and --speculate dflash"
            )
        if self.shape is None:
            return
        unwanted = {"--model": self.model, "--draft": self.draft, "--through-transformers": self.through_transformers}
        for name, value in unwanted.items():
            if value:
                raise UsageError(f"{name} doesn't go with --shape, which has random weights of its own")
        if self.draft_topk != 1:
            raise UsageError("--shape drafts chains alone; leave out --draft-topk")

    def settings(self) -> dict[str, Any]:
        """Return the settings of the engine, with the draft length."""
        return super().settings() | given_settings(draft_length=self.draft_length)

    def build_engine(
        self,
        *,
        requests: int,
        requests_origin: str,
        context: int,
        join: JoinRanks | None = None,
    ) -> tuple[Engine, Mapping[str, object]]:
        """Return an engine for ``requests`` of ``context`` tokens, and its description for a report.

        ``--max-requests`` and ``--max-context`` replace these sizes. ``requests_origin`` names the option that ``requests``
        comes from. The engine keeps no prefixes, so each prompt is computed.
        """
        from outrider.engine.config import Choice

        needed = context + 2 * (self.draft_tokens + 1)
        own = [] if self.max_requests else [Choice("max_requests", requests, requests_origin)]
        load_engine = self._from_checkpoint if self.shape is None else partial(self._from_shape, self.shape)
        engine, described = load_engine(requests, needed, own, join)
        return engine, {
            "backend": engine.backend.name,
            "device": str(engine.backend.device),
            "versions": dict(engine.backend.versions()),
            "kernels": engine.model.kernels.name,
            "blocks": dict(block for blocks in engine.model.implementations()["blocks"] for block in blocks.items()),
            **described,
            "draft_tokens": engine.proposer.depth,
            **launched(engine, own),
            "prefill_chunk": engine.config.prefill_chunk,
            "max_requests": engine.config.max_requests,
            "max_context": engine.max_context,
        }

    def _from_checkpoint(
        self, requests: int, context: int, own: list[Choice], join: JoinRanks | None
    ) -> tuple[Engine, Mapping[str, object]]:
        from outrider.model.config.checkpoint_config import read_model_config

        speculation = Speculation.with_defaults(
            self.speculate,
            model=self.model,
            draft=self.draft,
            draft_tokens=self.draft_tokens,
            draft_topk=self.draft_topk,
            draft_weights=self.draft_weights,
            draft_vocabulary=self.draft_vocabulary,
            through_transformers=self.through_transformers,
        )
        settings = self.settings()
        if "max_context" not in settings and not self.through_transformers:
            # A request that is longer than the model's own context is refused by `check_context`, which names options.
            settings["max_context"] = min(context, read_model_config(speculation.model).max_context)
        engine = load(
            self.backend,
            speculation,
            max_requests=requests,
            dtype=self.dtype,
            settings=settings,
            verbose=self.verbose,
            command_choices=own,
            join=join,
            prefix_cache=False,
        )
        drafts = speculation.kind != "none"
        return engine, {
            "model": "bundled" if self.model is None else str(speculation.model),
            "draft": None if not drafts else "bundled" if self.draft is None else str(speculation.draft),
            "speculate": speculation.kind,
            "acceptance": "real",
        }

    def _from_shape(
        self,
        shape: str,
        requests: int,
        context: int,
        own: list[Choice],
        join: JoinRanks | None,
    ) -> tuple[Engine, Mapping[str, object]]:
        from outrider.model.config.shapes import shape_config

        random = self.random_model(shape, self.speculate or "eagle", draft_layers=self.draft_layers or DRAFT_LAYERS)
        engine = random.load_engine(
            self.backend,
            settings=self.settings(),
            max_requests=requests,
            dtype=self.dtype,
            max_context=min(context, shape_config(shape).max_context),
            verbose=self.verbose,
            other_choices=own,
            join=join,
        )
        return engine, random.description


@dataclass(frozen=True, kw_only=True)
class MixedLoadOptions:
    """A load of requests of random lengths."""

    requests: Annotated[int, option("--requests", value=whole(1), help="Requests of the load, all at once.")] = 256
    seed: Annotated[int, option("--seed", value=whole(0), help="Seed of the lengths.")] = 7
    prompts: Annotated[str, option("--prompts", value=_RANGE, help="Prompt lengths in tokens.")] = "32-1036"
    outputs: Annotated[str, option("--outputs", value=_RANGE, help="Output lengths in tokens.")] = "16-400"
    lengths: Annotated[
        str,
        option(
            "--lengths",
            value=one_of(*LENGTHS),
            help="Distribution of lengths in these ranges. Log-normal: medians of 350 and 160 tokens.",
        ),
    ] = "uniform"

    def load(self) -> MixedLoad:
        """Return the load with its ranges parsed."""
        return MixedLoad(
            requests=self.requests,
            seed=self.seed,
            prompts=parse_range(self.prompts),
            outputs=parse_range(self.outputs),
            distribution=self.lengths,
        )


def print_acceptance(console: Console, data: Mapping[str, object]) -> None:
    """Print a warning if the acceptance of a report is not that of a real model."""
    if data["acceptance"] != "real":
        console.print(
            f"ACCEPTANCE IS {str(data['acceptance']).upper()}: tokens/s are those of this acceptance, the text is nonsense"
        )


def check_context(engine: Engine, what: str, tokens: int) -> None:
    """Raise :class:`ConfigError` if a request of ``tokens``, which ``what`` names, exceeds the engine's context."""
    if tokens > engine.max_context:
        raise ConfigError(
            f"{what} don't fit in the context of {engine.max_context}: they are {tokens}; ask for fewer, or raise "
            "--max-context where the model has more"
        )


def check_lengths(config: ModelConfig, shape: str, *, prompt_tokens: int, new_tokens: int) -> None:
    """Raise :class:`ConfigError` if a request exceeds the context of the model of ``shape``, which has this config."""
    if prompt_tokens + new_tokens > config.max_context:
        raise ConfigError(
            f"--prompt-tokens {prompt_tokens} and --new-tokens {new_tokens} don't fit in the context of {shape}, which is "
            f"{config.max_context}; ask for fewer"
        )
