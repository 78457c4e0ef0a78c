"""Run vLLM on the simulated device and print tokens, counts and findings as JSON:
`PYTHONPATH=tests python -m foreign.vllm_on_sim --help`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from foreign.vllm_on_sim.workloads import WORKLOADS, find_workload


def main() -> None:
    """Run the workload that the command line names, print its outcome as JSON and end the process."""
    parser = argparse.ArgumentParser(prog="python -m foreign.vllm_on_sim", description=__doc__)
    parser.add_argument("--tokens", type=int, default=12, help="number of output tokens of each request")
    parser.add_argument("--strategy", default="program", help="order of operations on the simulated device")
    parser.add_argument("--synchronous", action="store_true", help="disable asynchronous scheduling")
    parser.add_argument("--speculate", action="store_true", help="speculate with n-gram proposals")
    parser.add_argument("--draft-model", action="store_true", help="speculate with a draft model")
    parser.add_argument("--work", default="plain", choices=[w.name for w in WORKLOADS], help="workload to run")
    parser.add_argument(
        "--first-runner", action="store_true", help="use vLLM's older model runner; with --speculate: with a draft model"
    )
    parser.add_argument("--revert", default="", help="remove one ordering from vLLM: a name of foreign.vllm_on_sim.reverts")
    options = parser.parse_args()

    from outrider import get_backend

    if options.first_runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # vLLM has no other switch for this
    backend = get_backend(f"sim:strategy={options.strategy}")
    from outrider_vllm.install import install

    launches = install()
    from foreign.vllm_on_sim import engine, reverts

    reverts_by_name = {revert.name: revert for revert in reverts.REVERTS}
    with tempfile.TemporaryDirectory() as folder:
        outcome = engine.run_workload(
            backend, launches, Path(folder), find_workload(options.work), tokens=options.tokens,
            asynchronous=not options.synchronous, speculate=options.speculate or options.draft_model,
            draft_model=options.draft_model or options.first_runner,
            revert=reverts_by_name[options.revert].apply if options.revert else None,
        )  # fmt: skip
    print("OUTCOME " + json.dumps(asdict(outcome)))
    sys.stdout.flush()
    # The exit handlers of vLLM and Triton would use tensors of a device that no longer exists.
    os._exit(0)


main()
