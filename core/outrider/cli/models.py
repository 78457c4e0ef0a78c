"""The options that say which model runs where, and the engine made from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.environment import backend_from_environment, plugin_probe
from outrider.cli.starting import progress_shown, say_what_started
from outrider.registry import Registry
from outrider.speculative.names import OWN_PROPOSERS

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

ModelOption = Annotated[
    Path | None,
    typer.Option("--model", metavar="DIR", help="A checkpoint as Hugging Face writes it. Default: the bundled model."),
]
DraftOption = Annotated[
    Path | None,
    typer.Option("--draft", metavar="DIR", help="The draft's checkpoint: a head, or a model. Default: the bundled head."),
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
DraftTokensOption = Annotated[int, typer.Option("--draft-tokens", metavar="K", help="Tokens drafted in an iteration.")]
DraftLengthOption = Annotated[
    str | None,
    typer.Option(
        "--draft-length",
        metavar="fixed|load",
        help="Draft K tokens in every iteration, or as many as make the batch fastest. Default: by load where graphs are "
        "replayed beside the host.",
    ),
]
ModeOption = Annotated[
    str,
    typer.Option("--mode", metavar="staged|fused", help="Stages on their own streams, or the whole iteration in one graph."),
]
GraphsOption = Annotated[
    bool, typer.Option("--graphs/--no-graphs", help="In staged mode too, replay each stage from a graph.")
]
OverlapOption = Annotated[
    bool, typer.Option("--overlap/--no-overlap", help="Launch an iteration before the previous one's results are read.")
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="Dtype of weights, activations, cache: float32, bfloat16, float16, …")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """How iterations are launched; the names are those of :class:`~outrider.engine.EngineConfig`."""

    mode: str = "staged"
    graphs: bool = False
    overlap: bool = False
    draft_length: str | None = None


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
    ) -> Speculation:
        """Fill in what wasn't given: the bundled model, its head, and speculation wherever there is a head."""
        if draft is None and model is None and kind in (None, "eagle"):
            draft = bundled("eagle")
        return cls(
            kind=kind or ("none" if draft is None else "eagle"),
            model=model or bundled("target"),
            draft=draft,
            draft_tokens=draft_tokens,
            draft_topk=draft_topk,
            draft_nodes=draft_nodes,
            through_transformers=through_transformers,
            trust_remote_code=trust_remote_code,
        )

    def without(self) -> Speculation:
        """The same model, decoding plainly."""
        return replace(self, kind="none", draft_topk=1, draft_nodes=None)


def bundled(part: str) -> Path:
    """Directory of the bundled model's ``target`` or ``eagle``."""
    return Path(str(resources.files("outrider").joinpath("bundled", part)))


def load(
    backend: str | None, speculation: Speculation, *, max_requests: int, dtype: str, running: Running | None = None
) -> Engine:
    """Choose the backend and load the checkpoint onto it; progress goes to standard error, on a terminal alone."""
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine

    running = running or Running()
    config = EngineConfig(
        max_requests=max_requests,
        draft_tokens=speculation.draft_tokens,
        draft_topk=speculation.draft_topk,
        draft_nodes=speculation.draft_nodes,
        dtype=dtype,
        mode=running.mode,
        graphs=running.graphs,
        overlap=running.overlap,
        draft_length=running.draft_length,
    )
    registry = Registry(probe=plugin_probe())
    device = registry.create(registry.select(backend, backend_from_environment()))
    with progress_shown() as tell:
        engine = Engine.from_checkpoint(
            speculation.model,
            device,
            draft_dir=speculation.draft,
            speculate=speculation.kind,
            config=config,
            through_transformers=speculation.through_transformers,
            trust_remote_code=speculation.trust_remote_code,
            progress=lambda file, done, total: tell(f"loading {file}", done, total),
            capture_progress=lambda done, total: tell("capturing graphs", done, total),
        )
    say_what_started(engine)
    return engine
