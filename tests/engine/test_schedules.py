"""`generate` on the simulated device gives the reference's tokens under every strategy."""

import pytest
import torch

from outrider import Engine, SamplingParams
from outrider.model import load_decoder, load_eagle, open_head
from outrider.registry import get_backend
from outrider.speculative.eagle import EagleProposer
from outrider_proof.tiny import plain_config

STREAMS = ("schedule", "forward", "plan", "copy")
STRATEGIES = [
    "program",
    "lazy",
    *(f"{kind}:stream={stream}" for kind in ("slowest", "fastest") for stream in STREAMS),
    "random",
    "pct:d=2",
    "pct:d=3",
    "mixed",
]
SLOW_SCHEDULES = 200
"""In all, shared evenly by the strategies that draw; the others have one schedule each."""


@pytest.fixture(scope="module")
def device(bundled_dir):
    backend = get_backend("sim")
    target = load_decoder(bundled_dir / "target", backend=backend, dtype=torch.float32)
    head = load_eagle(open_head(bundled_dir / "eagle", target=target, backend=backend, dtype=torch.float32))
    backend.synchronize()
    return backend, target, head


def explore(device, bundle32, prompt, strategy, schedules):
    backend, target, head = device
    expected = bundle32.plain(prompt, 16).token_ids

    def program(_):
        config = plain_config(max_requests=2, max_context=64, overlap=True)
        engine = Engine(target, backend, proposer=EagleProposer(head, draft_tokens=4), config=config)
        (result,) = engine.generate([prompt], SamplingParams(max_tokens=16))
        assert result.token_ids == expected

    backend.control.reset()
    result = backend.control.explore(program, strategy=strategy, iterations=schedules, seed=0)
    assert result.failure is None, str(result.failure.error)
    return result.runs


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_tokens_under_every_strategy(device, bundle32, prompt_tokens, strategy):
    assert explore(device, bundle32, prompt_tokens[0][:12], strategy, 1) == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["random", "pct:d=2", "pct:d=3", "mixed"])
def test_same_tokens_under_many_schedules(device, bundle32, prompt_tokens, strategy):
    share = SLOW_SCHEDULES // 4
    assert explore(device, bundle32, prompt_tokens[0][:12], strategy, share) == share
