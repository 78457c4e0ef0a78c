"""The main function of the script that reproduces a failing program."""

from __future__ import annotations

import argparse
import sys

from outrider.device import Backend
from outrider.registry import Registry
from outrider_conformance.lab import Lab, StreamDelay
from outrider_conformance.programs.execution import SharedStreams
from outrider_conformance.programs.explanation import broken_promise
from outrider_conformance.programs.language import DeviceProgram
from outrider_conformance.programs.model import judge
from outrider_conformance.programs.trial import try_program


def main(program: DeviceProgram) -> None:
    """Run ``program`` on the backend that the command line names. The exit code is 1 if a run fails."""
    parser = argparse.ArgumentParser(description="One program over the interface, judged by the model of its contract.")
    parser.add_argument("--backend", required=True, help="as `outrider backends` lists them")
    parser.add_argument("--times", type=int, default=20, help="how often, where time decides")
    options = parser.parse_args()
    registry = Registry()
    model, pace = judge(program), StreamDelay(target_ms=1.0)

    def opened() -> Backend:
        return registry.create(registry.select(options.backend))

    failed = 0
    for number in range(options.times):
        try:
            try_program(SharedStreams(Lab(opened(), pace)), model, number)
        except Exception as error:
            failed += 1
            if failed == 1:
                member, words = broken_promise(model, error)
                print(f"{member} promises: “{words}”\n{error}")
    print(f"failed in {failed} of {options.times} runs")
    sys.exit(1 if failed else 0)
