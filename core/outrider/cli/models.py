"""The options that say which model runs where, and the engine made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.environment import backend_from_environment, plugin_probe, tuned_directory
from outrider.cli.files import check_directory
from outrider.cli.starting import chosen, progress_shown, say_what_started, say_what_was_chosen
from outrider.device.errors import ConfigError
from outrider.device.scopes import uncollected
from outrider.registry import Registry
from outrider.speculative.names import DRAFTLESS, OWN_PROPOSERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.cli.rank_processes import Joined
    from outrider.cli.starting import Tell
    from outrider.device import Backend
    from outrider.engine.config import Choice
    from outrider.engine.engine import Engine
    from outrider.model import ModelConfig
    from outrider.model.tuning import Prepared

BUNDLED_HEADS = ("eagle", "dflash")
"""Proposers for which the bundled model has a head."""

ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="DIR|OWNER/NAME",
        help="A checkpoint as Hugging Face writes it, or its name on the Hub, also OWNER/NAME@REVISION; without a network "
        "out of the Hub's cache. Default: the bundled model.",
    ),
]
DraftOption = Annotated[
    Path | None,
    typer.Option(
        "--draft",
        metavar="DIR|OWNER/NAME",
        help="The draft's checkpoint, likewise: a head, or a model. Default: the bundled head of that kind.",
    ),
]
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="|".join(OWN_PROPOSERS),
        help="Proposer: one of these or an installed plugin's name. Default: eagle where there is a head, else none.",
    ),
]
DraftTopkOption = Annotated[
    int, typer.Option("--draft-topk", metavar="T", help="Children that a draft tree considers per node; 1: a chain.")
]
DraftNodesOption = Annotated[
    int | None, typer.Option("--draft-nodes", metavar="N", help="Total tokens of a draft tree. Default: K * T.")
]
DoorOption = Annotated[
    bool,
    typer.Option(
        "--through-transformers",
        help="Run the model by transformers' own code on the paged cache: any decoder, slower.",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="With --through-transformers: run Python code that the checkpoint brings, on this machine, with your rights. "
        "Only for a checkpoint whose code you have read.",
    ),
]
QuantizedOption = Annotated[
    str,
    typer.Option(
        "--quantized",
        metavar="kernels|reference|dequantize",
        help="Quantised weights: with the device's own kernels for their format, or also by the torch reference, which is "
        "slow, or as plain weights.",
    ),
]
DraftTokensOption = Annotated[int, typer.Option("--draft-tokens", metavar="K", help="Tokens drafted in an iteration.")]
DraftLengthOption = Annotated[
    str | None,
    typer.Option(
        "--draft-length",
        metavar="fixed|load",
        help="Draft K tokens in every iteration (fixed), or as many as make the batch fastest (load). "
        "Default: load where graphs are replayed concurrently with the host.",
    ),
]
DraftOutputHeadOption = Annotated[
    str | None,
    typer.Option(
        "--draft-output-head",
        metavar="fp8|int8|int4",
        help="Draw drafts with a copy of the target's output head in so few bits: tokens are the same, drafts take less "
        "time, and a few less may be accepted. Default: with the head itself.",
    ),
]
DraftVocabularyOption = Annotated[
    str | None,
    typer.Option(
        "--draft-vocabulary",
        metavar="N|FILE",
        help="Draw drafts from these tokens alone: the first N of the target's, or those that a file lists (.json, .pt, see "
        "outrider draft-vocabulary). Tokens are the same, drafts take less time. Default: from all.",
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
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Dtype of weights, activations, cache: float32, bfloat16, float16, … Default: the checkpoint's, where the "
        "device's kernels have it.",
    ),
]
MaxContextOption = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        metavar="N",
        help="Tokens of prompt and output together. Default: the model's, where the memory holds it.",
    ),
]
KvMemoryOption = Annotated[
    float | None,
    typer.Option(
        "--kv-memory",
        metavar="SHARE",
        help="What the KV cache takes of the memory that is free after the weights: above 0, at most 1. Default: what all "
        "requests need, at most nine tenths.",
    ),
]
PageSizeOption = Annotated[
    int | None,
    typer.Option("--page-size", metavar="N", help="Tokens of a KV page. Default: that of the device's own kernels."),
]
KvDtypeOption = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        metavar="FORMAT",
        help="What the KV cache holds: fp8 (eight bits, by the checkpoint's scales or 1), plain (the model's dtype), or "
        "auto: as the checkpoint says.",
    ),
]
MaxRequestsOption = Annotated[
    int | None,
    typer.Option(
        "--max-requests", metavar="N", help="Requests that run at the same time. Default: as many as the command makes."
    ),
]
PrefillChunkOption = Annotated[
    int | None,
    typer.Option("--prefill-chunk", metavar="N", help="Prompt tokens of an iteration. Default: by the device's memory."),
]

TuneOption = Annotated[
    float,
    typer.Option(
        "--tune-seconds",
        metavar="S",
        min=0.0,
        help="Measure kernels for this model for at most so long before it's loaded, and keep what was found for the next "
        "start. Default 0: take what is kept, measure nothing.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """How iterations are launched; the names are those of :class:`~outrider.engine.EngineConfig`. None: it's chosen."""

    mode: str | None = None
    graphs: bool | None = None
    overlap: bool | None = None
    draft_length: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of an engine, by the same names. None: it's chosen."""

    max_context: int | None = None
    kv_memory: float | None = None
    kv_dtype: str | None = None
    page_size: int | None = None
    max_requests: int | None = None
    prefill_chunk: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that aren't None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """A model, what drafts for it, and how."""

    kind: str
    model: Path
    draft: Path | None
    draft_tokens: int
    draft_topk: int = 1
    draft_nodes: int | None = None
    through_transformers: bool = False
    trust_remote_code: bool = False
    quantized: str = "kernels"
    draft_output_head: str | None = None
    draft_vocabulary: Path | int | None = None

    @classmethod
    def choose(
        cls,
        kind: str | None,
        *,
        model: Path | None,
        draft: Path | None,
        draft_tokens: int,
        draft_topk: int = 1,
        draft_nodes: int | None = None,
        through_transformers: bool = False,
        trust_remote_code: bool = False,
        quantized: str = "kernels",
        draft_output_head: str | None = None,
        draft_vocabulary: str | int | None = None,
    ) -> Speculation:
        """Fill in what wasn't given: the bundled model, its head of that kind, and speculation wherever there is a head."""
        head = "eagle" if kind is None else kind.removeprefix("suffix+")
        if draft is not None and kind in DRAFTLESS:
            raise ConfigError(f"--speculate {kind} needs no draft, and --draft names {draft}; leave one of them out")
        if draft is None and model is None and head in BUNDLED_HEADS:
            draft = bundled(head)
        from outrider.model.location import find_checkpoint

        return cls(
            kind=kind or ("none" if draft is None else "eagle"),
            model=bundled("target") if model is None else find_checkpoint(model, code=trust_remote_code),
            draft=None if draft is None else find_checkpoint(draft),
            draft_tokens=draft_tokens,
            draft_topk=draft_topk,
            draft_nodes=draft_nodes,
            through_transformers=through_transformers,
            trust_remote_code=trust_remote_code,
            quantized=quantized,
            draft_output_head=draft_output_head,
            draft_vocabulary=vocabulary_of(draft_vocabulary),
        )

    def without(self) -> Speculation:
        """The same model, decoding plainly."""
        return replace(self, kind="none", draft_topk=1, draft_nodes=None, draft_output_head=None, draft_vocabulary=None)


def vocabulary_of(given: str | int | None) -> Path | int | None:
    """What ``--draft-vocabulary`` names: a number of tokens, or a file."""
    if given is None or isinstance(given, int):
        return given
    return int(given) if given.isascii() and given.isdigit() else Path(given)


def bundled(part: str) -> Path:
    """Directory of the bundled model's ``target``, or of its head for one of :data:`BUNDLED_HEADS`."""
    return Path(str(resources.files("outrider").joinpath("bundled", part)))


def prepare_device(device: Backend, config: Callable[[], ModelConfig], tune_seconds: float, tell: Tell) -> Prepared:
    """What was tuned for on this machine, and for so many seconds more; progress as ``tell`` shows it."""
    from outrider.model.tuning import Prepared, prepare_kernels

    directory = tuned_directory()
    if tune_seconds:
        if directory is not None and device.kernels_in_use.tunes:
            check_directory("--tune-seconds keeps what is found: the cache", directory)
        return prepare_kernels(
            device,
            config(),
            directory=directory,
            seconds=tune_seconds,
            progress=lambda done, total, text: tell("tuning kernels", done, total),
        )
    return Prepared(taken=0 if directory is None else device.kernels_in_use.use_tuned(directory))


@uncollected()
def load(
    backend: str | None,
    speculation: Speculation,
    *,
    max_requests: int | None,
    dtype: str | None = None,
    running: Running | None = None,
    sizes: Sizes | None = None,
    tune_seconds: float = 0.0,
    say: bool = False,
    beside: Sequence[Choice] = (),
    joined: Joined | None = None,
    prefix_cache: bool = True,
) -> Engine:
    """Choose the backend and load the checkpoint onto it; progress goes to standard error, on a terminal alone.

    ``max_requests``: as many as the command makes, where ``sizes`` has no number of its own; None: the engine chooses.
    ``say``: tell people what was chosen, and ``beside`` it by the command. ``joined``: ranks that the engine runs on.
    ``prefix_cache``: False where prompts are timed, which an earlier one must not shorten.
    """
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.model import ModelConfig

    config = EngineConfig(
        draft_tokens=speculation.draft_tokens,
        draft_topk=speculation.draft_topk,
        draft_nodes=speculation.draft_nodes,
        dtype=dtype,
        prefix_cache=prefix_cache,
        **asdict(running or Running()),
        **{"max_requests": max_requests} | (sizes or Sizes()).given,
    )
    registry = Registry(probe=plugin_probe())
    if joined is None:
        device, ranks, leads = registry.create(registry.select(backend, backend_from_environment())), None, True
    else:
        device = joined.backend(registry, backend, backend_from_environment())
        ranks, leads = joined.join(device), joined.leads
    with progress_shown(leads) as tell:
        if not speculation.through_transformers:
            prepare_device(device, lambda: ModelConfig.from_checkpoint(speculation.model), tune_seconds, tell)
        engine = Engine.from_checkpoint(
            speculation.model,
            device,
            draft_dir=speculation.draft,
            speculate=speculation.kind,
            config=config,
            through_transformers=speculation.through_transformers,
            trust_remote_code=speculation.trust_remote_code,
            quantized=speculation.quantized,
            draft_output_head=speculation.draft_output_head,
            draft_vocabulary=speculation.draft_vocabulary,
            progress=lambda file, done, total: tell(f"loading {file}", done, total),
            capture_progress=lambda done, total: tell("capturing graphs", done, total),
            ranks=ranks,
        )
    if not leads:
        return engine
    if say:
        say_what_was_chosen(engine, beside)
    say_what_started(engine)
    return engine


def launched(engine: Engine, beside: Sequence[Choice] = ()) -> dict[str, object]:
    """How an engine launches its iterations, and what was chosen for it or ``beside`` it: keys of a report."""
    config = engine.config
    modes = {"mode": config.mode, "graphs": config.graphs, "overlap": config.overlap}
    return {"dtype": config.dtype, **modes, "chosen": chosen(engine, beside)}
