"""Random programs over a hybrid model: the tokens of non-speculative decoding, and faults put back that they find."""

from dataclasses import replace
from itertools import pairwise

import pytest

from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.engine.requests.pages import DecodedState, PageKey, StateCheckpoints
from outrider.engine.state.input_upload import InputUpload
from outrider.engine.step import Step
from outrider.transports.link import LocalLink
from outrider_proof import tiny
from outrider_proof.decode_program import MOVING
from outrider_proof.engine_setups import HYBRID, host_models, random_host_program, reference_tokens
from outrider_proof.proposers import MAKERS
from outrider_proof.rank_engine import HYBRID_PROPOSERS
from outrider_proof.tiny import plain_config
from proof.hybrid_faults import (
    FAULTS,
    a_checkpoint_lacks_pending_tokens,
    a_decoded_state_is_kept_at_any_length,
    wrong_requests,
)
from proof.program_checks import prove_program, run_once_checked
from proof.setups import EngineSetup

MODES = ("staged", "graphs", "fused")


@pytest.mark.sample(3)
@pytest.mark.parametrize(("proposer", "number"), [(name, number) for number, name in enumerate(HYBRID_PROPOSERS)])
def test_a_program_of_each_proposer(proposer, number):
    assert wrong_requests(proposer, number, MODES[number % 3])[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("proposer", HYBRID_PROPOSERS)
def test_many_programs_of_each_proposer(proposer, mode):
    counts = dict.fromkeys(("requests", "hits", "preempted", "moved"), 0)
    for number in range(100, 130):
        wrong, found = wrong_requests(proposer, number, mode)
        assert wrong == [], number
        counts = {name: counts[name] + found[name] for name in counts}
    assert min(counts.values()) > 0


def test_samples_of_one_prompt_and_their_log_probabilities():
    """A second request or sample continues the first one's prefix. Speculation reports the same log-probabilities."""
    prompt, params = [3, 1, 4, 1, 5, 9, 2, 6, 5], SamplingParams(max_tokens=8, logprobs=2, ignore_eos=True)
    found = []
    for proposer in ("none", "mtp-chain"):
        loaded = host_models(proposer + HYBRID)
        config = plain_config(max_context=40, max_requests=2, page_size=4, prefill_chunk=4, dtype="float64")
        engine = Engine(loaded.target, loaded.backend, proposer=loaded.make(), config=config)
        (first,), (second,) = engine.generate([prompt], params), engine.generate([prompt], params)
        assert first.token_ids == second.token_ids
        assert engine.stats.prefix_hits == 8
        engine.generate([prompt[::-1]], replace(params, n=2, temperature=1.0))
        assert engine.stats.prefix_hits == 16
        found.append(first)
    assert found[0].token_ids == found[1].token_ids
    for one, other in zip(found[0].logprobs, found[1].logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-9)


def served_turns(proposer):
    """Cached tokens of each turn of a chat, and the turns whose tokens aren't those of an engine without a prefix cache."""
    loaded, params = host_models(proposer + HYBRID), SamplingParams(max_tokens=16, ignore_eos=True)
    config = plain_config(max_context=96, max_requests=2, page_size=4, prefill_chunk=8, dtype="float64", overlap=True)
    engine = Engine(loaded.target, loaded.backend, proposer=loaded.make(), config=config)
    alone = Engine(loaded.target, loaded.backend, config=replace(config, prefix_cache=False))
    text, hits, wrong = [0, 1, 4, 1, 5, 9, 2, 6, 5], [0], []
    for turn in range(3):
        (done,), (wanted,) = engine.generate([text], params), alone.generate([text], params)
        hits.append(engine.stats.prefix_hits)
        wrong += [] if done.token_ids == wanted.token_ids else [turn]
        text = [*text, *wanted.token_ids, 7, 8, turn]
    return [after - before for before, after in pairwise(hits)], wrong


@pytest.mark.parametrize(("proposer", "cached"), [("none", [0, 20, 32]), ("mtp-chain", [0, 8, 40])])
def test_turns_of_a_chat_continue_what_was_decoded(proposer, cached):
    """A checkpoint is where an iteration ended at a multiple of four tokens: at each without drafts, at some with drafts."""
    assert served_turns(proposer) == (cached, [])


@pytest.mark.parametrize("fault", [a_decoded_state_is_kept_at_any_length, a_checkpoint_lacks_pending_tokens])
def test_a_decoded_state_kept_at_an_unaccepted_length_is_found(fault):
    """The fault of sglang 35821, a boundary within the rejected drafts, and a state without the accepted ones."""
    with fault():
        assert served_turns("mtp-chain")[1] != []


def test_decoding_takes_one_row_of_another_prefix_at_most():
    """Many tokens of one request leave the checkpoints of other prompts alone. A row goes from checkpoint to checkpoint."""
    checkpoints = StateCheckpoints(first_row=3, count=2, interval=4)
    keys = [PageKey(None, (index,), ()) for index in range(5)]
    rows = [checkpoints.allocate_row(key) for key in keys[:2]]
    assert checkpoints.row_of(keys[0]) == rows[0]
    decoded = DecodedState()
    for key in keys[2:]:
        if checkpoints.provide_row(decoded):
            checkpoints.publish(decoded, key)
    assert checkpoints.row_of(keys[0]) == rows[0]
    assert not checkpoints.has(keys[1])
    assert checkpoints.row_of(keys[2]) == rows[1]
    assert not checkpoints.has(keys[3])


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_prompts_find_a_row_whatever_decoding_has(rows):
    """More requests decode than there are rows, and a request keeps its row if a copy had another length."""
    loaded = host_models("mtp-chain" + HYBRID)
    sizes = {"max_context": 48, "max_requests": 4, "page_size": 4, "prefill_chunk": 16, "dtype": "float64"}
    config = plain_config(**sizes, state_checkpoints=rows, overlap=True)
    engine = Engine(loaded.target, loaded.backend, proposer=loaded.make(), config=config)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    prompts = [[number, *range(1, 4 + number)] for number in range(9)]
    made = [done.token_ids for _ in range(2) for done in engine.generate(prompts, params)]
    assert made[:9] == made[9:]
    assert engine.load.state_checkpoints <= rows


def test_what_hybrids_refuse():
    loaded = host_models("none" + HYBRID)
    config = plain_config(max_context=40, max_requests=2, page_size=4, dtype="float64")
    tree = MAKERS["ngram-tree"](loaded.target, loaded.backend)
    with pytest.raises(ConfigError, match="drafts trees, and the model has recurrent layers"):
        Engine(loaded.target, loaded.backend, proposer=tree, config=config)
    with pytest.raises(ConfigError, match="the model has no recurrent layers"):
        tiny.engine(MAKERS["ngram"](tiny.target(), tiny.BACKEND), state_checkpoints=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_put_back_is_found(name):
    fault, proposer, number, mode = FAULTS[name]
    for arrival in random_host_program(number).arrivals:
        reference_tokens(proposer + HYBRID, arrival)
    with fault():
        assert wrong_requests(proposer, number, mode)[0] != []
    assert wrong_requests(proposer, number, mode)[0] == []


@pytest.mark.parametrize(
    ("setup", "number"),
    [
        pytest.param(EngineSetup("mtp-chain" + HYBRID, "fused"), 4, marks=pytest.mark.slow),
        pytest.param(EngineSetup("ngram" + HYBRID, "graphs", "npu"), 3, marks=pytest.mark.slow),
        pytest.param(EngineSetup("none" + HYBRID, "staged", "rocm"), 1, marks=pytest.mark.slow),
        (EngineSetup("hybrid-draft", "staged", "cuda"), 6),
        pytest.param(EngineSetup("hybrid-draft" + HYBRID, "fused"), 4, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_program_under_some_schedules(setup, number):
    """On the simulated device, watched by the sanitizer: no edge is missing."""
    assert prove_program(setup, number, 2)["failures"] == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fence", "proposer"),
    [
        *[("pages_ready", "mtp-chain" + HYBRID), ("pages_read", "none" + HYBRID), ("pages_free", "none" + HYBRID)],
        *[("pages_written", "none" + HYBRID), (None, "none" + HYBRID)],
        ("pages_written", "hybrid-draft"),
    ],
)
def test_a_fence_of_the_network_card_orders_states(fence, proposer, monkeypatch):
    """The card moves no page, so each finding is about states: of a hybrid target, or of a hybrid draft of another target.

    With every fence there is none, and the tokens are wrong.
    """
    split = LocalLink._split

    def without_pages(link, numbers, blocks):
        parts, paged = split(link, numbers, blocks), len(link.block_bytes)
        return [[]] * paged + parts[paged:]

    monkeypatch.setattr(LocalLink, "_split", without_pages)
    setup = EngineSetup(proposer, "staged")
    found = run_once_checked(setup, MOVING, drop_fence=fence)
    assert (found.error, found.implied) == (("RaceError", (fence,)) if fence else ("WrongTokens", ()))


def test_a_copy_of_states_on_another_stream_is_found(monkeypatch):
    """Without a fence the sanitizer sees the state that forward writes and the copy reads."""
    real = Step.__init__

    def on_another_stream(self, parts, *launchers):
        real(self, parts, *launchers)
        elsewhere = parts.backend.create_stream("elsewhere")

        def copy(packer, which):
            if which in packer.segments:
                with parts.backend.on(elsewhere):
                    InputUpload(parts).copy_states(packer, which)

        self._copy_states = copy

    setup = EngineSetup("none" + HYBRID, "staged")
    monkeypatch.setattr(Step, "__init__", on_another_stream)
    (failure,) = prove_program(setup, 0, 1)["failures"]
    assert failure["error"] == "RaceError"
    assert "staging.py" in failure["text"]
