"""The first test to read: text, speculation, the same tokens, and a missing fence that is found and named.

The bundled model has 4.5 million parameters and writes Python-like text. The tests take seconds on one core, without a GPU.
"""

import pytest

from outrider import Engine, EngineConfig, SamplingParams, get_backend
from outrider.bundled import bundled
from outrider.engine.fences import FENCES
from outrider_proof.explorations import DecodeExplorer
from outrider_sanitizer import RaceError, watch

PROMPT = "def read(self, size=-1):\n"
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


def load_engine(backend: str, speculate: str = "none", *, overlap: bool = False) -> Engine:
    """Load the bundled target model and, to speculate, its EAGLE draft head."""
    return Engine.from_checkpoint(
        bundled("target"),
        get_backend(backend),
        draft_dir=bundled("eagle") if speculate == "eagle" else None,
        speculate=speculate,
        config=EngineConfig(max_requests=2, max_context=96, draft_tokens=3, dtype="float32", overlap=overlap),
    )


def generate(engine: Engine):
    """Continue the prompt by 24 tokens. Temperature 0 takes the most likely token each time."""
    (completion,) = engine.generate([engine.tokenizer.encode(PROMPT)], GREEDY)
    return completion


@pytest.fixture(scope="module")
def plain():
    """The output of greedy decoding without speculation, which every other output must equal."""
    return generate(load_engine("cpu"))


# 1. Generate. The prefill of the prompt yields the first token. Without speculation, each iteration then runs the target
#    model once and yields one token.


def test_the_model_continues_a_prompt(plain):
    text = load_engine("cpu").tokenizer.decode(plain.token_ids)
    assert "self" in text
    assert len(plain.token_ids) == 24
    assert plain.iterations == 23
    assert plain.acceptance_length == 1.0


# 2. Speculate. The draft head proposes 3 tokens. The target model verifies them in one call, and keeps those that it would
#    have chosen itself, plus one token of its own. An iteration yields 1 to 4 tokens. The tokens do not change.


def test_speculation_gives_the_same_tokens_in_fewer_iterations(plain):
    completion = generate(load_engine("cpu", "eagle"))
    assert completion.token_ids == plain.token_ids
    assert completion.iterations < plain.iterations
    assert 1.0 < completion.acceptance_length <= 4.0


# 3. Overlap. `sim` is a simulated device with streams. The host plans iteration n + 1 while the device runs iteration n.
#    Only fences order work on different streams. The sanitizer watches each access and reports every pair without an order.


def test_overlap_gives_the_same_tokens_without_a_race(plain):
    engine = load_engine("sim", "eagle", overlap=True)
    with watch(engine.backend) as report:
        completion = generate(engine)
    report.raise_if_any()
    assert completion.token_ids == plain.token_ids
    assert report.streams >= 3  # forward, schedule and copy, at least
    assert report.replays > 0  # the engine replays its iterations from graphs; the sanitizer sees inside them


# 4. Leave out one fence. `results_copied` lets the host read the tokens of an iteration only after their copy has ended.
#    Without its wait, the sanitizer finds the race in one run, and the finding names the fence, whatever the tokens were.


def test_a_missing_fence_is_found_and_named():
    fence = "results_copied"
    (row,) = [each for each in FENCES if each.name == fence]
    assert (row.producer, row.consumers) == ("copy", ("host",))

    backend = get_backend("sim")
    complete = DecodeExplorer(backend, speculate="eagle")
    complete.run_program(complete.program(0), backend)  # with every fence: no race, and the tokens of greedy decoding

    backend.control.reset()
    broken = DecodeExplorer(backend, speculate="eagle", drop=fence)
    with pytest.raises(RaceError, match="read after write"):
        broken.run_program(broken.program(0), backend)
    assert broken.implied() == (fence,)
