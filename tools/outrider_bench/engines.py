"""The engine that a benchmark of whole requests runs on: random weights of a shape, or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.models import (
    DraftOption,
    DraftOutputHeadOption,
    DraftTokensOption,
    DraftVocabularyOption,
    ModelOption,
    Running,
    Sizes,
    SpeculateOption,
    Speculation,
    launched,
    load,
)
from outrider.cli.report import BackendOption
from outrider.device.errors import ConfigError
from outrider_bench.launch_options import LaunchOptions
from outrider_bench.random_model import RandomModel, check_acceptance, check_draft_quantize

if TYPE_CHECKING:
    from outrider.engine.engine import Engine


DraftQuantizeOption = Annotated[
    str | None,
    typer.Option(
        "--draft-quantize",
        metavar="FORMAT",
        help="With --shape, how the draft's layers alone are quantised: fp8, int8, int4 and so on, as --quantize has them.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class WorkOptions(LaunchOptions):
    """Which engine a benchmark of whole requests runs on."""

    model: ModelOption = None
    draft: DraftOption = None
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="NAME|config.json", help="Random weights of this shape instead of a checkpoint."),
    ] = None
    speculate: SpeculateOption = None
    draft_tokens: DraftTokensOption = 4
    draft_output_head: DraftOutputHeadOption = None
    draft_vocabulary: DraftVocabularyOption = None
    draft_quantize: DraftQuantizeOption = None
    backend: BackendOption = None

    def asked(self, *, requests: int, context: int, accept_length: float | None = None) -> Asked:
        """What was asked, for so many requests of ``context`` tokens and what is drafted beyond them."""
        return Asked(
            backend=self.backend,
            shape=self.shape,
            model=self.model,
            draft=self.draft,
            speculate=self.speculate,
            draft_tokens=self.draft_tokens,
            draft_output_head=self.draft_output_head,
            draft_vocabulary=self.draft_vocabulary,
            draft_quantize=self.draft_quantize,
            accept_length=accept_length,
            dtype=self.dtype,
            running=self.running(),
            sizes=self.sizes(),
            requests=requests,
            context=context + 2 * (self.draft_tokens + 1),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What was asked of a command: a shape, or a model and its draft (both None: the bundled ones), and how to run it.

    ``requests`` of ``context`` tokens at most: what the command itself makes, where ``sizes`` says nothing else.
    """

    backend: str | None
    shape: str | None
    model: Path | None
    draft: Path | None
    speculate: str | None
    draft_tokens: int
    draft_output_head: str | None
    draft_vocabulary: str | None
    draft_quantize: str | None
    accept_length: float | None
    dtype: str | None
    running: Running
    sizes: Sizes
    requests: int
    context: int

    def made(self, *, say: bool) -> tuple[Engine, Mapping[str, object]]:
        """The engine, and what a report says about it. Raises :class:`ConfigError` for options that don't go together."""
        from outrider.model import ModelConfig
        from outrider.model.shapes import shape_config

        check_acceptance(self.accept_length, self.shape)
        check_draft_quantize(self.draft_quantize, self.shape)
        requests = self.sizes.max_requests or self.requests
        if self.shape is None:
            speculation = Speculation.choose(
                self.speculate,
                model=self.model,
                draft=self.draft,
                draft_tokens=self.draft_tokens,
                draft_output_head=self.draft_output_head,
                draft_vocabulary=self.draft_vocabulary,
            )
            # What is longer than the model's own context is said of what was asked for, by `check_room`.
            context = min(self.context, ModelConfig.from_checkpoint(speculation.model).max_context)
            sizes = self.sizes if self.sizes.max_context else replace(self.sizes, max_context=context)
            engine = load(
                self.backend,
                speculation,
                max_requests=requests,
                dtype=self.dtype,
                running=self.running,
                sizes=sizes,
                say=say,
                prefix_cache=False,  # as with random weights: each prompt is computed
            )
            named: dict[str, object] = {
                "model": "bundled" if self.model is None else str(self.model),
                "speculate": speculation.kind,
                "acceptance": "real",
            }
        else:
            if self.model is not None or self.draft is not None:
                raise ConfigError("--shape has random weights of its own; leave out --model and --draft")
            random = RandomModel(
                shape=self.shape,
                speculate=self.speculate or "eagle",
                draft_tokens=self.draft_tokens,
                draft_output_head=self.draft_output_head,
                draft_vocabulary=self.draft_vocabulary,
                draft_quantize=self.draft_quantize,
                accept_length=self.accept_length,
            )
            engine = random.load(
                self.backend,
                running=self.running,
                max_requests=requests,
                dtype=self.dtype,
                max_context=min(self.context, shape_config(self.shape).max_context),
                sizes=self.sizes,
                say=say,
            )
            named = dict(random.described)
        return engine, {
            "backend": engine.backend.name,
            "device": str(engine.backend.device),
            "versions": dict(engine.backend.versions()),
            "kernels": engine.model.kernels.name,
            **named,
            "draft_tokens": engine.proposer.depth,
            **launched(engine),
            "prefill_chunk": engine.config.prefill_chunk,
            "max_requests": engine.config.max_requests,
            "max_context": engine.max_context,
        }


def check_room(engine: Engine, what: str, tokens: int) -> None:
    """Raise :class:`ConfigError` where a request of ``tokens``, which is ``what``, is longer than the context."""
    if tokens > engine.max_context:
        raise ConfigError(
            f"{what} don't fit in the context of {engine.max_context}: they are {tokens}; ask for fewer, or raise "
            "--max-context where the model has more"
        )
