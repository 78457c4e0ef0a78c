"""``outrider explore decode`` on a device that decides its schedules itself: in the order of the program, every fence."""

import re

import pytest

from outrider.engine.fences import FENCES


def some(*names):
    return tuple(fence for fence in FENCES if fence.name in names)


def test_silence_with_every_fence(outrider):
    shown = outrider("explore", "decode", "--backend", "cpu", "--iterations", "1", "--seed", "4")
    assert (shown.code, shown.out.strip()) == (0, "1 host programs, in the order of the program: all right")


@pytest.mark.sample(1)
@pytest.mark.parametrize("fence", ["published", "plan_ready"])
def test_a_fence_left_out_is_named(outrider, fence):
    """Also the one that orders rows which are picked by data."""
    shown = outrider("explore", "decode", "--backend", "cpu", "--drop-fence", fence, "--iterations", "3", "--json")
    assert shown.code == 1
    assert shown.json["error"]["type"] == "RaceError"
    assert shown.json["implied"] == [fence]


def test_a_fence_that_was_not_exercised_is_not_all_right(outrider):
    """A device without host lengths says nothing about *params free*. Where it is needed, one run finds it, with any seed."""
    unknown = outrider("explore", "decode", "--backend", "cpu", "--drop-fence", "params_free", "--iterations", "1")
    assert unknown.code == 2
    assert "all right" not in unknown.out
    assert "none exercised the wait of params_free" in unknown.out
    assert "--backend sim:like=npu --graphs" in unknown.out
    found = outrider("explore", "decode", "--drop-fence", "params_free", "--iterations", "1", "--seed", "1")
    assert found.code == 1
    assert "the finding implies: params_free\n" in found.out
    assert "--seed=1 --iterations=1 --backend=sim:like=npu --strategy=program --drop-fence=params_free" in found.out


@pytest.mark.parametrize("backend", ["cpu", pytest.param("sim", marks=pytest.mark.slow)])
def test_every_fence_in_turn(outrider, monkeypatch, backend):
    monkeypatch.setattr("outrider.engine.fences.FENCES", some("inputs_ready", "params_free"))
    shown = outrider("explore", "decode", "--backend", backend, "--drop-fence", "every", "--iterations", "1", "--json")
    assert shown.code == 0
    rows = {row["dropped"]: row for row in shown.json["fences"]}
    assert (rows[None]["found"], rows[None]["error"]) == (False, None)
    assert (rows["inputs_ready"]["found"], rows["inputs_ready"]["implied"]) == (True, ["inputs_ready"])
    assert (rows["params_free"]["used"], rows["params_free"]["found"]) == (False, False)


def test_a_fence_that_nobody_misses_is_told(outrider, monkeypatch):
    """The net: a fence that is used and whose loss isn't found fails the command."""
    monkeypatch.setattr("outrider.engine.fences.FENCES", some("inputs_ready"))
    monkeypatch.setattr("outrider_sanitizer.Report.raise_if_any", lambda self: None)
    shown = outrider("explore", "decode", "--backend", "cpu", "--drop-fence", "every", "--iterations", "1")
    assert shown.code == 1


@pytest.mark.slow
def test_one_command_shows_every_fence(outrider):
    shown = outrider("explore", "decode", "--drop-fence", "every", "--json")
    assert shown.code == 0, shown.json["fences"]
    assert [row["implied"] for row in shown.json["fences"]] == [[], *([fence.name] for fence in FENCES)]


def test_a_fence_that_the_whole_table_does_not_exercise_fails(outrider, monkeypatch):
    """The net: in the setup that the command chooses, a fence of the table that nothing uses isn't passed over."""
    monkeypatch.setattr("outrider.engine.fences.FENCES", some("params_free"))
    monkeypatch.setattr("outrider_proof.explorations.PARAMETER_FENCES", frozenset())
    shown = outrider("explore", "decode", "--drop-fence", "every", "--iterations", "1", "--seed", "2")
    assert shown.code == 1
    assert re.search(r"params_free +sim +not exercised", shown.out)
    assert "0 of 1 fences were missed" in shown.out


@pytest.mark.slow
@pytest.mark.parametrize("mode", [("--graphs",), ("--mode", "fused")])
@pytest.mark.parametrize("backend", ["cpu", "sim"])
def test_every_fence_of_the_table(outrider, backend, mode):
    shown = outrider("explore", "decode", "--backend", backend, "--drop-fence", "every", "--iterations", "2", *mode, "--json")
    assert shown.code == 0, shown.json["fences"]
    assert sum(row["found"] for row in shown.json["fences"]) >= 5


def test_schedules_cannot_be_asked_for(outrider):
    shown = outrider("explore", "decode", "--backend", "cpu", "--strategy", "random")
    assert shown.code == 1
    assert "order of the program alone" in shown.err


@pytest.mark.slow
def test_eagle_over_images_and_axes_with_graphs(outrider):
    """Positions on three axes, in graphs whose parameters are rebound, under drawn schedules."""
    command = ("explore", "decode", "--images", "--iterations", "2", "--json")
    shown = outrider(*command, "--backend", "sim:like=npu", "--graphs", "--speculate", "eagle")
    assert shown.code == 0, shown.out
    assert shown.json["images"]
    assert shown.json["runs"] == 2
    refused = outrider(*command, "--backend", "cpu")
    assert refused.code != 0
    assert "'sim'" in refused.err + refused.out
