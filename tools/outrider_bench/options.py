"""Options that the benchmarks share: each command states a model, a batch and an acceptance in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.models import (
    DraftOption,
    DraftOutputHeadOption,
    DraftTokensOption,
    DraftTopkOption,
    DraftVocabularyOption,
    DtypeOption,
    KvDtypeOption,
    KvMemoryOption,
    MaxContextOption,
    MaxRequestsOption,
    ModelOption,
    PageSizeOption,
    Running,
    Sizes,
    SpeculateOption,
    Speculation,
    TransformersOption,
    launched,
    load,
)
from outrider.cli.report import BackendOption
from outrider.device.errors import ConfigError
from outrider_bench.mixed_load import MixedLoad
from outrider_bench.random_model import DRAFT_LAYERS, RandomModel

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.cli.rank_processes import Joined
    from outrider.engine.config import Choice
    from outrider.engine.engine import Engine
    from outrider.model import ModelConfig

_FORMATS = "fp8, fp8-tensor, fp8-block, int8, int4, int4-zeros, int4-32"

DraftLengthOption = Annotated[
    str | None,
    typer.Option(
        "--draft-length",
        metavar="fixed|load",
        help="Draft K tokens in every iteration (fixed), or as many as make the batch fastest (load). "
        "Default: load where graphs are replayed concurrently with the host.",
    ),
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="staged|fused",
        help="Stages on their own streams, or the whole iteration in one graph. Default: fused where the backend has it.",
    ),
]
GraphsOption = Annotated[
    bool | None,
    typer.Option(
        "--graphs/--no-graphs",
        help="In staged mode too, replay each stage from a graph. Default: where the device captures graphs.",
    ),
]
OverlapOption = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="Launch an iteration before the previous one's results are read. Default: where the device is asynchronous.",
    ),
]
PrefillChunkOption = Annotated[
    int | None,
    typer.Option("--prefill-chunk", metavar="N", help="Prompt tokens of an iteration. Default: by the device's memory."),
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--shape", metavar="NAME|config.json", help="Random weights of this shape instead of a checkpoint: llama-3.1-8b."
    ),
]
RequiredShapeOption = Annotated[
    str, typer.Option("--shape", metavar="NAME|config.json", help="Random weights of this shape.")
]
AcceptLengthOption = Annotated[
    float | None,
    typer.Option(
        "--accept-length",
        metavar="A",
        help="With random weights, synthetic acceptance: mean number of tokens that an iteration yields.",
    ),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option("--quantize", metavar="FORMAT", help=f"Format of random weights of layers, also the draft's: {_FORMATS}."),
]
LmHeadOption = Annotated[bool, typer.Option("--lm-head", help="With --quantize, quantise the output head too.")]
DraftQuantizeOption = Annotated[
    str | None,
    typer.Option(
        "--draft-quantize",
        metavar="FORMAT",
        help="Format of the random weights of the draft's layers alone; the formats of --quantize.",
    ),
]
BatchOption = Annotated[str, typer.Option("--batch", metavar="1,8,32", help="Batch sizes, separated by commas.")]
PromptLengthsOption = Annotated[
    str, typer.Option("--prompt-tokens", metavar="512,4096", help="Prompt lengths in tokens, separated by commas.")
]
PromptTokensOption = Annotated[int, typer.Option("--prompt-tokens", min=1, metavar="N", help="Tokens of each prompt.")]
NewTokensOption = Annotated[int, typer.Option("--new-tokens", metavar="N", help="New tokens of each request.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="F.svg", help="Write a plot of the results.")]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the engine of a benchmark launches its iterations, and how large the engine is."""

    dtype: DtypeOption = None
    mode: ModeOption = None
    graphs: GraphsOption = None
    overlap: OverlapOption = None
    max_context: MaxContextOption = None
    kv_memory: KvMemoryOption = None
    kv_dtype: KvDtypeOption = "auto"
    page_size: PageSizeOption = None
    max_requests: MaxRequestsOption = None
    prefill_chunk: PrefillChunkOption = None

    def running(self) -> Running:
        """Return the launch settings for :func:`~outrider.cli.models.load`."""
        return Running(mode=self.mode, graphs=self.graphs, overlap=self.overlap)

    def sizes(self) -> Sizes:
        """Return the engine sizes for :func:`~outrider.cli.models.load`."""
        return Sizes(
            max_context=self.max_context,
            kv_memory=self.kv_memory,
            kv_dtype=None if self.kv_dtype == "auto" else self.kv_dtype,
            page_size=self.page_size,
            max_requests=self.max_requests,
            prefill_chunk=self.prefill_chunk,
        )


@dataclass(frozen=True, kw_only=True)
class RandomDraftOptions:
    """Random weights, their number of draft tokens, their acceptance, and the device."""

    shape: ShapeOption = None
    draft_tokens: DraftTokensOption = 4
    accept_length: AcceptLengthOption = None
    backend: BackendOption = None


@dataclass(frozen=True, kw_only=True)
class RandomWeightOptions(RandomDraftOptions):
    """Random weights and their formats."""

    quantize: QuantizeOption = None
    lm_head: LmHeadOption = False
    draft_output_head: DraftOutputHeadOption = None
    draft_vocabulary: DraftVocabularyOption = None
    draft_quantize: DraftQuantizeOption = None

    def check_formats(self) -> None:
        """Raise :class:`ConfigError` for an unknown format, and for formats of weights that aren't random."""
        from outrider_tune.quantized import random_format

        if self.lm_head and self.quantize is None:
            raise ConfigError("--lm-head says what --quantize takes too; leave it out, or name a format with --quantize")
        if self.quantize is not None and self.shape is None:
            raise ConfigError(
                "--quantize makes random weights and goes with --shape alone: a checkpoint is quantised or it isn't"
            )
        if self.accept_length is not None and self.shape is None:
            raise ConfigError(
                "--accept-length is synthetic and goes with --shape alone: a real model accepts what it accepts"
            )
        if self.draft_quantize is None:
            return
        random_format(self.draft_quantize)
        if self.quantize is not None:
            raise ConfigError("--quantize takes the draft's layers too; leave --draft-quantize out")
        if self.shape is None:
            raise ConfigError(
                "--draft-quantize makes random weights and goes with --shape alone: write a real draft's with outrider "
                "quantize, and give its directory with --draft"
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
        typer.Option(
            "--draft-layers",
            min=1,
            metavar="N",
            help="With --shape and --speculate dflash: layers of the drafter. Default: 5.",
        ),
    ] = None
    through_transformers: TransformersOption = False

    def running(self) -> Running:
        """Return the launch settings, with the draft length."""
        return replace(super().running(), draft_length=self.draft_length)

    def build_engine(
        self,
        *,
        requests: int,
        requests_origin: str,
        context: int,
        say: bool,
        joined: Joined | None = None,
    ) -> tuple[Engine, Mapping[str, object]]:
        """Return an engine for ``requests`` of ``context`` tokens, and its description for a report.

        ``--max-requests`` and ``--max-context`` replace these sizes. ``requests_origin`` names the option that ``requests``
        comes from. ``say``: print the settings that the engine chose. The engine keeps no prefixes, so each prompt is
        computed. Raises :class:`ConfigError` for options that don't go together.
        """
        from outrider.engine.config import Choice

        self.check_formats()
        if self.draft_layers is not None and (self.shape is None or self.speculate != "dflash"):
            raise ConfigError(
                "--draft-layers is the size of a random block drafter: it goes with --shape and --speculate dflash"
            )
        needed = context + 2 * (self.draft_tokens + 1)
        own = [] if self.max_requests else [Choice("max_requests", requests, requests_origin)]
        load_engine = self._from_checkpoint if self.shape is None else partial(self._from_shape, self.shape)
        engine, described = load_engine(requests, needed, own, say, joined)
        return engine, {
            "backend": engine.backend.name,
            "device": str(engine.backend.device),
            "versions": dict(engine.backend.versions()),
            "kernels": engine.model.kernels.name,
            **described,
            "draft_tokens": engine.proposer.depth,
            **launched(engine, own),
            "prefill_chunk": engine.config.prefill_chunk,
            "max_requests": engine.config.max_requests,
            "max_context": engine.max_context,
        }

    def _from_checkpoint(
        self, requests: int, context: int, own: list[Choice], say: bool, joined: Joined | None
    ) -> tuple[Engine, Mapping[str, object]]:
        from outrider.model import ModelConfig

        speculation = Speculation.with_defaults(
            self.speculate,
            model=self.model,
            draft=self.draft,
            draft_tokens=self.draft_tokens,
            draft_topk=self.draft_topk,
            draft_output_head=self.draft_output_head,
            draft_vocabulary=self.draft_vocabulary,
            through_transformers=self.through_transformers,
        )
        sizes = self.sizes()
        if not sizes.max_context and not self.through_transformers:
            # A request that is longer than the model's own context is refused by `check_context`, which names options.
            sizes = replace(sizes, max_context=min(context, ModelConfig.from_checkpoint(speculation.model).max_context))
        engine = load(
            self.backend,
            speculation,
            max_requests=requests,
            dtype=self.dtype,
            running=self.running(),
            sizes=sizes,
            say=say,
            command_choices=own,
            joined=joined,
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
        say: bool,
        joined: Joined | None,
    ) -> tuple[Engine, Mapping[str, object]]:
        from outrider.model.shapes import shape_config

        unwanted = {"--model": self.model, "--draft": self.draft, "--through-transformers": self.through_transformers}
        for option, value in unwanted.items():
            if value:
                raise ConfigError(f"{option} doesn't go with --shape, which has random weights of its own")
        if self.draft_topk != 1:
            raise ConfigError("--shape drafts chains alone; leave out --draft-topk")
        random = RandomModel(
            shape=shape,
            speculate=self.speculate or "eagle",
            draft_tokens=self.draft_tokens,
            accept_length=self.accept_length,
            quantize=self.quantize,
            quantize_head=self.lm_head,
            draft_output_head=self.draft_output_head,
            draft_vocabulary=self.draft_vocabulary,
            draft_quantize=self.draft_quantize,
            draft_layers=self.draft_layers or DRAFT_LAYERS,
        )
        engine = random.load_engine(
            self.backend,
            running=self.running(),
            max_requests=requests,
            dtype=self.dtype,
            max_context=min(context, shape_config(shape).max_context),
            sizes=self.sizes(),
            say=say,
            other_choices=own,
            joined=joined,
        )
        return engine, random.description


@dataclass(frozen=True, kw_only=True)
class MixedLoadOptions:
    """A load of requests of random lengths."""

    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Requests of the mixed load, all at once.")] = 256
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the lengths of the mixed load.")] = 7
    prompts: Annotated[str, typer.Option(metavar="A-B", help="Prompt lengths of the mixed load in tokens, uniform.")] = (
        "32-1036"
    )
    outputs: Annotated[str, typer.Option(metavar="A-B", help="Output lengths of the mixed load in tokens, uniform.")] = (
        "16-400"
    )

    def load(self) -> MixedLoad:
        """Return the load. Raises :class:`ConfigError` for a range that can't be read."""
        return MixedLoad(
            requests=self.requests,
            seed=self.seed,
            prompts=parse_range(self.prompts, "--prompts"),
            outputs=parse_range(self.outputs, "--outputs"),
        )


def print_acceptance(console: Console, data: Mapping[str, object]) -> None:
    """Print a warning if the acceptance of a report is not that of a real model."""
    if data["acceptance"] != "real":
        console.print(
            f"ACCEPTANCE IS {str(data['acceptance']).upper()}: tokens/s are those of this acceptance, the text is nonsense"
        )


def parse_sizes(text: str, option: str = "--batch", example: str = "1,4") -> list[int]:
    """Return the positive whole numbers of ``text``, which commas separate. Raises :class:`ConfigError`."""
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} is {text!r}; expected whole numbers of at least 1, by commas, such as {example}")
    return [int(part) for part in parts]


def parse_names(text: str, option: str, known: Sequence[str]) -> list[str]:
    """Return the names of ``text``, which commas separate, each known and there once. Raises :class:`ConfigError`."""
    names = [name.strip() for name in text.split(",")]
    if set(names) - set(known) or len(set(names)) != len(names):
        raise ConfigError(f"{option} is {','.join(names)!r}; expected some of {', '.join(known)}, each once")
    return names


def parse_range(text: str, option: str) -> tuple[int, int]:
    """Return the two numbers of a range such as ``32-1036``. Raises :class:`ConfigError`."""
    least, dash, most = text.partition("-")
    if not dash or not all(each.isascii() and each.isdigit() for each in (least, most)) or not 1 <= int(least) <= int(most):
        raise ConfigError(f"{option} is {text!r}; expected the least and the most tokens, such as 32-1036")
    return int(least), int(most)


def check_new_tokens(new_tokens: int, least: int = 1) -> None:
    """Raise :class:`ConfigError` for fewer new tokens than a measurement needs."""
    if new_tokens < least:
        raise ConfigError(f"--new-tokens is {new_tokens}; expected at least {least}")


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
