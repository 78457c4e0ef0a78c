"""The options that say which model runs where, and the engine that they mean."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli.environment import backend_from_environment
from outrider.device.errors import ConfigError
from outrider.registry import Registry

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

ModelOption = Annotated[
    Path | None,
    typer.Option("--model", metavar="DIR", help="A checkpoint as Hugging Face writes it. Default: the bundled model."),
]
DraftOption = Annotated[
    Path | None, typer.Option("--draft", metavar="DIR", help="An EAGLE head for the model. Default: the bundled model's own.")
]
SpeculateOption = Annotated[
    str | None, typer.Option("--speculate", metavar="eagle|none", help="Default: eagle where there is a head, else none.")
]
DraftTokensOption = Annotated[int, typer.Option("--draft-tokens", metavar="K", help="Tokens drafted in an iteration.")]
DtypeOption = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="Of weights, activations and cache: float32, bfloat16, float16, …")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """A model, the head that drafts for it, and how."""

    kind: str
    model: Path
    draft: Path | None
    draft_tokens: int

    @classmethod
    def choose(cls, kind: str | None, *, model: Path | None, draft: Path | None, draft_tokens: int) -> Speculation:
        """Fill in what wasn't given: the bundled model, its head, and speculation wherever there is a head."""
        if draft is None and model is None:
            draft = bundled("eagle")
        if kind is None:
            kind = "none" if draft is None else "eagle"
        if kind not in ("eagle", "none"):
            raise ConfigError(f"--speculate is {kind!r}; expected eagle or none")
        if kind == "eagle" and draft is None:
            raise ConfigError(f"--speculate eagle needs an EAGLE head for {model}: give its directory with --draft DIR")
        return cls(kind=kind, model=model or bundled("target"), draft=draft, draft_tokens=draft_tokens)

    def without(self) -> Speculation:
        """The same model, decoding plainly."""
        return replace(self, kind="none")


def bundled(part: str) -> Path:
    """Directory of the bundled model's ``target`` or ``eagle``."""
    return Path(str(resources.files("outrider").joinpath("bundled", part)))


def load(backend: str | None, speculation: Speculation, *, max_requests: int, dtype: str) -> Engine:
    """Choose the backend and load the checkpoint onto it; progress goes to standard error, on a terminal alone."""
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine

    config = EngineConfig(max_requests=max_requests, draft_tokens=speculation.draft_tokens, dtype=dtype)
    registry = Registry()
    device = registry.create(registry.select(backend, backend_from_environment()))
    console = Console(stderr=True)
    status = console.status("loading") if console.is_terminal else contextlib.nullcontext()
    with status as shown:

        def progress(file: str, done: int, total: int) -> None:
            if shown is not None:
                shown.update(f"loading {file}: {done}/{total}")

        return Engine.from_checkpoint(
            speculation.model,
            device,
            draft_dir=speculation.draft,
            speculate=speculation.kind,
            config=config,
            progress=progress,
        )
