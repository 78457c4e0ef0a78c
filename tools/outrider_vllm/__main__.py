"""Run vLLM on the simulated device and print what was seen as JSON: `python -m outrider_vllm --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from outrider_vllm.workloads import WORKLOADS, workload


def main() -> None:
    """Parse, run, print, end."""
    parser = argparse.ArgumentParser(prog="python -m outrider_vllm", description=__doc__)
    parser.add_argument("--tokens", type=int, default=12, help="tokens of each of the three requests")
    parser.add_argument("--strategy", default="program", help="which operation runs next (docs/simulator.md)")
    parser.add_argument("--synchronous", action="store_true", help="without asynchronous scheduling")
    parser.add_argument("--speculate", action="store_true", help="with n-gram proposals")
    parser.add_argument("--draft-model", action="store_true", help="with a draft model's proposals")
    parser.add_argument("--work", default="plain", choices=[w.name for w in WORKLOADS], help="what it's asked for")
    parser.add_argument("--offload", action="store_true", help="the same as --work offload")
    parser.add_argument(
        "--first-runner", action="store_true", help="its older model runner; that speculates with a draft model"
    )
    parser.add_argument("--revert", default="", help="take one ordering out: a name of outrider_vllm.reverts")
    given = parser.parse_args()

    from outrider import get_backend

    if given.first_runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # vLLM's own switch; it has no other
    backend = get_backend(f"sim:strategy={given.strategy}")
    from outrider_vllm.install import install

    launches = install()
    from outrider_vllm import engine, reverts

    undo = {r.name: r for r in reverts.REVERTS}
    with tempfile.TemporaryDirectory() as folder:
        outcome = engine.run(
            backend, launches, Path(folder), workload("offload" if given.offload else given.work), tokens=given.tokens,
            asynchronous=not given.synchronous, speculate=given.speculate or given.draft_model,
            draft_model=given.draft_model or given.first_runner,
            revert=undo[given.revert].apply if given.revert else None,
        )  # fmt: skip
    print("OUTCOME " + json.dumps(asdict(outcome)))
    sys.stdout.flush()
    # vLLM's and Triton's ends of process meet tensors of a device that is gone.
    os._exit(0)


main()
