"""Ranks that an engine starts as processes have its backend's options, by each way to start them."""

import functools
from contextlib import closing

import pytest

from outrider import Engine, EngineConfig, SamplingParams
from outrider.bundled import bundled
from outrider.cli.options.models import Speculation, load
from outrider.cli.options.rank_processes import first_rank
from outrider.engine.ranks.ranks import ParallelConfig

PLUGIN = """
    from outrider.device.plugin import KernelInfo, hookimpl
    @hookimpl
    def kernel_info():
        return KernelInfo(name="quick", description="made up")
    @hookimpl
    def create_kernels(backend):
        from outrider.device import KernelSet
        return type("Quick", (KernelSet,), {"name": "quick"})()
"""


def from_checkpoint():
    config = EngineConfig(dtype="float64", max_requests=1, max_context=64)
    target = bundled("target")
    return closing(Engine.from_checkpoint(target, "cpu:kernels=quick", config=config, parallel=ParallelConfig(tensor=2)))


def by_command():
    speculation = Speculation.with_defaults("none", model=None, draft=None, draft_tokens=3)
    settings = {"max_context": 64}
    loader = functools.partial(load, "cpu:kernels=quick", speculation, max_requests=1, dtype="float64", settings=settings)
    return first_rank(loader, 2, 1)


@pytest.mark.slow  # a process imports torch for seconds
@pytest.mark.parametrize("start", [from_checkpoint, by_command])
def test_options_of_a_backend_reach_every_rank(install, start):
    install("quick", PLUGIN, group="outrider.kernels")
    with start() as engine:  # ranks with different kernels would raise RanksDiffer
        assert engine.model.kernels.name == "quick"
        assert len(engine.generate([(5, 6, 7)], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
