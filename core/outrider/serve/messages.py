"""What a server and its engine tell each other; :mod:`outrider.serve.wire` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.engine.config import MAX_LOGPROBS
from outrider.engine.engine import Engine
from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.engine.requests.sampling import SamplingParams
from outrider.engine.stats import EngineLoad, EngineStats
from outrider.model import Media


class Submit(NamedTuple):
    """Run a request. ``key`` names it in all that follows; the sender chooses it, and uses it once."""

    key: int
    tokens: Sequence[int]
    params: SamplingParams
    priority: int
    media: Sequence[Media]


class Abort(NamedTuple):
    """End a request. Nothing more comes of it. One that has ended is no error."""

    key: int


class Stop(NamedTuple):
    """End the engine's loop; requests that run are aborted."""


Command = Submit | Abort | Stop


class Admitted(NamedTuple):
    """The request was checked, and waits or runs."""

    key: int


class Refused(NamedTuple):
    """The request can't be served; nothing more comes of it."""

    key: int
    message: str


class Output(NamedTuple):
    """New tokens of one sample of a request: a :class:`~outrider.engine.requests.request.StepOutput` under its key."""

    key: int
    sample: int
    tokens: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...]
    text: str | None
    error: str | None
    drafted: int
    proposed: int
    refused: bool = False


class Snapshot(NamedTuple):
    """Counts so far, and what the engine holds. ``step_s``: seconds spent in steps, those at fences among them."""

    stats: EngineStats
    load: EngineLoad
    step_s: float


class Failed(NamedTuple):
    """The engine can't go on; the last that is told."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What of an engine doesn't change.

    ``longest_request``: tokens of prompt and output together. ``draft_tokens``: the most tokens of a draft that can be
    accepted in an iteration; 0 without speculation. ``image_token``: the placeholder of an image; None for a model of text.
    """

    backend: str
    device: str
    dtype: str
    cache_dtype: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    longest_request: int
    max_requests: int
    max_logprobs: int
    page_size: int
    num_pages: int
    prefix_cache: bool
    draft_tokens: int
    image_token: int | None

    @classmethod
    def of(cls, engine: Engine) -> EngineInfo:
        """That of an engine."""
        config, model = engine.config, engine.model.config
        return cls(
            backend=engine.backend.name,
            device=str(engine.backend.device),
            dtype=config.dtype,
            cache_dtype=str(engine.model.cache_dtype).removeprefix("torch."),
            vocab_size=model.vocab_size,
            bos_token_id=model.bos_token_id,
            eos_token_ids=tuple(sorted(model.eos_token_ids)),
            longest_request=engine.longest_request,
            max_requests=config.max_requests,
            max_logprobs=min(MAX_LOGPROBS, model.vocab_size),
            page_size=config.page_size,
            num_pages=engine.load.pages,
            prefix_cache=config.prefix_cache,
            draft_tokens=engine.proposer.depth,
            image_token=None if model.vision is None else model.vision.image_token,
        )


class Ready(NamedTuple):
    """The engine is made; the first that is told."""

    info: EngineInfo


Event = Ready | Admitted | Refused | Output | Snapshot | Failed
