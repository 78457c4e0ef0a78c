"""Ten thousand random programs on every right backend: `python tests/conformance/long_programs.py`. None may be convicted.

Programs come in portions of 250, each drawn from a seed of its own and carried out in a process of its own. So what two
machines share out as `--seed 0 --programs 5000` and `--seed 20 --programs 5000` is what one does as `--programs 10000`.

`npu` and `rocm` run on their emulations; `own-queue` is what `outrider new-backend --kind own-queue` writes. `cuda` needs a
GPU, and is left out unless it's named. Prints a line for each backend, and every conviction with its program.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from forks import Fork, run_concurrently  # noqa: E402

PLACES = {
    "threads": ["examples/threads_backend"],
    "toy": ["examples/toy_driver", "examples/toy_backend/src"],
    "npu": ["tests/vendors/emulated"],
    "rocm": ["tests/vendors/emulated"],
}
EMULATIONS = {"npu": "emulation", "rocm": "emulation_hip"}
BACKENDS = (
    "cpu",
    "sim",
    "sim:like=npu",
    "sim:like=rocm",
    "sim:late=copies",
    "threads",
    "toy",
    "own-queue",
    "npu",
    "rocm",
)
FAMILIES = "order,copies,memory,threads,graphs,bound"
PORTION = 250


class Portion:
    """A fork that carries out programs of one seed: torch is imported once, and each has a device of its own.

    ``outcome()`` returns (right, seconds, output); a portion that takes longer than ``limit_s`` hangs, and is ended.
    """

    def __init__(self, spec: str, programs: int, seed: int, families: list[str], output: Path, limit_s: float) -> None:
        def run(_: int) -> int:
            print(f"tried {carry_out(spec, programs, seed, families)}", flush=True)
            return 0

        self._fork, self._output, self._limit_s = Fork(run, output), output, limit_s

    def outcome(self) -> tuple[bool, float, str] | None:
        code, seconds, hangs = self._fork.exit_code(), time.monotonic() - self._fork.began, ""
        if code is None:
            if seconds <= self._limit_s:
                return None
            self._fork.kill()
            hangs = f"\nhangs: it didn't end in {self._limit_s:.0f} s\n"
        return code == 0, seconds, self._output.read_text(errors="replace") + hangs


def carry_out(spec: str, programs: int, seed: int, families: list[str]) -> int:
    """Programs of each family; returns how many were tried. Raises for the first that is convicted."""
    from importlib.metadata import EntryPoint

    name = spec.partition(":")[0]
    if name == "own-queue":
        name = spec = written(Path(tempfile.mkdtemp(dir=os.environ["OUTRIDER_LONG"])))
    sys.path[:0] = [str(ROOT / place) for place in PLACES.get(name, [])]
    if name in EMULATIONS:
        importlib.import_module(EMULATIONS[name])
    if name == "npu":  # its package is of one version of torch; the emulation goes with any
        importlib.import_module("outrider_npu.plugin").version_mismatch = lambda *_: None
    from outrider.device import ENTRY_POINT_GROUP
    from outrider.registry import Registry
    from outrider_conformance.programs.trial import program_count, try_programs

    registry = Registry([EntryPoint(name, f"outrider_{name}.plugin", ENTRY_POINT_GROUP)])
    tried = 0
    for family in families:
        opened = lambda: registry.create(registry.select(spec))  # noqa: E731
        count = program_count(family, programs)
        tried += try_programs(opened, backend=spec, family=family, count=count, start=seed)
    return tried


def written(place: Path) -> str:
    """Write the package for a device without a torch module; returns its name."""
    from outrider_conformance.commands.new_backend import skeleton

    for path, text in skeleton("acme", "own-queue").items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text, encoding="utf-8")
    sys.path.insert(0, str(place / "src"))
    return "acme"


def warm_up() -> None:
    """Import once what all of them need."""
    import hypothesis  # noqa: F401
    import torch

    import outrider_conformance.commands.new_backend
    import outrider_conformance.programs.trial  # noqa: F401

    torch.set_num_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", metavar="NAME", help=f"of {', '.join(BACKENDS)}, cuda (default: all)")
    parser.add_argument("--programs", type=int, default=10_000, help="for each backend")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the first portion")
    parser.add_argument("--families", default=FAMILIES, help="of programs")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after this long")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a portion counts as one that hangs")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    began, specs = time.monotonic(), options.backend or list(BACKENDS)
    portions = range(-(-options.programs // PORTION))
    counts = [min(PORTION, options.programs - PORTION * n) for n in portions]
    tried, seconds, convictions = Counter(), Counter(), defaultdict(list)
    warm_up()
    with tempfile.TemporaryDirectory(prefix="outrider-programs-") as scratch:
        os.environ["OUTRIDER_LONG"] = scratch
        families, limit_s = options.families.split(","), options.limit
        # Backends in turn: what the time doesn't suffice for is left out of all of them alike.
        waiting = [(spec, counts[n], options.seed + n) for n in portions for spec in specs]
        jobs = (
            ((spec, seed), partial(Portion, spec, count, seed, families, Path(scratch, f"{number}"), limit_s))
            for number, (spec, count, seed) in enumerate(waiting)
        )
        for (spec, seed), (right, spent, text) in run_concurrently(jobs, options.processes, options.seconds):
            seconds[spec] += spent
            if right:
                tried[spec] += int(text.rpartition("tried ")[2])
            else:
                convictions[spec].append((seed, text))
                print(f"{spec}, seed {seed}:\n{text[-4000:]}", flush=True)
    for spec in specs:
        print(
            f"{spec}: {tried[spec]} programs, {len(convictions[spec])} of {len(portions)} portions convict, "
            f"{seconds[spec]:.0f} s of processes",
            flush=True,
        )
    print(f"{time.monotonic() - began:.0f} s with {options.processes} processes")
    left = any(tried[spec] < options.programs for spec in specs) and options.families == FAMILIES
    return 1 if left or any(convictions.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
