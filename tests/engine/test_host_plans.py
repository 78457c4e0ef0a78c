"""Attention that is planned on the host, on the simulated device: every batch has the plan of its own lengths, in any
schedule, called and replayed; and what would spoil that is found.
"""

from dataclasses import replace

import pytest
from tests.engine.conftest import Bundle

from outrider import SamplingParams
from outrider.device import CapabilityError, InterfaceError
from outrider.engine.state.plans import AttentionPlans
from outrider.model import EagleHead
from outrider.registry import get_backend
from outrider_proof import tiny
from outrider_proof.explorations import DecodeExplorer
from outrider_proof.proposers import decoder
from outrider_proof.tiny import plain_config
from outrider_sanitizer import RaceError, watch
from outrider_sim.exploration import run_once
from outrider_sim.kernels import HostPlan
from outrider_sim.strategies import Strategy, make_strategy
from tiny_programs import NEW_TOKENS, PROMPTS, program

PROPOSERS = ["eagle", "eagle-tree", "eagle3", "mtp", "draft-model", "draft-model-tree", "ngram-tree", "none"]


@pytest.fixture(scope="module", autouse=True)
def _plain_first():
    """Plain decoding runs outside the simulator's schedules."""
    for prompt in PROMPTS:
        tiny.plain(prompt, NEW_TOKENS)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "graphs"), [(name, graphs) for i, name in enumerate(PROPOSERS) for graphs in (False, True) if graphs or i % 2]
)
def test_the_sanitizer_finds_nothing(name, graphs):
    backend = get_backend("sim:kernels=host-plans")
    with watch(backend) as report:
        error = run_once(backend, program(name, graphs=graphs), Strategy())
    assert error is None
    assert report.clean, str(report)


@pytest.mark.sample(1, per="name")
@pytest.mark.parametrize("seeds", [(1,), pytest.param(tuple(range(1, 7)), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("graphs", [False, True], ids=["called", "graphs"])
@pytest.mark.parametrize("name", ["eagle", "eagle-tree", "none"])
def test_any_schedule_gives_plain_greedy_tokens(name, graphs, seeds):
    for seed in seeds:  # lazy, pct, random and so on; the order of the program is watched above
        backend = get_backend("sim:kernels=host-plans")
        error = run_once(backend, program(name, graphs=graphs), make_strategy("mixed", seed, {}))
        if error is not None:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("config", [{"plan_stream": False}, {"overlap": False}, {"prefill_chunk": 64}], ids=str)
def test_in_other_engines(config):
    backend = get_backend("sim:kernels=host-plans")
    assert run_once(backend, program("eagle", graphs=True, **config), make_strategy("lazy", 0, {})) is None


def test_on_a_device_whose_graphs_take_host_lengths_too():
    backend = get_backend("sim:like=npu,kernels=host-plans")
    with watch(backend) as report:
        error = run_once(backend, program("eagle", graphs=True), Strategy())
    assert error is None
    assert report.clean, str(report)


def test_graphs_that_several_kinds_of_batches_share_have_one_plan(prompt_tokens):
    """Draft-extend's graph of greedy batches and of those with penalties is one; so it must find the plan of either."""
    bundle = Bundle(get_backend("sim:kernels=host-plans"), "float32")
    config = {"max_requests": 2, "max_context": 64, "draft_tokens": 3, "graphs": True, "overlap": True}
    engine, called = bundle.engine(**config), bundle.engine(**{**config, "graphs": False})
    prompts = [prompt[:9] for prompt in prompt_tokens[:2]]
    for params in (SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, repetition_penalty=1.3)):
        wanted = [done.token_ids for done in called.generate(prompts, params)]
        assert [done.token_ids for done in engine.generate(prompts, params)] == wanted


@pytest.mark.sample(2)
@pytest.mark.parametrize("graphs", [False, True], ids=["called", "graphs"])
@pytest.mark.parametrize("name", ["eagle", "eagle-tree"])
def test_a_chain_is_planned_once_and_a_tree_also_along_its_path(name, graphs, monkeypatch):
    planned = []
    plan = AttentionPlans.plan
    monkeypatch.setattr(AttentionPlans, "plan", lambda self, what, *rest: (planned.append(what), plan(self, what, *rest))[1])
    backend = get_backend("sim:kernels=host-plans")
    assert run_once(backend, program(name, graphs=graphs), Strategy()) is None
    assert planned.count("verify") > 4
    assert planned.count("path") == (planned.count("verify") if name == "eagle-tree" else 0)


# -- what is found -------------------------------------------------------------------------------------------------


def stale(when):
    """Planning that leaves a plan as it was, ``when`` there is one already."""
    plan = AttentionPlans.plan

    def spoilt(self, what, attention, lengths, ahead, stream):
        kept = self._plans.get((what, attention.seq_lens.shape[0], attention.max_query))
        if when == what and kept is not None:
            return replace(attention, plan=kept, shapes=self._shapes[what])
        return plan(self, what, attention, lengths, ahead, stream)

    return spoilt


@pytest.mark.parametrize("graphs", [False, True], ids=["called", "graphs"])
@pytest.mark.parametrize(("name", "when"), [("eagle", "verify"), ("eagle-tree", "path")])
def test_a_stale_plan_is_an_error(name, when, graphs, monkeypatch):
    # Of a path's tokens only the last one goes on behind the last layer's keys and values, and isn't planned.
    one = tiny.eagle_head()
    two = EagleHead(tiny.config(2), replace(one.weights, layers=2 * one.weights.layers), one.target)
    monkeypatch.setattr(tiny, "eagle_head", lambda: two)
    monkeypatch.setattr(AttentionPlans, "plan", stale(when))
    error = run_once(get_backend("sim:kernels=host-plans"), program(name, graphs=graphs), Strategy())
    assert "runs with the plan of another batch" in str(error)


def test_a_missing_plan_is_an_error(monkeypatch):
    def unplanned(self, what, attention, lengths, ahead, stream):
        return replace(attention, shapes=self._shapes[what])

    monkeypatch.setattr(AttentionPlans, "plan", unplanned)
    error = run_once(get_backend("sim:kernels=host-plans"), program("eagle"), Strategy())
    assert isinstance(error, InterfaceError)
    assert "was to be planned, and there is no plan" in str(error)


def test_a_draft_that_keeps_the_plan_of_other_lengths_is_an_error(monkeypatch):
    """Draft-extend of a draft model takes in a token more than verify."""
    from dataclasses import replace

    from outrider.speculative import draft_model

    monkeypatch.setattr(
        draft_model,
        "replace",
        lambda batch, **c: replace(batch, **{k: v for k, v in c.items() if k not in ("plan", "shapes")}),
    )
    error = run_once(get_backend("sim:kernels=host-plans"), program("draft-model"), Strategy())
    assert "runs with the plan of another batch" in str(error)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fence", ["lengths_on_host", "plan_ready"])
def test_a_fence_left_out_is_found_and_named(fence):
    """*Lengths on host* is live where kernels plan, not only where a device takes host integers."""
    backend = get_backend("sim:kernels=host-plans")
    explorer = DecodeExplorer(backend, speculate="eagle", drop=fence)
    for seed in range(4):
        backend.control.reset()
        try:
            explorer.run_program(explorer.program(seed), backend)
        except RaceError:
            break
    assert fence in explorer.implied()


def test_the_host_waits_for_its_pinned_lengths(monkeypatch):
    """A plan's pinned lengths may not be written while the copy before reads them."""
    monkeypatch.setattr(HostPlan, "wait", lambda self: None)
    backend = get_backend("sim:kernels=host-plans")
    with watch(backend) as report:
        run_once(backend, program("eagle-tree"), make_strategy("slowest", 0, {"stream": "plan"}))
    assert not report.clean


def test_fused_mode_is_refused():
    backend = get_backend("sim:kernels=host-plans")
    with pytest.raises(CapabilityError, match="plan each batch on the host, from exact lengths.*use mode staged"):
        run_engine(backend, mode="fused")


def test_batch_invariant_kernels_plan_nothing():
    kernels = get_backend("sim:kernels=host-plans").kernels_in_use
    assert kernels.plans_on_host
    assert not kernels.batch_invariant().plans_on_host


def run_engine(backend, **config):
    from outrider import Engine

    loading = backend.create_stream("load")
    with backend.on(loading):
        target = decoder(tiny.target(), backend)
    loading.synchronize()
    return Engine(target, backend, config=plain_config(dtype="float64", max_context=32, **config))
