"""A mixed load on a server: whole and streamed answers, clients that go away, that send nonsense, that read slowly.

``python tests/serve/load.py URL`` runs it on any server of the bundled model in float32.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

PROMPTS = Path(__file__).parents[1] / "data" / "heldout_prompts.json"
NONSENSE = [
    b"{",
    b'{"model": "other", "prompt": "x"}',
    b'{"model": "m", "prompt": "x", "max_tokens": -1}',
    b'{"model": "m", "prompt": "x", "temperature": "hot"}',
    b'{"model": "m", "prompt": [99999999]}',
    b'{"model": "m", "prompt": "x", "max_tokens": 100000000}',
    b'{"model": "m", "prompt": "x", "unheard_of": 1}',
]


@dataclass
class Outcome:
    """What came of a load; ``wrong`` says what shouldn't have."""

    kinds: Counter = field(default_factory=Counter)
    wrong: list = field(default_factory=list)


@dataclass
class Case:
    """A request, and what its choices' tokens must be."""

    body: dict
    expected: list


def cases(reference, *, count=24, most=12, seed=1):
    """Requests with what the engine gives for them without a server. Half of them draw."""
    from outrider import SamplingParams

    drawn = random.Random(seed)
    texts = [text for text in json.loads(PROMPTS.read_text()) if text.strip()]
    made = []
    for number in range(count):
        text = drawn.choice(texts)[: drawn.randint(4, 120)]
        n = drawn.choice([1, 1, 1, 2])
        sampling = {"temperature": 0.9, "seed": number, "n": n} if number % 2 else {"temperature": 0.0}
        tokens = drawn.randint(1, most)
        params = SamplingParams(max_tokens=tokens, **sampling)
        found = reference.generate([reference.tokenizer.encode(text)], params)
        body = {"model": "m", "prompt": text, "max_tokens": tokens, "return_token_ids": True, **sampling}
        made.append(Case(body, [list(each.token_ids) for each in found]))
    return made


async def drive(url, made, *, requests, at_once, seed=0):
    """Run the load; every answer is compared with what it must be."""
    outcome, drawn, left = Outcome(), random.Random(seed), iter(range(requests))
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def worker():
            for number in left:
                kind = drawn.choices(["whole", "stream", "gone", "nonsense", "slow"], [43, 40, 10, 2, 5])[0]
                kind = dict(enumerate(KINDS)).get(number, kind)  # each once, however short the load is
                outcome.kinds[kind] += 1
                try:
                    await KINDS[kind](client, drawn, made, number, outcome)
                except Exception as error:
                    outcome.wrong.append(f"{kind} {number}: {type(error).__name__}: {error}")

        await asyncio.gather(*(worker() for _ in range(at_once)))
    return outcome


def _checked(answer, number, outcome, status=200):
    if answer.status_code != status:
        outcome.wrong.append(f"{number}: status {answer.status_code}")
    if answer.headers.get("x-request-id") != f"load-{number}":
        outcome.wrong.append(f"{number}: the answer is of request {answer.headers.get('x-request-id')}")


async def _whole(client, drawn, made, number, outcome):
    case = drawn.choice(made)
    answer = await client.post("/v1/completions", json=case.body, headers={"x-request-id": f"load-{number}"})
    _checked(answer, number, outcome)
    if [choice["token_ids"] for choice in answer.json()["choices"]] != case.expected:
        outcome.wrong.append(f"{number}: other tokens than the engine's")


async def _stream(client, drawn, made, number, outcome, *, pause=0.0, leave=None):
    case = drawn.choice(made)
    found, ended = [[] for _ in case.expected], [None] * len(case.expected)
    body = {**case.body, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": f"load-{number}"}) as answer:
        _checked(answer, number, outcome)
        last = None
        async for line in answer.aiter_lines():
            if leave is not None and drawn.random() < leave:
                return
            if pause:
                await asyncio.sleep(pause)
            if not line:
                continue
            last = line
            if line != "data: [DONE]":
                for choice in json.loads(line[6:])["choices"]:
                    found[choice["index"]] += choice["token_ids"]
                    ended[choice["index"]] = choice["finish_reason"]
    if leave is None and (found != case.expected or last != "data: [DONE]" or not all(ended)):
        outcome.wrong.append(f"{number}: a stream that is not the engine's")


async def _gone(client, drawn, made, number, outcome):
    await _stream(client, drawn, made, number, outcome, leave=0.5)


async def _slow(client, drawn, made, number, outcome):
    await _stream(client, drawn, made, number, outcome, pause=0.05)


async def _nonsense(client, drawn, made, number, outcome):
    headers = {"x-request-id": f"load-{number}", "content-type": "application/json"}
    answer = await client.post("/v1/completions", content=drawn.choice(NONSENSE), headers=headers)
    _checked(answer, number, outcome, answer.status_code if answer.status_code in (400, 404) else 400)
    if set(answer.json()["error"]) != {"message", "type", "param", "code"}:
        outcome.wrong.append(f"{number}: an error of another form")


KINDS = {"whole": _whole, "stream": _stream, "gone": _gone, "slow": _slow, "nonsense": _nonsense}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from serve.conftest import bundled_engine

    count = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    told = asyncio.run(drive(sys.argv[1], cases(bundled_engine()), requests=count, at_once=200))
    print(dict(told.kinds), len(told.wrong), told.wrong[:10])
    sys.exit(bool(told.wrong))
