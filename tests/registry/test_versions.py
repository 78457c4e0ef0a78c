"""Interface versions: a range is negotiated, and a plugin of the version before goes through an adapter."""

from dataclasses import replace

import pytest

from outrider.device import INTERFACE_VERSION, BackendLoadError, PluginContractError
from outrider.registry import Registry
from outrider.registry.backends import BACKENDS

# Written for the version that is now: when the backend interface moves on, this is the plugin of the version before.
PLUGIN = """
    from outrider.device.plugin import BackendInfo, hookimpl
    @hookimpl
    def backend_info():
        return BackendInfo(name="chip", description="", interface_min={low}, interface_max={high})
    @hookimpl
    def create_backend(ordinal, options):
        from outrider_cpu.backend import CpuBackend
        return CpuBackend()
"""
NEXT = INTERFACE_VERSION + 1


def adapted(backend):
    backend.adapted_from = INTERFACE_VERSION
    return backend


@pytest.fixture
def later():
    """An Outrider whose backend interface is one version further, with an adapter for the plugins of today."""
    return Registry(backends=replace(BACKENDS, version=NEXT, adapters={INTERFACE_VERSION: adapted}))


def status(registry):
    return {candidate.name: candidate for candidate in registry.backends.candidates()}["chip"]


def test_a_range_that_holds_this_version_is_taken_as_it_is(install):
    install("chip", PLUGIN.format(low=0, high=NEXT))
    assert not hasattr(Registry().create("chip"), "adapted_from")


def test_a_plugin_of_the_version_before_works_through_the_adapter(install, later):
    install("chip", PLUGIN.format(low=INTERFACE_VERSION, high=INTERFACE_VERSION))
    assert status(later).status == "usable"
    backend = later.create("chip")
    assert backend.adapted_from == INTERFACE_VERSION
    stream, event = backend.create_stream("s"), backend.create_event("e")
    stream.record(event)
    assert event.query()


def test_one_that_knows_the_new_version_too_is_not_adapted(install, later):
    install("chip", PLUGIN.format(low=INTERFACE_VERSION, high=NEXT))
    assert not hasattr(later.create("chip"), "adapted_from")


def test_two_versions_back_is_refused_with_what_to_do(install, later):
    install("chip", PLUGIN.format(low=INTERFACE_VERSION - 1, high=INTERFACE_VERSION - 1))
    with pytest.raises(PluginContractError, match=f"this outrider has version {NEXT}; install a newer plugin"):
        later.create("chip")
    assert status(later).status == "broken"


def test_without_an_adapter_the_version_before_is_refused(install):
    install("chip", PLUGIN.format(low=INTERFACE_VERSION, high=INTERFACE_VERSION))
    with pytest.raises(PluginContractError, match="install a newer plugin"):
        Registry(backends=replace(BACKENDS, version=NEXT)).create("chip")


def test_an_adapter_that_fails_does_not_reach_the_caller_bare(install):
    def broken(backend):
        raise RuntimeError("no such member")

    install("chip", PLUGIN.format(low=INTERFACE_VERSION, high=INTERFACE_VERSION))
    registry = Registry(backends=replace(BACKENDS, version=NEXT, adapters={INTERFACE_VERSION: broken}))
    with pytest.raises(BackendLoadError, match="no such member"):
        registry.create("chip")
