"""Messages between a server and its engine: commands to the engine, events from it.

Between processes, messages travel in the frames of :mod:`outrider.disaggregation.connections`. Both ends are the same
program, but messages contain data of clients. So nothing is unpickled: the decoder creates only the records of this module,
by :mod:`outrider.engine.requests.message_codec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.disaggregation.connections import WireMessage
from outrider.engine.config import MAX_LOGPROBS
from outrider.engine.engine import Engine
from outrider.engine.loop import EngineLoad, EngineStats
from outrider.engine.requests.message_codec import from_plain, to_plain
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.engine.requests.sampling import SamplingParams, TokenLogprobs
from outrider.model import Media


class SubmitRequest(NamedTuple):
    """Command to run all samples of a request."""

    key: int
    """The key of the request in all later messages. The sender chooses it and uses it once."""
    tokens: Sequence[int]
    params: SamplingParams
    priority: int
    media: Sequence[Media]


class AbortRequest(NamedTuple):
    """Command to end a request: no event follows for it. A request that has already ended is no error."""

    key: int


class StopEngine(NamedTuple):
    """Command to end the engine's loop, which aborts all running requests."""


EngineCommand = SubmitRequest | AbortRequest | StopEngine


class RequestAdmitted(NamedTuple):
    """Event: the engine has accepted the request, which now waits or runs."""

    key: int


class RequestRefused(NamedTuple):
    """Event: the engine can't serve the request. No event follows for it."""

    key: int
    message: str
    busy: bool = False


class SampleOutput(NamedTuple):
    """Event: new tokens of one sample of a request. Its text stays in the engine, but for a request with stop strings."""

    key: int
    sample: int
    output: StepOutput


class EngineSnapshot(NamedTuple):
    """Event: the counters and the current load of the engine. Sent at most every 0.1 s, and when the engine becomes idle."""

    stats: EngineStats
    load: EngineLoad
    step_s: float
    """Seconds spent in :meth:`Engine.step` so far, including the waits for fences."""


class EngineFailed(NamedTuple):
    """Event: the engine has ended with an error. It is the last event."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """The properties of an engine that don't change while it runs. It is the first event: the engine has started."""

    backend: str
    device: str
    dtype: str
    cache_dtype: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    longest_request: int
    """Maximum number of tokens of prompt and output together."""
    max_requests: int
    max_logprobs: int
    page_size: int
    num_pages: int
    prefix_cache: bool
    draft_tokens: int
    """Maximum number of draft tokens that one iteration can accept for a request; 0 without speculation."""
    image_token: int | None
    """Placeholder token of an image in a prompt; None for a text-only model."""
    patches_per_feature: int = 1
    """Number of an image's patches for each of its tokens in the engine."""

    @classmethod
    def from_engine(cls, engine: Engine) -> EngineInfo:
        """Return the properties of ``engine``."""
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
            patches_per_feature=1 if model.vision is None else model.vision.merge**2,
        )


EngineEvent = EngineInfo | RequestAdmitted | RequestRefused | SampleOutput | EngineSnapshot | EngineFailed


_EngineMessage = EngineCommand | EngineEvent


def encode_messages(messages: Sequence[_EngineMessage]) -> bytes:
    """Return ``messages`` as the bytes of one frame.

    An output is a flat list, without the codec: it is by far the most frequent message.
    """
    blobs: list[bytes] = []
    items = [
        _flat(each.key, each.sample, each.output) if type(each) is SampleOutput else to_plain(each, _EngineMessage, blobs)
        for each in messages
    ]
    return WireMessage("messages", {"items": items}, tuple(blobs)).encode()


def _flat(key: int, sample: int, output: StepOutput) -> list[Any]:
    """Return an output as a list. Most outputs are neither the first nor the last of their sample, and have five items."""
    flat: list[Any] = [key, sample, output.tokens, output.drafted, output.proposed]
    if output.finish_reason is not None or output.cached or output.logprobs or output.searched_text is not None:
        flat += output.finish_reason, [(entry.token, entry.logprob, entry.top) for entry in output.logprobs]
        flat += output.searched_text, output.error, output.refused, output.busy, output.cached, output.stopped_by
    return flat


def decode_messages(frame: WireMessage) -> list[Any]:
    """Return the commands or events that :func:`encode_messages` encoded."""
    messages = []
    for plain in frame.body["items"]:
        if type(plain) is list:
            key, sample, tokens, drafted, proposed, *others = plain
            reason, entries, text, error, *flags = others or (None, (), None, None)
            finish_reason = None if reason is None else FinishReason(reason)
            logprobs = tuple([TokenLogprobs(token, logprob, tuple(map(tuple, top))) for token, logprob, top in entries])
            output = StepOutput(key, tuple(tokens), finish_reason, logprobs, text, error, drafted, proposed, *flags)
            messages.append(SampleOutput(key, sample, output))
        else:
            messages.append(from_plain(plain, _EngineMessage, frame.blobs))
    return messages
