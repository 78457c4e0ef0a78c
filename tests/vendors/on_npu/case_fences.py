"""The engine's fences on this device: each that its policy brings, left out, is found in a watched run and named."""

import emulation
import pytest

from outrider.device import Graph
from outrider.engine.fences import FENCES
from outrider_proof.explorations import DecodeExplorer
from outrider_sanitizer import RaceError

PROGRAMS = 2
OF_THIS_DEVICE = ("params_free", "params_bound", "lengths_on_host")
NAMES = [fence.name for fence in FENCES]


@pytest.fixture(scope="module")
def backend():
    return emulation.make()


def first_race(backend, **options):
    """What the first finding implies, in a few drawn host programs; None where there is none."""
    explorer = DecodeExplorer(backend, speculate="eagle", graphs=True, **options)
    for seed in range(PROGRAMS):
        backend.control.reset()
        try:
            explorer.run_program(explorer.program(seed), backend)
        except RaceError:
            return explorer.implied()
    return None


def test_with_every_fence_the_sanitizer_is_silent(backend):
    assert first_race(backend) is None


@pytest.mark.parametrize("fence", [name for name in NAMES if name.startswith(OF_THIS_DEVICE)])
def test_a_fence_left_out_is_found_and_named(backend, fence):
    implied = first_race(backend, drop=fence, half="wait")
    assert implied is not None, f"nobody missed {fence}"
    assert fence in implied


def test_there_are_fences_of_this_device():
    assert [name for name in OF_THIS_DEVICE if name not in NAMES] == []


@pytest.mark.parametrize("name", ["draft.1", "verify"])
def test_a_rebind_left_out_is_named(backend, monkeypatch, name):
    """One parameter of one stage keeps the lengths of an iteration before: stale, though everything is ordered."""
    update = Graph.update_params
    left_out = []

    def forgetful(graph, params, *, stream):
        left_out.extend(set(params) & {name})
        update(graph, {key: values for key, values in params.items() if key != name}, stream=stream)

    monkeypatch.setattr(Graph, "update_params", forgetful)
    explorer = DecodeExplorer(backend, speculate="eagle", graphs=True)
    backend.control.reset()
    with pytest.raises(RaceError, match=f"parameter not rebound(.|\n)*host parameter '{name}' of graph"):
        explorer.run_program(explorer.program(0), backend)
    assert left_out
