"""Options of benchmarks alone: how the engine launches its iterations, how large it is, and how long kernels are tuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.cli.models import (
    DtypeOption,
    KvDtypeOption,
    KvMemoryOption,
    MaxContextOption,
    MaxRequestsOption,
    PageSizeOption,
    Running,
    Sizes,
)

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
