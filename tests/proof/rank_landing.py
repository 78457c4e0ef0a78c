"""Prove disaggregation with ranks: prefill on one simulated device, decode on ranks of this and other devices.

    PYTHONPATH=tests python -m proof.rank_landing --programs 50
    PYTHONPATH=tests python -m proof.rank_landing --programs 50 --tensor 2 --data 2

A simulated network card connects both sides, and the sanitizer watches each run. Each run must satisfy: the tokens equal
those of one rank, the sanitizer has no finding, and no side loses a page or row. ``--drop`` leaves a network fence out
on every device; the sanitizer or the tokens must show it. ``pages_free`` is an exception: other edges cover it here.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider import SamplingParams
from outrider.device import Fence
from outrider.disaggregation.connections import WireMessage
from outrider.disaggregation.decode_worker import DecodeWorker
from outrider.disaggregation.page_landing import FollowerLinks, LandingRegistry, registered_memory
from outrider.disaggregation.prefill_worker import PrefillWorker
from outrider.engine.ranks.ranks import ParallelConfig, Ranks
from outrider.engine.requests.hand_over import RequestState
from outrider.registry import Registry
from outrider.transports.link import LocalTransport
from outrider_proof import engine_setups
from outrider_proof.decode_program import HostProgram, WrongTokens, check_tokens, limited_prefill_graphs
from outrider_proof.fence_log import FenceLog
from outrider_proof.rank_engine import run_watched

if TYPE_CHECKING:
    from outrider.device import Backend
    from outrider.engine.requests.request import StepOutput

NETWORK = ("pages_ready", "pages_read", "pages_free", "pages_written")
HYBRIDS = ("none" + engine_setups.WIDE_HYBRID, "mtp-chain" + engine_setups.WIDE_HYBRID)
_HYBRID_FRACTION = 0.2
"""Fraction of programs whose target has recurrent layers."""
PROPOSERS = ("mtp", "eagle", "eagle-tree", "draft-model", "none", engine_setups.VISION)
_DEVICES = 4
_PEER_ID = 1
_CROWDED_FRACTION = 0.5
"""Fraction of programs whose requests arrive together with few pages, so that each freed page gets a new owner at once."""


class SimulatedDevices:
    """Four simulated devices of one machine on which programs run, opened once."""

    def __init__(self) -> None:
        registry = Registry()
        self.backends = [registry.create(f"sim:{rank}") for rank in range(_DEVICES)]
        self._models: dict[str, engine_setups.Models] = {}

    def prefill_models(self, proposer: str) -> engine_setups.Models:
        """Return the models of the prefill engine, loaded once on the first device."""
        if proposer not in self._models:
            self._models[proposer] = engine_setups.Models(proposer, self.backends[0])
        return self._models[proposer]


def run(
    devices: SimulatedDevices,
    seed: int,
    layout: ParallelConfig,
    *,
    proposer: str | None = None,
    drop: str | None = None,
) -> dict[str, int]:
    """Run one random program on the current schedule and return counts of its requests. Raises the program's first error."""
    from outrider_sanitizer.races.race import control_of

    rng = random.Random(f"landing {seed}")
    chosen, mode = rng.choice(PROPOSERS), rng.choice(("staged", "graphs", "fused"))
    mixing = random.Random(f"landing, hybrid {seed}")
    chosen = proposer or (mixing.choice(HYBRIDS) if mixing.random() < _HYBRID_FRACTION else chosen)
    program = engine_setups.random_host_program(seed)
    program = replace(program, arrivals=tuple(replace(arrival, guided=False) for arrival in program.arrivals))
    if rng.random() < _CROWDED_FRACTION:
        program = replace(program, spare_pages=0, arrivals=tuple(replace(arrival, step=0) for arrival in program.arrivals))
    giver_program = replace(program, max_requests=rng.randint(2, 4), spare_pages=rng.choice((8, 40)))
    wanted = [engine_setups.reference_tokens(chosen, arrival) for arrival in program.arrivals]
    backends: list[Backend] = devices.backends[: layout.world]
    store = control_of(backends[0]).create_store()
    transport, counts, lost = LocalTransport(), dict[str, int](), list[str]()
    log = FenceLog(lambda _: 0, drop=drop)

    def wrap(fence: Fence) -> Fence:
        return log.wrap(fence) if drop is not None and fence.name.startswith(f"{drop}[") else fence

    def body(rank: int) -> None:
        ranks = Ranks(backends[rank], layout, rank=rank, store=store)
        engine = engine_setups.Models(chosen, backends[rank], ranks).engine(program, mode=mode, wrap=wrap)
        before = (engine.free_pages, engine.free_rows)
        if rank:
            pages = FollowerLinks(engine, transport, rank=rank)
            engine.follow(pages.execute_query)
            pages.close()
        else:
            giver = devices.prefill_models(chosen).engine(giver_program, mode=mode, wrap=wrap)
            held = (giver.free_pages, giver.free_rows)
            decode = DecodeWorker(engine)
            counts.update(_serve(PrefillWorker(giver), decode, layout, transport, program, chosen, wanted))
            giver.drain()
            engine.close()
            if (giver.free_pages, giver.free_rows) != held:
                lost.append("the prefill engine holds pages or rows")
        backends[rank].synchronize()
        if (engine.free_pages, engine.free_rows) != before:
            lost.append(f"rank {rank}: {before} pages and rows were free, now {(engine.free_pages, engine.free_rows)}")
        ranks.close()

    with limited_prefill_graphs(program):  # for all ranks: each of their threads would end the scope for the others
        run_watched(backends, body, lost=lost)
    if drop is not None:
        counts["left_out"] = log.left_out
    return counts


def _serve(
    prefill: PrefillWorker,
    decode: DecodeWorker,
    layout: ParallelConfig,
    transport: LocalTransport,
    program: HostProgram,
    proposer: str,
    wanted: list[tuple[int, ...]],
) -> dict[str, int]:
    """Serve all requests of a program; prefill and decode both run in the first rank's thread."""
    giver, taker = prefill.engine, decode.engine
    house = LandingRegistry(taker)
    landed, landed_states = registered_memory(taker, layout.tensor)
    link = transport.open(landed, taker.backend, accepts=False, host="", states=landed_states)
    landing = house.open_landing(link, "")
    links = []
    for rank, offer in enumerate(landing.offers()):
        part = layout.shards(rank).attention
        regions, states = registered_memory(giver, part.size, part)
        links.append(transport.open(regions, giver.backend, accepts=True, host="", states=states))
        links[-1].connect(offer)
    landing.connect([link.offer() for link in links])
    to_decode: deque[WireMessage] = deque()
    to_prefill: deque[WireMessage] = deque()
    prefill.add_peer(_PEER_ID, to_decode.append, links, layout.tensor)
    decode.add_peer(_PEER_ID, to_prefill.append, landing)
    got: list[list[int]] = [[] for _ in wanted]
    ended: dict[int, str] = {}
    groups: set[int] = set()
    waiting = sorted(range(len(wanted)), key=lambda index: program.arrivals[index].step)
    numbers: dict[int, int] = {}
    step = 0
    while len(ended) < len(wanted):
        while waiting and program.arrivals[waiting[0]].step <= step:
            index = waiting.pop(0)
            arrival = program.arrivals[index]
            tokens, media = engine_setups.prompt_and_media(proposer, arrival)

            def emit(output: StepOutput, index: int = index) -> None:
                got[index].extend(output.tokens)
                if output.finish_reason is not None:
                    ended[index] = output.error or str(output.finish_reason)

            state = RequestState(
                prompt=tuple(tokens), params=SamplingParams(max_tokens=arrival.max_tokens), media=tuple(media)
            )
            numbers[index] = decode.submit(state, emit)
        for index, number in numbers.items():
            after = program.arrivals[index].abort_after
            if after is not None and step > program.arrivals[index].step + after and index not in ended:
                decode.abort(number)
                ended[index] = "abort"
        _deliver(prefill, decode, to_prefill, to_decode)
        groups |= {request.group for request in taker._requests.values()}
        step += 1
        if step > 20_000:
            raise WrongTokens(f"{len(wanted) - len(ended)} requests didn't end")
    while prefill.num_requests or prefill.has_work or decode.has_work or to_prefill or to_decode:
        _deliver(prefill, decode, to_prefill, to_decode)
    taker.drain()
    prefill.remove_peer(_PEER_ID)
    decode.remove_peer(_PEER_ID)
    failed = {index: reason for index, reason in ended.items() if reason not in ("abort", "length", "stop")}
    if failed:
        raise WrongTokens(f"requests ended with errors: {failed}")
    check_tokens(dict(enumerate(got)), ended, wanted)
    return {
        "requests": len(wanted),
        "aborted": sum(reason == "abort" for reason in ended.values()),
        "arrived": decode.counts["arrived"],
        "groups": len(groups),
    }


def _deliver(
    prefill: PrefillWorker, decode: DecodeWorker, to_prefill: deque[WireMessage], to_decode: deque[WireMessage]
) -> None:
    while to_prefill:
        prefill.handle_message(_PEER_ID, to_prefill.popleft())
    while to_decode:
        decode.handle_message(_PEER_ID, to_decode.popleft())
    prefill.run_iteration()
    decode.run_iteration()


def main() -> int:
    """Run programs of a prefill device and data-parallel decode ranks; print counts and errors as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensor", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--data", type=int, default=2)
    parser.add_argument("--proposer", choices=(*PROPOSERS, *HYBRIDS))
    parser.add_argument("--drop", choices=NETWORK)
    parser.add_argument("--strategy", default="mixed", help="how schedules are drawn; program: the order of the program")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no program after so long")
    options = parser.parse_args()
    if not 1 < options.tensor * options.data <= _DEVICES:
        parser.error(f"--tensor times --data is {options.tensor * options.data}; expected 2 to {_DEVICES} ranks")
    from outrider_sim.exploration import run_once
    from outrider_sim.strategies import make_strategy

    devices, began = SimulatedDevices(), time.monotonic()
    total: dict[str, int] = {"programs": 0}
    errors: list[str] = []
    for seed in range(options.seed, options.seed + options.programs):
        if time.monotonic() - began > options.seconds:
            break
        found: dict[str, int] = {}

        def once(_: object, seed: int = seed, found: dict[str, int] = found) -> None:
            layout = ParallelConfig(tensor=options.tensor, data=options.data)
            found.update(run(devices, seed, layout, proposer=options.proposer, drop=options.drop))

        error = run_once(devices.backends[0], once, make_strategy(options.strategy, seed, {}))  # type: ignore[arg-type]
        if error is not None:
            errors.append(f"{seed}: {type(error).__name__}: {str(error)[:600]}")
            break
        total["programs"] += 1
        for name, value in found.items():
            total[name] = total.get(name, 0) + value
        print(f"{seed}: {found}", file=sys.stderr, flush=True)
    print(json.dumps({**total, "told": errors, "seconds": round(time.monotonic() - began, 1)}, indent=1))
    return bool(errors) != (options.drop is not None)


if __name__ == "__main__":
    sys.exit(main())
