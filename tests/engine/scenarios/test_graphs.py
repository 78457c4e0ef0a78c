"""Bugs of what graphs read: padding, addresses, pools, parameters. Numbers are those of docs/findings/scenarios.md."""

import pytest
import torch

from engine.scenarios.historical import MANY, TWO, Historical
from model.test_vision import IMAGE, picture
from outrider import Engine, SamplingParams
from outrider.device import Recompute
from outrider.engine.state import buffers
from outrider.engine.state.buffers import VerifyInputs
from outrider.model import MediaProcessor, load_decoder, load_vision
from outrider.registry import get_backend
from outrider.speculative.lookup import NgramProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof.decode_program import WrongTokens
from outrider_proof.tiny import plain_config
from outrider_sanitizer import RaceError, watch
from races.test_corpus import STALENESS
from tiny_vision_checkpoints import write_vision_checkpoint


@pytest.fixture(scope="module")
def sim():
    return get_backend("sim")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mode", "schedules"),
    [
        ("staged", ("program",)),
        ("fused", ("random",)),
        pytest.param("staged", ("random", "pct"), marks=pytest.mark.slow),
        pytest.param("fused", ("program", "pct"), marks=pytest.mark.slow),
    ],
)
def test_with_nothing_changed_the_programs_pass(sim, mode, schedules):
    for each in (TWO, MANY):
        Historical(sim, mode=mode, graphs=True).passes(each, *schedules)


def vision_engine(backend, directory):
    target = load_decoder(directory, backend=backend, dtype=torch.float32)
    tower = load_vision(directory, backend=backend, dtype=torch.float32)
    proposer = NgramProposer(draft_tokens=3, vocab_size=target.config.vocab_size)
    config = plain_config(max_context=64, max_requests=2, page_size=4, overlap=True, graphs=True)
    return Engine(target, backend, proposer=proposer, config=config, vision=tower)


@pytest.mark.slow
def test_5_positions_that_never_reach_the_graph(sim, tmp_path, monkeypatch):
    """Positions on three axes are planned anew, and the replay reads those of the batch before."""
    write_vision_checkpoint(tmp_path, "qwen2_vl")
    processor = MediaProcessor.from_checkpoint(tmp_path)
    prompt, media = [1, *IMAGE, 9, 17, 9, 17], [processor.image(picture(20, 28))]
    params = SamplingParams(max_tokens=10)
    expected = vision_engine(CpuBackend(), tmp_path).generate([prompt], params, media=[media])[0].token_ids

    def run(change):
        sim.control.reset()
        with watch(sim) as report:
            engine = vision_engine(sim, tmp_path)
            change(engine)
            (done,) = engine.generate([prompt], params, media=[media])
        return report, done.token_ids

    report, tokens = run(lambda engine: None)
    assert report.clean, str(report)
    assert tokens == expected
    with monkeypatch.context() as patch:
        report, tokens = run(lambda engine: patch.setattr(VerifyInputs, "copy_rope_positions_for_graph", lambda verify: None))
    assert {finding.kind for finding in report} <= STALENESS
    assert not report.clean

    # A device that recomputes after the join (from source, so as often as it likes) refreshes the graph's copy too.
    sync = sim.speculative_sync
    monkeypatch.setattr(sync, "recompute_after_join", frozenset({Recompute.MROPE_POSITIONS}))
    monkeypatch.setattr(sync, "refresh_before_replay", frozenset({"rope_positions"}))
    report, tokens = run(lambda engine: None)
    assert report.clean, str(report)
    assert tokens == expected


def test_13_padding_keeps_what_a_larger_batch_left(sim):
    """Nothing fills the rows behind a batch: positions, slots and rows of requests that are elsewhere or over by now."""

    def change(engine):
        engine._parts.buffers.pad = lambda *arguments, **named: None

    error = Historical(sim, graphs=True, change=change).fails(MANY)
    assert isinstance(error, RaceError)
    assert {finding.kind for finding in error.report} <= STALENESS
    assert "of the batch before" in str(error)


def test_14_one_buffer_is_padded_and_another_not(sim):
    """The cache slots of the rows behind the batch are the ones of the batch before."""

    def change(engine):
        buffers = engine._parts.buffers
        honest, layouts = buffers.pad, buffers._layouts

        def pad(prefix, **named):
            buffers._layouts = {
                key: {name: spec for name, spec in layout.items() if name != "verify.slots"}
                for key, layout in layouts.items()
            }
            honest(prefix, **named)
            buffers._layouts = layouts

        buffers.pad = pad

    error = Historical(sim, graphs=True, change=change).fails(MANY)
    assert isinstance(error, RaceError)
    assert "verify.slots of the batch before" in str(error)
    assert "verify.positions" not in str(error)


def test_15_a_buffer_without_the_factor_of_the_tree(sim, monkeypatch):
    """A buffer that is declared too small is an error at once, not a write into what lies behind it."""
    honest = buffers.step_buffers

    def too_small(*arguments, **named):
        from dataclasses import replace

        return tuple(replace(spec, per=1) if spec.name == "verify.slots" else spec for spec in honest(*arguments, **named))

    monkeypatch.setattr("outrider.engine.state.parts.step_buffers", too_small)
    for graphs in (False, True):
        error = Historical(sim, draft_topk=3, graphs=graphs).fails(TWO)
        assert not isinstance(error, RaceError | WrongTokens)
        assert "is invalid for input of size" in str(error)


def test_16_pools_of_stages_do_not_alias_and_outputs_lie_outside(sim, monkeypatch):
    """Each stage has a pool of its own, and what outlives a replay was allocated before anything was captured."""
    pools, before = {}, []
    honest = type(sim)._capture

    def capture(self, name, fn, context, stream, pool):
        pools.setdefault(name.split("[")[0], set()).add(pool)
        newest = self.sim.memory._ids
        before.extend(self.locate(tensor).storage <= newest for tensor in context.outputs.values())
        graph = honest(self, name, fn, context, stream, pool)
        assert self.sim.memory._ids > newest  # a stage does allocate, from its pool
        return graph

    monkeypatch.setattr(type(sim), "_capture", capture)
    Historical(sim, graphs=True).passes(TWO)
    assert set(pools) == {"draft", "verify", "extend", "prefill"}
    assert all(len(each) == 1 for each in pools.values())
    assert len(set().union(*pools.values())) == 4
    assert before
    assert all(before)


def test_17_a_buffer_is_made_anew_after_the_capture(sim):
    """The plan writes where the name leads now; the graph reads where it led when it was captured."""

    def change(engine):
        owner, key = engine._parts.buffers, (engine._parts.proposer.nodes, "verify.slots")
        engine._moved = owner._buffers[key]
        with engine.backend.on(engine._parts.streams.forward):
            owner._buffers[key] = owner._buffers[key].clone()
        engine._parts.streams.forward.synchronize()
        owner._views.clear()

    error = Historical(sim, graphs=True, change=change).fails(TWO)
    assert isinstance(error, RaceError | WrongTokens)
