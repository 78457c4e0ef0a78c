"""``outrider explore decode``: run the engine on random host programs, under random schedules or in program order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.report import CommandReport
from outrider.device.errors import CapabilityError
from outrider_proof.decode_program import DecodeExplorer, HostProgram

if TYPE_CHECKING:
    from outrider.device import Backend

DECODE = "decode"
EVERY = "every"
_PROGRAM_ORDER = "program"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeExploration:
    """Options of the command, and the device."""

    make: Callable[[], Backend]
    """Opens a fresh device: a real device has few streams, and each engine keeps its own."""
    iterations: int
    seed: int
    strategy: str | None = None
    """Strategy of the schedules. None: *mixed* on a controllable device, else *program*, which the sanitizer needs once."""
    drop_fence: str | None = None
    """Name of the fence to leave out, or ``every`` for each fence in turn."""
    drop: str = "wait"
    """Half of the fence to leave out: wait or record."""
    speculate: str = "eagle"
    draft_topk: int = 1
    mode: str = "staged"
    graphs: bool = False
    images: bool = False
    progress: Callable[[int], None] = lambda done: None
    """Gets the number of programs that have run."""

    def explorer(self, device: Backend) -> DecodeExplorer:
        """Return an explorer of these options on ``device``."""
        return DecodeExplorer(
            device,
            speculate=self.speculate,
            draft_topk=self.draft_topk,
            mode=self.mode,
            graphs=self.graphs,
            drop=self.drop_fence,
            half=self.drop,
            images=self.images,
        )

    @property
    def described(self) -> dict[str, Any]:
        """Return the options that a report repeats."""
        return {
            "program": DECODE,
            "strategy": self.strategy,
            "seed": self.seed,
            "speculate": self.speculate,
            "draft_topk": self.draft_topk,
            "mode": self.mode,
            "graphs": self.graphs,
            "images": self.images,
        }


def explore_decode(exploration: DecodeExploration) -> CommandReport:
    """Run host programs, each under a schedule of its own; stop at the first that fails."""
    device = exploration.make()
    default = "mixed" if device.control is not None else _PROGRAM_ORDER
    chosen = replace(exploration, strategy=exploration.strategy or default)
    if device.control is None and chosen.strategy != _PROGRAM_ORDER:
        raise CapabilityError(
            f"{device.label} decides its schedules itself: it runs decode in the order of the program alone; leave out "
            "--strategy and --replay, or use a backend such as 'sim'"
        )
    if chosen.images and not device.capabilities.asynchronous:
        raise CapabilityError(
            f"{device.label} computes in the host's own memory, which a vision tower reads without asking: the sanitizer "
            "would call that a race; explore images on a device that runs beside the host, such as 'sim'"
        )
    if chosen.drop_fence == EVERY:
        return _explore_every_fence(chosen, device)
    data = {
        **chosen.described,
        "dropped": f"{chosen.drop} of {chosen.drop_fence}" if chosen.drop_fence else None,
        **_explored(chosen, device, chosen.explorer(device)),
    }
    data.pop("left_out")
    return CommandReport(data=data, render=lambda console: _render(console, data), exit_code=1 if data["failed"] else 0)


def _explored(chosen: DecodeExploration, device: Backend, explorer: DecodeExplorer) -> dict[str, Any]:
    """Run one program after the other and return the number of runs and the first failure.

    ``left_out`` counts waits or records that were left out in programs where no other fence gives their order.
    """
    found: dict[str, Any] = {"runs": 0, "failed": False, "left_out": 0}
    for number in range(chosen.seed, chosen.seed + chosen.iterations):
        chosen.progress(found["runs"])
        program = explorer.program(number)
        error, schedule = _run(chosen, device, explorer, program, number)
        found["runs"] += 1
        if explorer.log is not None and not explorer.log.covered:
            found["left_out"] += explorer.log.left_out
        if error is not None:
            return found | {
                "failed": True,
                "run": number,
                "host_program": asdict(program),
                "error": {"type": type(error).__name__, "message": str(error)},
                "implied": list(explorer.implied()),
                **schedule,
            }
        if device.control is None:
            device = chosen.make()
            explorer = chosen.explorer(device)
    return found


def _run(
    chosen: DecodeExploration, device: Backend, explorer: DecodeExplorer, program: HostProgram, number: int
) -> tuple[BaseException | None, dict[str, Any]]:
    """Run one program once; return its error and, on a controllable device, the schedule that caused it."""
    control = device.control
    if control is None:
        try:
            explorer.run_program(program, device)
        except Exception as error:
            return error, {"shrunk": None, "orderings": []}
        return None, {}
    control.reset()
    result = control.explore(
        lambda backend: explorer.run_program(program, backend), strategy=str(chosen.strategy), iterations=1, seed=number
    )
    failure = result.failure
    if failure is None:
        return None, {}
    return failure.error, {"shrunk": str(failure.shrunk), "orderings": list(failure.orderings)}


def _explore_every_fence(chosen: DecodeExploration, device: Backend) -> CommandReport:
    """Run with every fence, then without each in turn: expect no finding first, then one per fence that is used."""
    from outrider.engine.fences import FENCES

    rows: list[dict[str, Any]] = []
    for name in (None, *(fence.name for fence in FENCES)):
        one = replace(chosen, drop_fence=name)
        if device.control is None or not rows:
            device = one.make()
        found = _explored(one, device, one.explorer(device))
        races = found["failed"] and found["error"]["type"] == "RaceError"
        rows.append(
            {
                "dropped": name,
                "used": name is None or found["left_out"] > 0,
                "runs": found["runs"],
                "found": races,
                "implied": found.get("implied", []),
                "error": found["error"] if found["failed"] and not races else None,
            }
        )
    right = all(_is_expected(row) for row in rows)
    data = {**chosen.described, "drop": chosen.drop, "device": device.label, "fences": rows, "right": right}
    return CommandReport(data=data, render=lambda console: _render_fences(console, data), exit_code=0 if right else 1)


def _is_expected(row: Mapping[str, Any]) -> bool:
    """Return True if a row is as expected: no finding with every fence, a race without a fence that is used."""
    if row["dropped"] is None:
        return not row["found"] and row["error"] is None
    return bool(row["found"]) or not row["used"]


def _render(console: Console, data: Mapping[str, Any]) -> None:
    if not data["failed"]:
        how = "in the order of the program" if data["strategy"] == _PROGRAM_ORDER else "each under a schedule of its own"
        console.print(Text(f"{data['runs']} host programs, {how}: all right", style="green"))
        return
    console.print(Text(f"host program {data['run']} failed: {data['error']['type']}", style="bold red"))
    console.print(data["error"]["message"], markup=False)
    if data["implied"]:
        console.print(Text(f"the finding implies: {', '.join(data['implied'])}", style="bold yellow"))
    console.print(f"run it again with: outrider explore decode --seed {data['run']} --iterations 1", markup=False)


def _render_fences(console: Console, data: Mapping[str, Any]) -> None:
    console.print(
        f"decode on {data['device']}, {data['mode']}{', graphs' if data['graphs'] else ''}: the {data['drop']} dropped"
    )
    table = Table("fence", "programs", "found", "the finding implies", box=None, pad_edge=False)
    for row in data["fences"]:
        result = "a race" if row["found"] else "nothing" if row["error"] is None else row["error"]["type"]
        if not row["used"]:
            result = "not used here"
        text = Text(result, style="green" if _is_expected(row) else "bold red")
        table.add_row(row["dropped"] or "(none)", str(row["runs"]), text, ", ".join(row["implied"]))
    console.print(table)
