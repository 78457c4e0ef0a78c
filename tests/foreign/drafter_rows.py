"""Whose temperatures and seeds the draft model of vLLM's second runner is given, on the simulated device.

    PYTHONPATH=tests python -m foreign.drafter_rows [STRATEGY]

Eight requests share four rows. Each proposal's copy of the seeds is held against what the host had put there for that step.
One line of JSON: proposals, rows that held another request's seed, and how many of those rows belong to a request that is
still in a batch after the next one (so that its proposals or tokens would count). See ``docs/findings``.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import Any

ENDS = MappingProxyType({0: 3, 1: 5, 2: 4, 4: 2, 5: 6})


def main(strategy: str) -> None:
    from outrider import get_backend

    backend = get_backend(f"sim:strategy={strategy}")
    from outrider_vllm.install import install

    launches = install()
    from foreign.vllm_on_sim import engine
    from foreign.vllm_on_sim.workloads import Workload, prompt_without_repeats

    prompts = tuple(prompt_without_repeats(3 * at, 4 + at) for at in range(8))
    work = Workload(name="rows", purpose="rows go to other requests", rounds=(prompts,), stop_after=ENDS)
    batches: list[set[str]] = []
    proposals: list[tuple[Any, Any, dict[int, str]]] = []

    def listen(whole: Any) -> Any:
        runner = whole.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        speculator, copy, step = runner.speculator, runner.speculator._copy_request_inputs, runner.execute_model

        def copied(*args: Any, **kwargs: Any) -> None:
            copy(*args, **kwargs)
            meant = runner.sampler.sampling_states.seeds.np.copy()
            proposals.append((meant, speculator.seeds.clone(), dict(runner.req_states.index_to_req_id)))

        def execute(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled.num_scheduled_tokens:
                batches.append(set(scheduled.num_scheduled_tokens))
            return step(scheduled, *args, **kwargs)

        speculator._copy_request_inputs, runner.execute_model = copied, execute
        return int

    with tempfile.TemporaryDirectory() as folder:
        outcome = engine.run_workload(
            backend,
            launches,
            Path(folder),
            work,
            tokens=8,
            asynchronous=True,
            speculate=True,
            draft_model=True,
            revert=listen,
        )
    others = late = 0
    for at, (meant, taken, owners) in enumerate(proposals):
        for row in (taken.cpu().numpy() != meant).nonzero()[0]:
            others += 1
            late += any(owners.get(int(row)) in batch for batch in batches[at + 2 :])
    told = {"proposals": len(proposals), "others": others, "late": late, "judged": outcome.judged, "tokens": outcome.tokens}
    print("OUTCOME " + json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # as in foreign.vllm_on_sim


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "lazy")
