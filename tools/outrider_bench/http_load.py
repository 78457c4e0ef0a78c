"""Load on a server of OpenAI's API: a fixed number of clients, each of which sends its next request after its last answer.

The load runs in processes of its own, so that measuring doesn't slow the server down.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from outrider_bench.child import BenchFailed, run_child
from outrider_bench.load import StreamedAnswer

_VOCABULARY = 400
_SEED_STRIDE, _WARM_UP_SEED = 1 << 20, 1 << 19
_CLIENT_LIMIT_S = 600.0
_LOAD_LIMIT_S = 900.0
_MAX_LINE_BYTES = 1 << 22
_MAX_PROCESSES = 4
_CLIENTS_PER_PROCESS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLoad:
    """A load of completion requests from several clients on a server.

    A server may keep prefixes: two requests, or two seeds, share at most a few tokens of a prefix.
    """

    url: str
    """Address of the server: ``http://HOST:PORT`` and the path before ``/v1``."""
    model: str
    clients: int
    rounds: int
    """Number of requests of each client, one after the other."""
    prompt_tokens: int
    new_tokens: int
    first: int = 0
    """Number of the first client, from which prompts are derived."""
    seed: int = 0

    def prompt(self, client: int, round_: int, vocabulary: int = _VOCABULARY) -> list[int]:
        """Return the random token ids of the prompt of a client's request number ``round_``."""
        generator = random.Random(f"{self.seed}, {self.first + client}, {round_}")
        return generator.choices(range(min(5, vocabulary - 1), vocabulary), k=self.prompt_tokens)

    def with_clients(self, clients: int, *, number: int) -> HttpLoad:
        """Return the same load with other numbers of clients and other prompts; ``number`` is above 0 and different for each
        load.
        """
        return replace(self, clients=clients, seed=self.seed + number * _SEED_STRIDE)

    @property
    def warm_up(self) -> HttpLoad:
        """Return a load of one request per client with other prompts, for warming up a server."""
        return replace(self, rounds=1, seed=self.seed + _WARM_UP_SEED)

    def body(self, client: int, round_: int) -> bytes:
        """Return the HTTP body of a request: a greedy completion of full length, as a stream with token ids."""
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


async def run_load(load: HttpLoad) -> list[StreamedAnswer]:
    """Send all requests and return their answers. Raises :class:`BenchFailed`."""
    clients = [_client(load, number) for number in range(load.clients)]
    return [each for answers in await asyncio.gather(*clients) for each in answers]


async def _client(load: HttpLoad, number: int) -> list[StreamedAnswer]:
    parts = urlsplit(load.url)
    host, port = parts.hostname or "", parts.port or 80
    answers: list[StreamedAnswer] = []
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_CLIENT_LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE_BYTES)
            for round_ in range(load.rounds):
                body = load.body(number, round_)
                head = (
                    f"POST {parts.path}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                answer = StreamedAnswer()
                writer.write(head.encode() + body)
                await _read_answer(reader, answer)
                _check_tokens(answer, load.new_tokens)
                answers.append(answer)
    except TimeoutError:
        raise BenchFailed(f"{load.url} didn't answer within {_CLIENT_LIMIT_S:g} s") from None
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        how = "can't be reached" if writer is None else "hung up"
        raise BenchFailed(f"{load.url} {how}: {error}") from None
    except OSError as error:
        raise BenchFailed(f"{load.url} can't be reached: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, asyncio.LimitOverrunError) as error:
        why = f"{type(error).__name__}: {error}"
        raise BenchFailed(f"{load.url} answered with something else than completions of OpenAI's API: {why}") from None
    finally:
        if writer is not None:
            writer.close()
    return answers


def _check_tokens(answer: StreamedAnswer, wanted: int) -> None:
    """Raise :class:`BenchFailed` if ``answer`` lacks tokens."""
    found = sum(answer.tokens)
    if not found:
        raise BenchFailed("an answer said of no token that it has one: the load is for servers that know return_token_ids")
    if found != wanted:
        raise BenchFailed(f"asked for {wanted} new tokens, an answer had {found}: that isn't the same work")


async def _read_answer(reader: asyncio.StreamReader, answer: StreamedAnswer) -> None:
    """Read a chunked answer to its end, and add its outputs to ``answer``. An event may span several chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b" ", 2)[1]
    if status != b"200":
        raise BenchFailed(f"the server answered with status {status.decode()}: {(await reader.read(500)).decode()}")
    if b"chunked" not in head.lower():
        raise BenchFailed("the server's answer isn't a stream in chunks")
    held = b""
    while size := int(await reader.readline(), 16):
        held += (await reader.readexactly(size + 2))[:-2]
        *events, held = held.split(b"\n\n")
        count = sum(_count_tokens(event.strip()) for event in events)
        if count:
            answer.add_output(count)
    await reader.readline()


def _count_tokens(event: bytes) -> int:
    """Return the number of output tokens in one server-sent event, encoded."""
    if not event.startswith(b"data: {"):
        return 0
    data = json.loads(event[6:])
    if "error" in data:
        raise BenchFailed(f"the server ended a stream with an error: {data['error']}")
    return sum(len(choice.get("token_ids") or ()) for choice in data["choices"])


# -- processes ---------------------------------------------------------------------------------------------------------


def run_clients(load: HttpLoad) -> list[StreamedAnswer]:
    """Send the requests of all clients from several processes and return the answers. Raises :class:`BenchFailed`."""
    processes = max(1, min(_MAX_PROCESSES, load.clients // _CLIENTS_PER_PROCESS))
    shares = [load.clients // processes + (number < load.clients % processes) for number in range(processes)]
    parts = [replace(load, clients=share, first=load.first + sum(shares[:number])) for number, share in enumerate(shares)]

    def run_part(part: HttpLoad) -> list[StreamedAnswer]:
        found = run_child(f"{__name__}:answer_part", {"load": asdict(part)}, limit_s=_LOAD_LIMIT_S)
        return [StreamedAnswer(**each) for each in found["answers"]]

    with ThreadPoolExecutor(processes) as pool:
        return [answer for answers in pool.map(run_part, parts) for answer in answers]


def answer_part(work: Mapping[str, Any]) -> dict[str, object]:
    """Send the requests of one process's share of the clients, and return their answers as plain data. Runs in a child
    process.
    """
    part = run_load(HttpLoad(**work["load"]))
    if find_spec("uvloop") is not None:
        import uvloop

        answers = uvloop.run(part)
    else:
        answers = asyncio.run(part)
    return {"answers": [asdict(each) for each in answers]}
