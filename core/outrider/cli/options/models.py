"""Options for the model, its draft and its device, and the function that loads an engine with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.bundled import BUNDLED_HEADS, SMOLLM2_HEADS, bundled
from outrider.cli.options.option_values import (
    CHECKPOINT,
    DRAFT_CHECKPOINT,
    DRAFT_VOCABULARY,
    DTYPES,
    KV_DTYPES,
    WEIGHT_FORMATS,
    UsageError,
    installed_plugin,
    number,
    one_of,
    option,
    whole,
)
from outrider.cli.options.rank_processes import open_rank
from outrider.cli.terminal.environment import tuned_directory
from outrider.cli.terminal.files import check_directory
from outrider.cli.terminal.report import note, show_progress, sum_of_loads
from outrider.cli.terminal.torch_probe import require_torch
from outrider.device.errors import ConfigError
from outrider.device.stream import uncollected
from outrider.errors import CheckpointError
from outrider.speculative.plugin import BUILTIN_PROPOSERS, DRAFTLESS, PROPOSERS_GROUP, STORED, SUFFIX_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.cli.options.rank_processes import JoinRanks
    from outrider.cli.terminal.report import Tell
    from outrider.device import Backend
    from outrider.engine.config import Choice
    from outrider.engine.engine import Engine
    from outrider.model import ModelConfig
    from outrider.model.layers.tuning import PreparedKernels


ModelOption = Annotated[
    Path | None,
    option(
        "--model",
        value=CHECKPOINT,
        help="A checkpoint in Hugging Face's format, or its name on the Hub, also OWNER/NAME@REVISION; without a network "
        "from the Hub's cache. Default: the bundled model.",
    ),
]
DraftOption = Annotated[
    Path | None,
    option(
        "--draft",
        value=DRAFT_CHECKPOINT,
        help="Checkpoint of the draft, a head or a model, named as for --model, or the name of a bundled head. Default: the "
        "bundled head of that kind.",
    ),
]
SpeculateOption = Annotated[
    str | None,
    option(
        "--speculate",
        value=installed_plugin(PROPOSERS_GROUP, *BUILTIN_PROPOSERS, prefix=SUFFIX_PREFIX),
        help=f"Proposer: {', '.join(BUILTIN_PROPOSERS)}, or an installed plugin's name. Default: eagle if there is a head, "
        "else none.",
    ),
]
DraftTopkOption = Annotated[
    int, option("--draft-topk", value=whole(1, 1024), help="Children that a draft tree considers per node; 1: a chain.")
]
TransformersOption = Annotated[
    bool,
    option(
        "--through-transformers", help="Run the model with the code of transformers on the paged cache: any decoder, slower."
    ),
]
TrustOption = Annotated[
    bool,
    option(
        "--trust-remote-code",
        help="With --through-transformers: run Python code of the checkpoint on this machine, with your rights. "
        "Only for a checkpoint whose code you have read.",
    ),
]
QuantizedOption = Annotated[
    str,
    option(
        "--quantized",
        value=one_of("kernels", "reference", "dequantize"),
        help="How to run quantised weights: kernels (error if the device has none for the format), reference (slow), "
        "dequantize (to the model's dtype).",
    ),
]
QuantizeOption = Annotated[
    str | None,
    option(
        "--quantize",
        value=one_of(*WEIGHT_FORMATS),
        help="Quantise the model's weights, also those of a GGUF file, in a copy in the cache: as outrider quantize does.",
    ),
]
DraftTokensOption = Annotated[
    int,
    option(
        "--draft-tokens",
        value=whole(1, 1024),
        help="Number of tokens that a draft chain has, or the longest path of a draft tree.",
    ),
]
DraftWeightsOption = Annotated[
    str | None,
    option(
        "--draft-weights",
        value=one_of(STORED, *WEIGHT_FORMATS),
        help="Format of the draft head's weights and of the output head that drafts are sampled with. Drafts take less time, "
        "and tokens are the same. Default: chosen by the engine; stored: as in the checkpoint.",
    ),
]
DraftVocabularyOption = Annotated[
    str | None,
    option(
        "--draft-vocabulary",
        value=DRAFT_VOCABULARY,
        help="Select drafts among the first N tokens of the vocabulary, or among the tokens that a file lists (.json, .pt, "
        "see outrider draft-vocabulary): drafts take less time, tokens are the same. Default: among all tokens.",
    ),
]
DtypeOption = Annotated[
    str | None,
    option(
        "--dtype",
        value=one_of(*DTYPES),
        help="Dtype of weights, activations and cache. Default: the checkpoint's, if the device's kernels have it.",
    ),
]
MaxContextOption = Annotated[
    int | None,
    option(
        "--max-context",
        value=whole(2),
        help="Maximum number of tokens of prompt and output together. Default: the model's, if the memory holds it.",
    ),
]
KvMemoryOption = Annotated[
    float | None,
    option(
        "--kv-memory",
        value=number(0, 1, above=True),
        help="Share of the memory that is free after the weights for the KV cache: above 0, at most 1. Default: enough "
        "for all requests, at most 0.9.",
    ),
]
PageSizeOption = Annotated[
    int | None,
    option("--page-size", value=whole(1, 65536), help="Tokens of a KV page. Default: the page size of the device's kernels."),
]
KvDtypeOption = Annotated[
    str,
    option(
        "--kv-dtype",
        value=one_of(*KV_DTYPES),
        help="Format of the KV cache: fp8 (with the checkpoint's scales, or 1), plain (the model's dtype), or auto (the "
        "checkpoint's format).",
    ),
]
MaxRequestsOption = Annotated[
    int | None,
    option(
        "--max-requests",
        value=whole(1, 4096),
        help="Maximum number of requests that run at the same time. Default: chosen by the device's memory.",
    ),
]
ExactOption = Annotated[
    bool,
    option(
        "--exact",
        help="Add up the sums of each token in one order: output is equal in every bit, with and without speculation on a "
        "chain, alone and in any batch.",
    ),
]


def given_settings(**settings: Any) -> dict[str, Any]:
    """Return the settings that aren't None, by name. The engine chooses the others."""
    return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """The checkpoints of model and draft that a command runs, and the proposer's name and options."""

    kind: str
    model: Path
    draft: Path | None
    draft_tokens: int
    draft_topk: int = 1
    through_transformers: bool = False
    trust_remote_code: bool = False
    quantized: str = "kernels"
    draft_weights: str | None = None
    draft_vocabulary: Path | int | None = None

    @classmethod
    def with_defaults(
        cls,
        kind: str | None,
        *,
        model: Path | None,
        draft: Path | None,
        draft_vocabulary: str | int | None = None,
        trust_remote_code: bool = False,
        quantize: str | None = None,
        **others: Any,
    ) -> Speculation:
        """Locate the checkpoints. Without ``model`` the model is the bundled one, with its head of that kind if it has one.

        A model with heads of multi-token prediction in its checkpoint drafts with them unless ``kind`` or a draft is given.
        ``quantize`` names the weight format of a copy that replaces the model.

        Raises :class:`ConfigError` for options that contradict each other and :class:`CheckpointError` for a checkpoint that
        can't be found.
        """
        if str(draft) in SMOLLM2_HEADS and not Path(str(draft)).exists():
            kind, draft = kind or SMOLLM2_HEADS[str(draft)], bundled(str(draft))
        head = "eagle" if kind is None else kind.removeprefix("suffix+")
        check_draft(kind, draft)
        if draft is None and model is None and head in BUNDLED_HEADS:
            draft = bundled(head)
        from outrider.model.checkpoint.location import find_checkpoint

        target = bundled("target") if model is None else find_checkpoint(model, code=trust_remote_code)
        if kind is None and draft is None:
            reads_heads = model is not None and not others.get("through_transformers")
            kind = "mtp" if reads_heads and has_mtp_heads(target) else "none"
        if quantize is not None:
            target = find_quantized_copy(target, quantize)
        return cls(
            kind=kind or "eagle",
            model=target,
            draft=None if draft is None else find_checkpoint(draft),
            trust_remote_code=trust_remote_code,
            draft_vocabulary=vocabulary_of(draft_vocabulary),
            **others,
        )

    def without(self) -> Speculation:
        """Return these options with the proposer ``none`` and no draft: the same model without speculation."""
        return replace(self, kind="none", draft_topk=1, draft_weights=None, draft_vocabulary=None)


def has_mtp_heads(model: Path) -> bool:
    """Return True if the checkpoint ``model`` has heads of multi-token prediction, and its config doesn't say 0 layers.

    Its loader reports unreadable files.
    """
    from outrider.model.checkpoint.files import GGUF_LIST, read_json
    from outrider.model.checkpoint.mapping import mtp_depth, mtp_format
    from outrider.model.checkpoint.opening import open_checkpoint

    if (model / GGUF_LIST).exists():
        return bool(read_json(model / "config.json").get("mtp_num_hidden_layers"))  # opening a GGUF file takes seconds
    try:
        depth = mtp_depth(read_json(model / "config.json"))
        return depth != 0 and mtp_format(open_checkpoint(model).tensors) is not None
    except CheckpointError:
        return False


def check_draft(kind: str | None, draft: Path | None) -> None:
    """Raise :class:`UsageError` for a draft of a proposer that needs none."""
    if draft is not None and kind in DRAFTLESS:
        raise UsageError(f"--speculate {kind} needs no draft, and --draft names {draft}; leave one of them out")


def vocabulary_of(given: str | int | None) -> Path | int | None:
    """Return the number of tokens or the file path that ``--draft-vocabulary`` gives; None without the option."""
    if given is None or isinstance(given, int):
        return given
    return int(given) if given.isascii() and given.isdigit() else Path(given)


def prepare_device(device: Backend, config: Callable[[], ModelConfig], tune_seconds: float, tell: Tell) -> PreparedKernels:
    """Load the kernel choices that were tuned on this machine, and tune for ``tune_seconds`` more.

    ``config`` is read only if kernels are tuned. ``tell`` shows the progress.
    """
    from outrider.model.layers.tuning import PreparedKernels, prepare_kernels

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
    return PreparedKernels(num_loaded=0 if directory is None else device.kernels_in_use.use_tuned(directory))


def _rarely_accepted(speculation: Speculation) -> bool:
    """Return True for chains that are looked up in text: of new text, few draft tokens are accepted."""
    return speculation.kind in ("ngram", "suffix") and speculation.draft_topk == 1


@uncollected()
def load(
    backend: str | None,
    speculation: Speculation,
    *,
    max_requests: int | None,
    dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
    verbose: bool = False,
    command_choices: Sequence[Choice] = (),
    join: JoinRanks | None = None,
    prefix_cache: bool = True,
) -> Engine:
    """Select the backend and load the checkpoint onto it. Progress is shown on standard error if that is a terminal.

    ``max_requests``: number of requests of the command; None: the engine chooses. ``settings``: fields of
    :class:`~outrider.engine.EngineConfig`, which replace this number.
    ``verbose``: say what the engine chose, compiled and captured, and the command's own ``command_choices``. ``join``
    opens ``backend`` and returns the ranks that the engine runs on, or None for one rank.
    ``prefix_cache``: False for a benchmark of prefill, in which an earlier prompt must not shorten a later one.
    """
    require_torch()  # a server's engine process hasn't imported it
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.model.config.checkpoint_config import read_model_config

    # The engine checks names that the user gave as strings.
    names: dict[str, Any] = {"quantized": speculation.quantized, "draft_weights": speculation.draft_weights}
    ranks, device, leads = open_rank(join, backend)
    given: dict[str, Any] = {"max_requests": max_requests, "dtype": dtype} | dict(settings or {})
    if max_requests == 1 and _rarely_accepted(speculation) and not given.get("batch_invariant"):
        # Where the host computes, each draft token takes time.
        given.setdefault("draft_length", None if device.capabilities.asynchronous else "load")
    config = EngineConfig(
        draft_tokens=speculation.draft_tokens,
        draft_topk=speculation.draft_topk,
        prefix_cache=prefix_cache,
        **given,
    )
    with show_progress(leads) as tell:
        if not speculation.through_transformers:
            prepare_device(device, lambda: read_model_config(speculation.model), 0.0, tell)
        engine = Engine.from_checkpoint(
            speculation.model,
            device,
            draft_dir=speculation.draft,
            speculate=speculation.kind,
            config=config,
            through_transformers=speculation.through_transformers,
            trust_remote_code=speculation.trust_remote_code,
            draft_vocabulary=speculation.draft_vocabulary,
            **names,
            progress=sum_of_loads(tell),
            capture_progress=lambda done, total: tell("capturing graphs", done, total),
            ranks=ranks,
        )
    if leads and verbose:
        print_engine(engine, command_choices)
    return engine


def launched(engine: Engine, command_choices: Sequence[Choice] = ()) -> dict[str, object]:
    """Return how the engine launches its iterations, and the choices of engine and command, as keys of a report."""
    config = engine.config
    modes = {"mode": config.mode, "graphs": config.graphs, "overlap": config.overlap}
    return {"dtype": config.dtype, **modes, "chosen": chosen(engine, command_choices)}


_COPY_FORMAT = 1
"""Version of the format of quantized copies; part of the name of a copy's cache entry."""
_MIB = 1 << 20


def find_quantized_copy(source: Path, weight_format: str) -> Path:
    """Return the copy of the checkpoint ``source`` with weights in ``weight_format``, and write it if there is none.

    A note says what was chosen and how many bytes the weights have. The copy is reused while the files of ``source`` are
    unchanged. Raises :class:`CheckpointError` for a checkpoint that is quantised already or can't be, and for a cache that
    can't be written.
    """
    from huggingface_hub import cached_assets_path

    from outrider.model.quantization.writing import fitting_group, quantize_checkpoint

    group = fitting_group(source, weight_format)
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(source.iterdir()) if file.is_file()]
    state = json.dumps([_COPY_FORMAT, weight_format, group, str(source.resolve()), files])
    shared = weight_format if group is None else f"{weight_format} with a scale for {group} columns"
    try:
        root = cached_assets_path(library_name="outrider", namespace="quantized")
        target = Path(root) / hashlib.sha256(state.encode()).hexdigest()[:32]
        try:
            with show_progress() as tell:
                written = quantize_checkpoint(
                    source,
                    target,
                    format=weight_format,
                    group=group,
                    progress=lambda key, done, total: tell("quantising", done, total),
                )
        except (OSError, ConfigError):  # the copy is there, or another process finished one meanwhile
            if not target.exists():
                raise
            note(f"outrider: weights in {shared}: the copy in {target}\n")
            return target
    except OSError as error:
        raise CheckpointError(
            f"{source}: its copy in {weight_format} can't be written into the cache: {error}; set HF_HOME to another one"
        ) from error
    before, after = written.bytes_before / _MIB, written.bytes_after / _MIB
    note(
        f"outrider: weights in {shared}, rounded without calibration, so answers differ a little: {after:.0f} MiB instead of "
        f"{before:.0f}; the copy in {target} is used again\n"
    )
    return target


def chosen(engine: Engine, command_choices: Sequence[Choice] = ()) -> list[dict[str, object]]:
    """Return the settings that the engine and the command chose, with the reasons, as JSON data."""
    return [asdict(choice) for choice in (*command_choices, *engine.chosen)]


def print_engine(engine: Engine, command_choices: Sequence[Choice] = ()) -> None:
    """Print what the engine and the command chose, compiled and captured on standard error, one line each."""
    found: list[object] = [*command_choices, *engine.chosen, engine.warm_up, engine.captured]
    if engine.captured_prefill is not None:
        found.append(f"of prompts, {engine.captured_prefill}")
    if engine.draft_length.costs:
        found.append(engine.draft_length)
    note("".join(f"outrider: {each}\n" for each in found if each is not None))
