"""Load on a server of OpenAI's API: so many clients, each of which sends its next request once it has the last one's end.

Two servers are measured alike: by streams over HTTP, read with as little as that takes. It runs as processes of their own
(:mod:`outrider_bench.http_load_child`), so that what measures doesn't slow down what is measured.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from outrider.device.errors import OutriderError
from outrider_bench.mixed_load import quantiles

_VOCABULARY = 400
_SEEDS, _WARM_UP = 1 << 20, 1 << 19
_LIMIT_S = 600.0
_LINE = 1 << 22


class ServerFailed(OutriderError):
    """A server answered with an error, or not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLoad:
    """Requests for completions: ``clients`` at a time, ``rounds`` of each, with ``prompt_tokens`` and ``new_tokens`` each.

    ``url``: ``http://HOST:PORT`` and whatever comes before ``/v1``. ``seed``: what prompts are drawn from; ``first``: the
    number of the first client. A server may keep prefixes: two requests, or two seeds, have no more than a few tokens of one
    in common.
    """

    url: str
    model: str
    clients: int
    rounds: int
    prompt_tokens: int
    new_tokens: int
    first: int = 0
    seed: int = 0

    def prompt(self, client: int, round_: int, vocabulary: int = _VOCABULARY) -> list[int]:
        """Token ids of a request, drawn."""
        drawn = random.Random(f"{self.seed}, {self.first + client}, {round_}")
        return drawn.choices(range(min(5, vocabulary - 1), vocabulary), k=self.prompt_tokens)

    def again(self, *, clients: int, number: int) -> HttpLoad:
        """The same with so many clients, and prompts of its own; ``number`` tells loads apart, and is above 0."""
        return replace(self, clients=clients, seed=self.seed + number * _SEEDS)

    @property
    def warm_up(self) -> HttpLoad:
        """A round with other prompts, to be run before."""
        return replace(self, rounds=1, seed=self.seed + _WARM_UP)

    def body(self, client: int, round_: int) -> bytes:
        """A request: greedy, to its full length, as a stream with the ids of the tokens."""
        asked = {
            "model": self.model,
            "prompt": self.prompt(client, round_),
            "max_tokens": self.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        return json.dumps(asked).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Streamed:
    """One answer: when it was asked for, and when how many tokens of it came; seconds of one clock for all processes."""

    began: float
    times: tuple[float, ...]
    tokens: tuple[int, ...]


async def run_load(load: HttpLoad) -> list[Streamed]:
    """Every answer. Raises :class:`ServerFailed`."""
    clients = [_client(load, number) for number in range(load.clients)]
    return [each for answers in await asyncio.gather(*clients) for each in answers]


async def _client(load: HttpLoad, number: int) -> list[Streamed]:
    parts = urlsplit(load.url)
    host, port = parts.hostname or "", parts.port or 80
    answers: list[Streamed] = []
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=_LINE)
            for round_ in range(load.rounds):
                body = load.body(number, round_)
                head = (
                    f"POST {parts.path}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                began = time.time()
                writer.write(head.encode() + body)
                answers.append(_whole(await _answer(reader, began), load.new_tokens))
    except TimeoutError:
        raise ServerFailed(f"{load.url} didn't answer within {_LIMIT_S:g} s") from None
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        how = "can't be reached" if writer is None else "hung up"
        raise ServerFailed(f"{load.url} {how}: {error}") from None
    except OSError as error:
        raise ServerFailed(f"{load.url} can't be reached: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, asyncio.LimitOverrunError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ServerFailed(f"{load.url} answered with something else than completions of OpenAI's API: {why}") from None
    finally:
        if writer is not None:
            writer.close()
    return answers


def _whole(answer: Streamed, wanted: int) -> Streamed:
    """The answer, if it has all tokens that were asked for. Raises :class:`ServerFailed`."""
    found = sum(answer.tokens)
    if not found:
        raise ServerFailed("an answer said of no token that it has one: the load is for servers that know return_token_ids")
    if found != wanted:
        raise ServerFailed(f"asked for {wanted} new tokens, an answer had {found}: that isn't the same work")
    return answer


async def _answer(reader: asyncio.StreamReader, began: float) -> Streamed:
    """Read a chunked answer to its end. Chunks needn't end where events do."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b" ", 2)[1]
    if status != b"200":
        raise ServerFailed(f"the server answered with status {status.decode()}: {(await reader.read(500)).decode()}")
    if b"chunked" not in head.lower():
        raise ServerFailed("the server's answer isn't a stream in chunks")
    times: list[float] = []
    counts: list[int] = []
    held = b""
    while size := int(await reader.readline(), 16):
        held += (await reader.readexactly(size + 2))[:-2]
        now = time.time()
        *events, held = held.split(b"\n\n")
        count = sum(_tokens(event.strip()) for event in events)
        if count:
            times.append(now)
            counts.append(count)
    await reader.readline()
    return Streamed(began=began, times=tuple(times), tokens=tuple(counts))


def _tokens(event: bytes) -> int:
    """How many tokens an event brings."""
    if not event.startswith(b"data: {"):
        return 0
    data = json.loads(event[6:])
    if "error" in data:
        raise ServerFailed(f"the server ended a stream with an error: {data['error']}")
    return sum(len(choice.get("token_ids") or ()) for choice in data["choices"])


def summary(answers: Sequence[Streamed]) -> dict[str, Any]:
    """Tokens a second from the first request to the last token; quantiles, in milliseconds, of first tokens, of the gaps
    between what one client sees, and of each answer's time for a token behind its first.
    """
    gaps = [after - before for each in answers for before, after in pairwise(each.times)]
    spans = [
        (each.times[-1] - each.times[0]) / (sum(each.tokens) - each.tokens[0]) for each in answers if len(each.times) > 1
    ]
    seconds = max(each.times[-1] for each in answers) - min(each.began for each in answers)
    tokens = sum(sum(each.tokens) for each in answers)
    return {
        "requests": len(answers),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "first_token_ms": quantiles([each.times[0] - each.began for each in answers]),
        "between_outputs_ms": quantiles(gaps),
        "a_token_ms": quantiles(spans),
        "tokens_an_output": tokens / sum(len(each.times) for each in answers),
    }


def load_of(given: Mapping[str, Any]) -> HttpLoad:
    """From a child's argument."""
    return HttpLoad(**{name: given[name] for name in HttpLoad.__slots__})


def streamed_of(given: Sequence[Mapping[str, Any]]) -> list[Streamed]:
    """From a child's answer."""
    return [Streamed(began=each["began"], times=tuple(each["times"]), tokens=tuple(each["tokens"])) for each in given]


def told(answers: Sequence[Streamed]) -> dict[str, object]:
    """A child's answer."""
    return {"answers": [asdict(each) for each in answers]}
