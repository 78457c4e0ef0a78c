"""Setups of the proof: a proposer, an execution mode and a simulated device or a vendor's plugin on an emulation."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import Engine
from outrider.device import ConfigError, Fence
from outrider.engine.requests.request import Request
from outrider_proof.decode_program import HostProgram, Serving
from outrider_proof.engine_setups import MODES, VISION, Models, host_models, prompt_and_media
from outrider_proof.proposers import MAKERS
from outrider_sim.plugin import create_backend

PROPOSERS = ("none", *(name for name in MAKERS if name != "none"), VISION)
PERSONALITIES = ("cuda", "rocm", "npu")

PLUGINS = {"outrider_npu": "emulation", "outrider_rocm": "emulation_hip"}
"""Vendor plugins that replace a personality: the plugin's code runs on an emulation of the vendor's package.

The value is the module of the emulation, in the directory that :attr:`EngineSetup.emulations` names. It has ``make()``, which
returns the plugin's backend, and that of ``outrider_npu`` has ``lift_limits()``, which lets CANN's operators take float64.
"""


@dataclass(frozen=True)
class EngineSetup:
    """A row of the tables. ``mode``: staged, staged with graphs, or fused; ``like``: a personality, or a plugin.

    ``emulations``: the directory with the emulations of vendors' packages; a plugin needs it.
    """

    proposer: str
    mode: str
    like: str = "cuda"
    emulations: Path | None = None

    @property
    def family(self) -> str:
        """The device that the personality or the plugin imitates: cuda, rocm or npu."""
        return self.like.removeprefix("outrider_")

    @property
    def name(self) -> str:
        """The name of the setup in records and tables."""
        return f"{self.proposer}, {self.mode}, {self.like}"


def supports_mode(setup: EngineSetup) -> bool:
    """Return True if the device supports the mode: ``npu`` and the ROCm plugin have no fused mode."""
    if setup.like == "outrider_rocm" and setup.mode == "fused":
        return False
    return setup.family != "npu" or setup.mode != "fused"


def all_setups(
    likes: Iterable[str] = PERSONALITIES, emulations: Path | None = None, *, proposers: Iterable[str] = PROPOSERS
) -> list[EngineSetup]:
    """Return every setup of these ``proposers`` that its device supports."""
    each = (EngineSetup(proposer, mode, like, emulations) for proposer in proposers for mode in MODES for like in likes)
    return [setup for setup in each if supports_mode(setup)]


@functools.cache
def simulated_device(like: str, emulations: Path | None) -> Any:
    """Return the controllable device of a setup, one per process. Puts the emulation's directory on ``sys.path``.

    Raises :class:`ConfigError` for a plugin without the directory of its emulation.
    """
    if like not in PLUGINS:
        return create_backend(0, {"like": like})
    if emulations is None or not (emulations / f"{PLUGINS[like]}.py").is_file():
        raise ConfigError(
            f"{like} runs on the emulation of its vendor's package, and there is no {PLUGINS[like]}.py in {emulations}; "
            "name its directory with --emulations DIR"
        )
    if str(emulations) not in sys.path:
        sys.path.insert(0, str(emulations))
    emulation = importlib.import_module(PLUGINS[like])
    if like == "outrider_npu":
        emulation.lift_limits()
    return emulation.make()


@functools.cache
def models(proposer: str, like: str | None, emulations: Path | None = None) -> Models:
    """Return the models of a proposer on a simulated device, or on the host if ``like`` is None."""
    return host_models(proposer) if like is None else Models(proposer, simulated_device(like, emulations))


class RecordedServing(Serving):
    """Serves a program and keeps the engine's :class:`Request` of each arrival."""

    def __init__(self, engines: Sequence[Engine], program: HostProgram, proposer: str) -> None:
        super().__init__(engines, program, lambda arrival: prompt_and_media(proposer, arrival))
        self.records: dict[int, Request] = {}

    def _place(self, index: int, side: int, request: int) -> None:
        super()._place(index, side, request)
        self.records[index] = self._engines[side]._requests[request]

    def acceptance(self) -> dict[int, tuple[int, int]]:
        """Return (iterations, verified tokens) of each request that finished without abort or preemption."""
        return {
            index: (record.iterations, record.verified_tokens)
            for index, record in self.records.items()
            if self.ended.get(index) in ("stop", "length") and not record.preemptions
        }


def engines_for(setup: EngineSetup, program: HostProgram, wrap: Callable[[Fence], Fence] | None = None) -> list[Engine]:
    """Return the engine of a program, or two engines if requests move; ``wrap`` becomes their ``wrap_fence``."""
    moves = any(arrival.moves for arrival in program.arrivals)
    loaded = models(setup.proposer, setup.like, setup.emulations)
    return [loaded.engine(program, mode=setup.mode, wrap=wrap) for _ in range(2 if moves else 1)]


@functools.cache
def synchronous_acceptance(proposer: str, program: HostProgram) -> dict[int, tuple[int, int]]:
    """Return the acceptance of each request in engines on the host without overlap."""
    moves = any(arrival.moves for arrival in program.arrivals)
    loaded = models(proposer, None)
    served = RecordedServing([loaded.engine(program, overlap=False) for _ in range(2 if moves else 1)], program, proposer)
    served.step_until_idle()
    return served.acceptance()
