"""The kit's tests of plans, on kernels that plan: they pass; a plan that isn't renewed, or is of other lengths, is found."""

from dataclasses import replace

import pytest

from outrider.device import HostParam
from outrider.registry import get_backend
from outrider_conformance.lab import Lab
from outrider_conformance.random_kernels.paged_batch import check_renewed, check_unplanned, paged_batch
from outrider_sim.kernels import HostPlan


def check_planned_graph(lab):
    paged_batch(lab, "a chain").check_graph(plans=True)


def check_plans(lab):
    for shape in ("decoding", "a chain", "a window", "a ragged prompt"):
        check_renewed(paged_batch(lab, shape))
    check_planned_graph(lab)
    check_unplanned(lab)


@pytest.mark.parametrize("name", ["cpu", "sim", "sim:kernels=host-plans"])
def test_right_kernels_pass(name):
    check_plans(Lab(get_backend(name)))


def once(inner):
    return lambda plan, batch, lens, stream: None if plan.shapes else inner(plan, batch, lens, stream)


def shorter(inner):
    def fill(plan, batch, lens, stream):
        lens = tuple(length - 1 for length in lens)
        inner(plan, replace(batch, seq_lens_host=HostParam("lengths", lens)), lens, stream)

    return fill


@pytest.mark.parametrize("fault", [once, shorter])
@pytest.mark.parametrize(
    "test", [lambda lab: check_renewed(paged_batch(lab, "a chain")), check_planned_graph], ids=["called", "graph"]
)
def test_wrong_plans_are_found(fault, test, monkeypatch):
    monkeypatch.setattr(HostPlan, "fill", fault(HostPlan.fill))
    monkeypatch.setattr("outrider_sim.kernels._check_plan", lambda planned, seq_lens: None)
    with pytest.raises(Exception, match=r"off by|plan of another batch"):
        test(Lab(get_backend("sim:kernels=host-plans")))
