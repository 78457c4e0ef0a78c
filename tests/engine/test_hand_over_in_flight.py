"""Hand-over on a simulated device, where nothing is ordered but by fences: its streams run in drawn orders."""

import pytest
import torch

from model.test_vision import IMAGE, picture
from outrider import Engine, SamplingParams
from outrider.model import MediaProcessor, load_decoder, load_eagle, load_vision, open_head
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.tree import DynamicTree
from outrider_cpu.backend import CpuBackend
from outrider_proof.checkpoints import write_vision_checkpoint
from outrider_proof.tiny import plain_config
from outrider_sim.plugin import create_backend

TOKENS = 10
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
PROMPT, OTHER = (5, 9, 20, 33, 41, 7), (8, 8, 3)


def engines(directory, backend, tree=False):
    """A maker of engines on one backend, which share the weights."""
    target = load_decoder(directory / "target", backend=backend, dtype=torch.float32)
    head = load_eagle(open_head(directory / "eagle", target=target, backend=backend, dtype=torch.float32))

    def make():
        shape = DynamicTree(topk=2, depth=3)
        proposer = EagleTreeProposer(head, shape) if tree else EagleProposer(head, draft_tokens=3)
        config = plain_config(max_context=32, max_requests=2, page_size=4, overlap=True, prefix_cache=False)
        return Engine(target, backend, proposer=proposer, config=config)

    return make


def add(engine, prompt):
    return engine._requests[engine.add_request(prompt, PARAMS)]


def take(giver, taker, record):
    while len(record.output) < 4:
        giver.step()
    return taker._requests[taker.take_over(giver.hand_over(record.id))]


def run(*engines):
    while any(engine.has_unfinished for engine in engines):
        for engine in engines:
            engine.step()


@pytest.fixture(scope="module")
def expected(bundled_dir):
    """Tokens of each prompt, on the host."""
    host = engines(bundled_dir, CpuBackend())()
    return {prompt: host.generate([prompt], PARAMS)[0].token_ids for prompt in (PROMPT, OTHER)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("seed", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_rows_and_pages_find_another_owner_at_once(bundled_dir, expected, tree, seed):
    make = engines(bundled_dir, create_backend(0, {"strategy": "random", "seed": seed}), tree)
    first, second = make(), make()
    beside = [add(each, OTHER) for each in (first, second)]
    second.step()
    taken = take(first, second, add(first, PROMPT))
    again = add(first, PROMPT)
    run(first, second)
    assert tuple(taken.output) == tuple(again.output) == expected[PROMPT]
    assert [tuple(each.output) for each in beside] == [expected[OTHER]] * 2


def test_from_one_backend_to_another_and_back(bundled_dir, expected):
    device, host = (engines(bundled_dir, b)() for b in (create_backend(0, {"strategy": "random", "seed": "3"}), CpuBackend()))
    for giver, taker in ((device, host), (host, device)):
        taken = take(giver, taker, add(giver, PROMPT))
        run(giver, taker)
        assert tuple(taken.output) == expected[PROMPT]


def test_images_on_a_device_that_runs_behind(tmp_path):
    """The tower, the features and the positions of requests in flight, under drawn schedules."""
    write_vision_checkpoint(tmp_path, "qwen2_vl")
    processor = MediaProcessor.from_checkpoint(tmp_path)
    media = [[processor.image(picture(20, 28))], [], [processor.image(picture(16, 16, seed=1))]]
    prompts = [[1, *IMAGE, 9, 17], [1, 5, 9], [1, 5, *IMAGE, 9]]
    found = []
    for backend in (CpuBackend(), create_backend(0, {"strategy": "random", "seed": "5"})):
        target = load_decoder(tmp_path, backend=backend, dtype=torch.float32)
        tower = load_vision(tmp_path, backend=backend, dtype=torch.float32)
        config = plain_config(max_context=64, max_requests=2, page_size=4, overlap=True, prefill_chunk=8)
        results = Engine(target, backend, config=config, vision=tower).generate(prompts, PARAMS, media=media)
        found.append([result.token_ids for result in results])
    assert found[0] == found[1]
