"""Records of options that several commands share. :func:`with_options` expands a record into the options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from outrider.cli.options.models import (
    DraftOption,
    DraftOutputHeadOption,
    DraftTokensOption,
    DraftTopkOption,
    DraftVocabularyOption,
    DtypeOption,
    ExactOption,
    KvDtypeOption,
    KvMemoryOption,
    MaxContextOption,
    MaxRequestsOption,
    ModelOption,
    PageSizeOption,
    QuantizedOption,
    QuantizeOption,
    Running,
    Sizes,
    SpeculateOption,
    Speculation,
    TransformersOption,
    TrustOption,
    check_draft,
    load,
)
from outrider.cli.options.option_values import BackendOption, UsageError, VerboseOption

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its draft, its device and its context length: the options of each command that runs a model."""

    model: ModelOption = None
    speculate: SpeculateOption = None
    backend: BackendOption = None
    draft: DraftOption = None
    draft_tokens: DraftTokensOption = 4
    draft_topk: DraftTopkOption = 1
    quantized: QuantizedOption = "kernels"
    quantize: QuantizeOption = None
    dtype: DtypeOption = None
    kv_dtype: KvDtypeOption = "auto"
    max_context: MaxContextOption = None
    exact: ExactOption = False
    through_transformers: TransformersOption = False
    trust_remote_code: TrustOption = False
    verbose: VerboseOption = False

    def __post_init__(self) -> None:
        check_draft(self.speculate, self.draft)
        if self.trust_remote_code and not self.through_transformers:
            raise UsageError("--trust-remote-code goes with --through-transformers; add it, or leave both out")
        if self.quantize is not None and self.through_transformers:
            raise UsageError("--quantize has no effect on the code of transformers; leave --through-transformers out")

    def speculation(self) -> Speculation:
        """Return the checkpoints and the proposer. Raises :class:`CheckpointError` for a checkpoint that can't be found."""
        return Speculation.with_defaults(self.speculate, **self._checkpoint_options())

    def _checkpoint_options(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "draft": self.draft,
            "draft_tokens": self.draft_tokens,
            "draft_topk": self.draft_topk,
            "through_transformers": self.through_transformers,
            "trust_remote_code": self.trust_remote_code,
            "quantized": self.quantized,
            "quantize": self.quantize,
        }

    def sizes(self) -> Sizes:
        """Return the sizes of the engine that these options give, for :func:`~outrider.cli.options.models.load`."""
        return Sizes(max_context=self.max_context, kv_dtype=None if self.kv_dtype == "auto" else self.kv_dtype)

    def loader(self, speculation: Speculation, **overrides: Any) -> Callable[..., Engine]:
        """Return :func:`~outrider.cli.options.models.load` bound to these options; ``overrides`` replace them."""
        given: dict[str, Any] = {"dtype": self.dtype, "sizes": self.sizes(), "verbose": self.verbose}
        given["running"] = Running(batch_invariant=self.exact)
        return partial(load, self.backend, speculation, **given | overrides)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ModelOptions):
    """The options of :class:`ModelOptions`, the sizes of a server's KV cache and batch, and how its drafts are selected."""

    kv_memory: KvMemoryOption = None
    page_size: PageSizeOption = None
    max_requests: MaxRequestsOption = None
    draft_output_head: DraftOutputHeadOption = None
    draft_vocabulary: DraftVocabularyOption = None

    def _checkpoint_options(self) -> dict[str, Any]:
        own = {"draft_output_head": self.draft_output_head, "draft_vocabulary": self.draft_vocabulary}
        return super()._checkpoint_options() | own

    def sizes(self) -> Sizes:
        """Return the sizes of the server's engine that these options give, for :func:`~outrider.cli.options.models.load`."""
        return replace(super().sizes(), kv_memory=self.kv_memory, page_size=self.page_size, max_requests=self.max_requests)


def with_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a command so that typer sees the options of each parameter that is annotated as a record of options.

    The decorated function takes every option by keyword, as typer calls it, and passes the records to ``command``. Raises
    :class:`TypeError` if two records share an option.
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
