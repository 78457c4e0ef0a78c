"""Many random programs on right backends, in many processes: `python tests/conformance/long_programs.py --programs 10000`.

Each process draws from a seed of its own. Prints a line a backend, and every conviction: there must be none. `npu` and `rocm`
run on their emulations; `cuda` needs a GPU, and is left out unless it's named.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = {
    "threads": ["examples/threads_backend"],
    "toy": ["examples/toy_driver", "examples/toy_backend/src"],
    "npu": ["tests/vendors/emulated"],
    "rocm": ["tests/vendors/emulated"],
}
EMULATIONS = {"npu": "emulation", "rocm": "emulation_hip"}
BACKENDS = ("cpu", "sim", "sim:like=npu", "sim:like=rocm", "sim:late=copies", "threads", "toy", "npu", "rocm")


def child(spec: str, programs: int, seed: int, families: list[str]) -> None:
    """In a process of its own: programs of each family; raises at the first that fails."""
    import importlib
    from importlib.metadata import EntryPoint

    name = spec.partition(":")[0]
    if name in EMULATIONS:
        importlib.import_module(EMULATIONS[name])
    from outrider.device import ENTRY_POINT_GROUP
    from outrider.registry import Registry
    from outrider_conformance.programs.trial import convict, share

    registry = Registry([EntryPoint(name, f"outrider_{name}.plugin", ENTRY_POINT_GROUP)])
    tried = 0
    for family in families:
        count = share(family, programs)
        opened = lambda: registry.create(registry.select(spec))  # noqa: E731
        tried += convict(opened, backend=spec, family=family, count=count, start=seed)
    print(f"tried {tried}", flush=True)


def start(spec: str, programs: int, seed: int, families: str) -> subprocess.Popen:
    """One process."""
    search = [str(ROOT / place) for place in PLACES.get(spec.partition(":")[0], [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*search, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, __file__, "--child", spec, "--programs", str(programs), "--seed", str(seed)]
    return subprocess.Popen(
        [*command, "--families", families], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", metavar="NAME", help=f"of {', '.join(BACKENDS)}, cuda (default: all)")
    parser.add_argument("--programs", type=int, default=10_000, help="for each backend")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--seed", type=int, default=1000, help="of the first process")
    parser.add_argument("--families", default="order,copies,memory,threads,graphs,bound", help="of programs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.programs, options.seed, options.families.split(","))
        return 0
    bad = 0
    for spec in options.backend or BACKENDS:
        began, each = time.monotonic(), -(-options.programs // options.processes)
        running = [start(spec, each, options.seed + n, options.families) for n in range(options.processes)]
        said = [process.communicate()[0] for process in running]
        convicted = [text for process, text in zip(running, said, strict=True) if process.returncode]
        tried = sum(int(text.rpartition("tried ")[2]) for text in said if "tried " in text)
        seconds = time.monotonic() - began
        print(f"{spec}: {tried} programs, {len(convicted)} of {len(running)} processes convict, {seconds:.0f} s", flush=True)
        for text in convicted:
            print(text[-3500:], flush=True)
        bad += len(convicted)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
