"""Options that several commands share, as records: declared once, and expanded into each command that takes a record."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from outrider.cli.models import (
    DoorOption,
    DraftLengthOption,
    DraftNodesOption,
    DraftOption,
    DraftOutputHeadOption,
    DraftTokensOption,
    DraftTopkOption,
    DraftVocabularyOption,
    DtypeOption,
    GraphsOption,
    KvDtypeOption,
    KvMemoryOption,
    MaxContextOption,
    MaxRequestsOption,
    ModelOption,
    ModeOption,
    OverlapOption,
    PageSizeOption,
    PrefillChunkOption,
    QuantizedOption,
    Running,
    Sizes,
    SpeculateOption,
    Speculation,
    TrustOption,
    TuneOption,
    load,
)
from outrider.cli.report import BackendOption

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How an engine's iterations are launched, and how large it is."""

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
        """How iterations are launched."""
        return Running(mode=self.mode, graphs=self.graphs, overlap=self.overlap)

    def sizes(self) -> Sizes:
        """Sizes of the engine."""
        return Sizes(
            max_context=self.max_context,
            kv_memory=self.kv_memory,
            kv_dtype=None if self.kv_dtype == "auto" else self.kv_dtype,
            page_size=self.page_size,
            max_requests=self.max_requests,
            prefill_chunk=self.prefill_chunk,
        )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(LaunchOptions):
    """Which model runs where, what drafts for it, how its iterations are launched, and how large the engine is."""

    model: ModelOption = None
    draft: DraftOption = None
    backend: BackendOption = None
    speculate: SpeculateOption = None
    draft_tokens: DraftTokensOption = 4
    draft_topk: DraftTopkOption = 1
    draft_nodes: DraftNodesOption = None
    draft_output_head: DraftOutputHeadOption = None
    draft_vocabulary: DraftVocabularyOption = None
    quantized: QuantizedOption = "kernels"
    tune_seconds: TuneOption = 0.0

    def speculation(self) -> Speculation:
        """The checkpoints and the proposer. Raises :class:`CheckpointError` where one can't be found."""
        return Speculation.choose(
            self.speculate,
            model=self.model,
            draft=self.draft,
            draft_tokens=self.draft_tokens,
            draft_topk=self.draft_topk,
            draft_nodes=self.draft_nodes,
            quantized=self.quantized,
            draft_output_head=self.draft_output_head,
            draft_vocabulary=self.draft_vocabulary,
        )

    def loader(self, speculation: Speculation, **others: Any) -> Callable[..., Engine]:
        """:func:`~outrider.cli.models.load` with these options; ``others`` and what it's called with go before them."""
        given: dict[str, Any] = {
            "dtype": self.dtype,
            "running": self.running(),
            "sizes": self.sizes(),
            "tune_seconds": self.tune_seconds,
        }
        return partial(load, self.backend, speculation, **given | others)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(EngineOptions):
    """Those of an engine that decodes."""

    draft_length: DraftLengthOption = None

    def running(self) -> Running:
        """How iterations are launched."""
        return replace(super().running(), draft_length=self.draft_length)


@dataclass(frozen=True, kw_only=True)
class AnyModelOptions(DecodeOptions):
    """Those of an engine that also runs models through transformers."""

    through_transformers: DoorOption = False
    trust_remote_code: TrustOption = False

    def speculation(self) -> Speculation:
        """The checkpoints and the proposer, and whether the model runs through transformers."""
        return replace(
            super().speculation(),
            through_transformers=self.through_transformers,
            trust_remote_code=self.trust_remote_code,
        )


def with_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """A command in which each parameter that is annotated as a record of options is those options.

    What is called must give every option by name, as typer does; the command gets the records.
    """
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    records: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        annotation = hints[name]
        if isinstance(annotation, type) and is_dataclass(annotation):
            inner, each = get_type_hints(annotation, include_extras=True), fields(annotation)
            parameters += [_option(field.name, field.default, inner[field.name]) for field in each]
            records[name] = annotation, tuple(field.name for field in each)
        else:
            parameters.append(_option(name, parameter.default, annotation))
    twice = len(parameters) - len({parameter.name for parameter in parameters})
    if twice:
        raise TypeError(f"{command.__name__} has {twice} options that two of its records share, expected each one once")

    @wraps(command)
    def call(**given: Any) -> Result:
        made = {name: record(**{each: given.pop(each) for each in names}) for name, (record, names) in records.items()}
        return command(**given, **made)

    del call.__wrapped__  # its signature would be taken for this one
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _option(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    value = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=annotation)
