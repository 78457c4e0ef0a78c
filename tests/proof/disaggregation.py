"""Prove prefill/decode disaggregation: random programs on a pair of servers give the tokens of one engine.

Examples on the simulated device:

    PYTHONPATH=tests python -m proof.disaggregation --transport nixl --programs 200
    PYTHONPATH=tests python -m proof.disaggregation --kill decode --programs 40

Several ranks of the decode server:

    PYTHONPATH=tests python -m proof.disaggregation --data 2 --models mtp "ngram, images" --transport nixl
    PYTHONPATH=tests python -m proof.disaggregation --tensor 2 --data 2 --models mtp --transport nixl

Two GPUs:

    PYTHONPATH=tests python -m proof.disaggregation --models bundled --backends cuda:0 cuda:1 --transport nixl --programs 200

Every model has a prefill server and a decode server, whose engines have random sizes. A program is a batch mix of requests;
the client aborts some of them. ``--kill`` kills a server (SIGKILL) in the middle of every few programs and restarts it on its
port. ``--tensor`` and ``--data`` set the layout of the ranks of the decode server's engine, each in its own process.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from outrider import SamplingParams
from outrider.bundled import bundled
from outrider.disaggregation.connections import PeerAddress
from outrider.disaggregation.decode_client import DecodeClient
from outrider.disaggregation.page_landing import FollowerLinks
from outrider.disaggregation.server import DecodeServer, PrefillServer
from outrider.engine import ChoiceGuide, Ebnf, JsonSchema, Regex
from outrider.registry import get_backend
from outrider.registry.children import child_session, end_with_parent
from outrider.registry.engine_plugins import get_transport
from outrider_proof import engine_setups
from outrider_proof.decode_program import Arrival, HostProgram
from outrider_proof.tiny import plain_config

if TYPE_CHECKING:
    from outrider.device import Backend
    from outrider.engine.engine import Engine
    from outrider.engine.ranks.ranks import Ranks
    from outrider.model import Media

HYBRID = "mtp-chain" + engine_setups.WIDE_HYBRID
MODELS = ("eagle", "mtp", "eagle-tree", "none", engine_setups.VISION, "draft-model", HYBRID, "bundled")
LIMIT_S = 600.0
_TOKENS = 48
_GUIDES = (
    Regex("(ab|cd){2,40}x?"),
    ChoiceGuide(["yes", "no, never"]),
    Ebnf('root ::= "(" root ")" | "x"'),
    JsonSchema({"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["s"]}),
)
"""Guides of requests to the bundled model, which has a tokenizer."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The sizes of one engine. Both engines of a pair have the same ``page_size``."""

    page_size: int
    max_requests: int
    spare_pages: int
    prefill_chunk: int

    @classmethod
    def draw(cls, rng: random.Random, page_size: int) -> EngineSizes:
        """Return random sizes; small sizes make requests wait and be preempted."""
        return cls(page_size, rng.randint(2, 6), rng.choice((0, 8, 40)), rng.choice((5, 16, 64)))


def make_engine(model: str, backend: Backend, sizes: EngineSizes, ranks: Ranks | None = None) -> Engine:
    """Return an engine of a model of :data:`MODELS`, or the engine of one of several ``ranks``."""
    from outrider.engine.engine import Engine

    if model == "bundled":
        config = plain_config(dtype="float32", page_size=16, max_requests=8, max_context=256, overlap=True, num_pages=8 * 18)
        return Engine.from_checkpoint(
            bundled("target"), backend, draft_dir=bundled("eagle"), speculate="eagle", config=config, ranks=ranks
        )
    program = HostProgram(
        arrivals=(Arrival(0, 40, engine_setups.LONGEST, 0, None),),
        max_requests=sizes.max_requests,
        page_size=sizes.page_size,
        spare_pages=sizes.spare_pages,
        prefill_chunk=sizes.prefill_chunk,
        draft_tokens=3,
    )
    return engine_setups.Models(model, backend, ranks).engine(program)


def child(
    role: str,
    model: str,
    backend: str,
    transport: str,
    listen: str,
    prefill: str,
    sizes: Sequence[int],
    tensor: int = 1,
    data: int = 1,
    rank: int = 0,
    port: int = 0,
) -> None:
    """Run one prefill or decode server until it is killed or receives the end command.

    ``rank`` and ``port`` (of the store) are for further ranks.
    """
    import torch

    end_with_parent()
    torch.set_num_threads(1)
    moves, device = get_transport(transport), get_backend(backend)
    if tensor * data > 1:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from outrider.engine.ranks.ranks import ParallelConfig, Ranks

        store = TCPStore("127.0.0.1", port, is_master=not rank, wait_for_workers=False)
        if not rank:
            for other in range(1, tensor * data):
                child_arguments = [role, model, backend, transport, listen, prefill, list(sizes), tensor, data]
                child_arguments += [other, store.port]
                subprocess.Popen([sys.executable, "-m", "proof.disaggregation", "--child", json.dumps(child_arguments)])
        # A process may wait for a core for long.
        ranks = Ranks(device, ParallelConfig(tensor=tensor, data=data, timeout_s=LIMIT_S), rank=rank, store=store)
        engine = make_engine(model, device, EngineSizes(*sizes), ranks)
    else:
        engine = make_engine(model, device, EngineSizes(*sizes))
    if rank:
        pages = FollowerLinks(engine, moves, rank=rank)
        engine.follow(pages.execute_query)
        pages.close()
        return
    address = PeerAddress.parse(listen)

    def say(line: str) -> None:
        print(line, flush=True)

    server: PrefillServer | DecodeServer
    if role == "prefill":
        server = PrefillServer(engine, moves, listen=address, say=say)
    else:
        server = DecodeServer(engine, moves, listen=address, prefill=[PeerAddress.parse(prefill)], say=say)
    signal.signal(signal.SIGTERM, lambda *_: server.drain(30.0))
    say(f"listening on {server.address}")
    try:
        well = server.serve_until_drained()
    finally:
        engine.close()
    sys.exit(0 if well else 1)


class Pair:
    """A prefill server and a decode server of one model as processes, and a client of the decode server."""

    def __init__(
        self,
        stack: ExitStack,
        model: str,
        backends: Sequence[str],
        transport: str,
        rng: random.Random,
        layout: tuple[int, int] = (1, 1),
    ) -> None:
        self._stack, self._model, self._transport, self._layout = stack, model, transport, layout
        self._backends = dict(zip(("prefill", "decode"), backends, strict=True))
        page_size = rng.choice((2, 4, 16))
        self._sizes = {role: EngineSizes.draw(rng, page_size) for role in ("prefill", "decode")}
        self._addresses = {role: f"127.0.0.1:{free_port()}" for role in ("prefill", "decode")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for role in ("prefill", "decode"):
            self.start(role)
        address = PeerAddress.parse(self._addresses["decode"])
        self.client = stack.enter_context(closing(DecodeClient([address], patience_s=LIMIT_S)))
        self.poll_until(lambda: self.client.num_servers == 1 and self.is_linked)

    @property
    def is_linked(self) -> bool:
        """Return True if the decode server is connected to a prefill server."""
        return any(status.get("prefill_peers") for status in self.client.status())

    def start(self, role: str) -> None:
        """Start the server of ``role``; a restarted server listens on its previous port."""
        sizes = self._sizes[role]
        listed = [sizes.page_size, sizes.max_requests, sizes.spare_pages, sizes.prefill_chunk]
        child_arguments: list[Any] = [
            role,
            self._model,
            self._backends[role],
            self._transport,
            self._addresses[role],
            self._addresses["prefill"],
        ]
        child_arguments += [listed, *(self._layout if role == "decode" else (1, 1))]
        command = [sys.executable, "-m", "proof.disaggregation", "--child", json.dumps(child_arguments)]
        self.processes[role] = self._stack.enter_context(child_session(command, stdout=subprocess.DEVNULL))

    def kill(self, role: str) -> None:
        """Kill the server of ``role`` with SIGKILL and wait for its process to end."""
        self.processes[role].kill()
        self.processes[role].wait()

    def poll_until(self, condition: Any) -> None:
        """Poll the client until ``condition()`` is true. Raises if a server process ends or the time limit passes."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            self.client.poll(0.05)
            for role, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"the {role} server of {self._model} ended with {process.poll()}; see above")
            if time.monotonic() > end:
                raise TimeoutError(f"{self._model}: it didn't come within {LIMIT_S:g} s: {self.client.status(1.0)}")

    def serve_program(
        self, arrivals: Sequence[tuple[Arrival, tuple[int, ...], tuple[Media, ...]]], interrupt: Any = None
    ) -> list[Any]:
        """Serve the requests of a program and return, for each, its tokens or None if it was aborted.

        ``interrupt`` is called once while requests are running. Raises :class:`TimeoutError` if a request doesn't end.
        """
        waiting = sorted(range(len(arrivals)), key=lambda index: arrivals[index][0].step)
        number_of: dict[int, int] = {}
        got: dict[int, list[int]] = {}
        ended: dict[int, str] = {}
        step, end = 0, time.monotonic() + LIMIT_S
        while waiting or len(ended) < len(arrivals):
            while waiting and arrivals[waiting[0]][0].step <= step:
                index = waiting.pop(0)
                arrival, tokens, media = arrivals[index]
                (number,) = self.client.submit(tokens, params_of(arrival), media=media)
                number_of[number], got[index] = index, []
            for number, index in number_of.items():
                after = arrivals[index][0].abort_after
                if after is not None and step > arrivals[index][0].step + after and index not in ended:
                    self.client.abort(number)
                    ended[index] = "abort"
            for output in self.client.poll(0.005):
                index = number_of[output.request_id]
                got[index].extend(output.tokens)
                if output.finish_reason is not None:
                    ended[index] = output.error or str(output.finish_reason)
            step += 1
            if interrupt is not None and step > 3:
                interrupt()
                interrupt = None
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{self._model}: {len(arrivals) - len(ended)} requests didn't end: {self.client.status(1.0)}"
                )
        return [None if ended[index] == "abort" else (ended[index], tuple(got[index])) for index in range(len(arrivals))]

    def held_resources(self) -> str:
        """Return the pages, rows or requests that the decode server still holds after 20 s, or an empty string."""
        end = time.monotonic() + 20
        while True:
            (status,) = self.client.status()
            held = {
                "pages": status["pages"] - status["free_pages"],
                "rows": status["rows"] - status["free_rows"],
                "open": status["open"],
            }
            if not any(held.values()):
                return ""
            if time.monotonic() > end:
                return json.dumps(held)
            self.client.poll(0.05)


def free_port() -> int:
    """Return a TCP port that was free at the time of the call."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port


@cache
def words() -> tuple[int, ...]:
    """Return the token ids of a text for prompts of the bundled model."""
    import inspect

    from outrider.engine import engine
    from outrider.model import Tokenizer

    return tuple(Tokenizer.from_checkpoint(bundled("target")).encode(inspect.getsource(engine)))


def random_program(model: str, seed: int) -> list[tuple[Arrival, tuple[int, ...], tuple[Media, ...]]]:
    """Return the random requests of program ``seed``: for each its arrival, its tokens and its images."""
    if model == "bundled":
        rng = random.Random(f"apart {seed}")
        found: list[tuple[Arrival, tuple[int, ...], tuple[Media, ...]]] = []
        for _ in range(rng.randint(2, 8)):
            length, start = rng.randint(1, 90), rng.randrange(len(words()) - 100)
            abort = rng.randint(0, 6) if rng.random() < 0.1 else None
            arrival = Arrival(start, length, rng.randint(1, _TOKENS), rng.randint(0, 4), abort, guided=rng.random() < 0.4)
            found.append((arrival, words()[start : start + length], ()))
        return found
    # The guides of drawn programs are put into an engine's record of the request, and can't travel.
    arrivals = [replace(arrival, guided=False) for arrival in engine_setups.random_host_program(seed).arrivals]
    return [(arrival, *engine_setups.prompt_and_media(model, arrival)) for arrival in arrivals]


def params_of(arrival: Arrival) -> SamplingParams:
    """Return the sampling parameters of a request: greedy, with its output limit and its guide."""
    guide = _GUIDES[arrival.start % len(_GUIDES)] if arrival.guided else None
    return SamplingParams(max_tokens=arrival.max_tokens, guide=guide)


class Reference:
    """The reference of the proof: non-speculative decoding by one engine in this process. ``backend`` is the backend of the
    bundled model.
    """

    def __init__(self, model: str, backend: str) -> None:
        self._model, self._backend = model, backend
        self._engine: Engine | None = None

    def tokens(self, arrival: Arrival, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that one engine generates for the request."""
        if self._model != "bundled":
            return engine_setups.reference_tokens(self._model, arrival)
        from outrider.engine.engine import Engine

        if self._engine is None:
            config = plain_config(dtype="float32", page_size=16, max_requests=1, max_context=256)
            self._engine = Engine.from_checkpoint(bundled("target"), get_backend(self._backend), config=config)
        return self._engine.generate([tokens], params_of(arrival))[0].token_ids


def prove(options: argparse.Namespace) -> dict[str, Any]:
    """Run the programs on pairs of servers; return counts, wrong outputs and the resources that servers still hold."""
    found: dict[str, Any] = {
        "programs": 0,
        "requests": 0,
        "aborted": 0,
        "kills": 0,
        "asked_again": 0,
        "wrong": [],
        "held": [],
    }
    found |= {"transport": options.transport, "arrived": 0, "done_again": 0, "prefilled_here": 0}
    began = time.monotonic()
    models = options.models
    for place, model in enumerate(models):
        count = options.programs // len(models) + (place < options.programs % len(models))
        rng, reference = random.Random(f"{model} {options.seed}"), Reference(model, options.backends[0])
        with ExitStack() as stack:
            pair = Pair(stack, model, options.backends, options.transport, rng, (options.tensor, options.data))
            for seed in range(options.seed, options.seed + count):
                if time.monotonic() - began > options.seconds:
                    break
                program = random_program(model, seed)
                killing = options.kill if options.kill and seed % options.kill_every == 0 else None

                def interrupt(pair: Pair = pair, side: str | None = killing) -> None:
                    assert side is not None
                    pair.kill(side)
                    pair.start(side)

                outcome = pair.serve_program(program, interrupt if killing else None)
                found["programs"] += 1
                found["kills"] += killing is not None
                for (arrival, tokens, _), came in zip(program, outcome, strict=True):
                    found["requests"] += 1
                    if came is None:
                        found["aborted"] += 1
                    elif came[1] != reference.tokens(arrival, tokens):
                        found["wrong"].append([model, seed, repr(arrival), repr(came)])
                        print(found["wrong"][-1], file=sys.stderr, flush=True)
                print(f"{model} {seed}: {len(program)} requests, {len(found['wrong'])} wrong", file=sys.stderr, flush=True)
                if killing:
                    pair.poll_until(lambda pair=pair: pair.client.num_servers == 1 and pair.is_linked)
            held = pair.held_resources()
            if held:
                found["held"].append([model, held])
            for status in pair.client.status():
                for name in ("arrived", "done_again", "prefilled_here"):
                    found[name] += status["counts"][name]
            found["asked_again"] += pair.client.num_resubmitted
            for role in ("decode", "prefill"):
                pair.processes[role].terminate()
            codes = [pair.processes[role].wait(60) for role in ("decode", "prefill")]
            if any(codes):
                found["held"].append([model, f"exit codes {codes}"])
        print(f"{model}: {count} programs, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the proof; the exit code is 1 for a wrong token, a lost request or a page that was not freed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--transport", default="torch")
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no program after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--backends", nargs=2, default=["cpu", "cpu"], metavar=("PREFILL", "DECODE"))
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks of the decode server's engine")
    parser.add_argument("--data", type=int, default=1, help="data-parallel ranks of the decode server's engine")
    parser.add_argument("--kill", choices=("prefill", "decode"))
    parser.add_argument("--kill-every", type=int, default=2, help="programs from one kill to the next")
    options = parser.parse_args(arguments)
    if options.child is not None:
        child(*options.child)
        return 0
    found = prove(options)
    print(json.dumps(found, indent=1))
    return 1 if found["wrong"] or found["held"] else 0


if __name__ == "__main__":
    sys.exit(main())
