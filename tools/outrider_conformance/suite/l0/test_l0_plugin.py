"""L0: the registry finds the plugin, and the plugin describes itself and refuses unknown options and devices."""

from __future__ import annotations

import time

import pytest
import torch

from outrider.device import (
    INTERFACE_DATES,
    INTERFACE_VERSION,
    Backend,
    BackendInfo,
    BackendLoadError,
    ConfigError,
    OutriderError,
)
from outrider_conformance.ci_declaration import declaration_fault
from outrider_conformance.kit import Kit
from outrider_conformance.lab import expect
from outrider_conformance.promises import promise
from outrider_conformance.reporting.verdict import not_applicable

_CHEAP_SECONDS = 2.0


@promise("BackendHooks.backend_info", "Describe the plugin. Cheap, repeatable, without side effects.")
def test_it_describes_itself_again_and_again(kit: Kit) -> None:
    """Two descriptions are equal and have the name of the entry point. The second one takes almost no time."""
    first = kit.registry.info(kit.spec.name)
    start = time.perf_counter()
    second = kit.registry.info(kit.spec.name)
    spent = time.perf_counter() - start
    expect(second, first, "backend_info called twice")
    expect(first.name, kit.spec.name, "the name in backend_info")
    assert first.description.strip(), "backend_info has an empty description: people choose by it"
    assert spent < _CHEAP_SECONDS, f"backend_info took {spent:.1f} s: it's asked for every installed backend"


@promise("BackendHooks.backend_info", "Cheap, repeatable, without side effects.")
def test_loading_it_leaves_the_process_as_it_was(kit: Kit) -> None:
    """Loading the plugin changes no environment variable, signal handler, thread or default of torch."""
    verdict = kit.loading()
    if verdict is None:
        not_applicable("the plugin isn't installed, so no child process can load it")
    assert not verdict.harm, verdict.harm
    assert not verdict.changes, (
        f"loading the plugin changes {', '.join(verdict.changes)}: do that in create_backend, if at all"
    )


@promise("PluginInfo.interface_min", "Oldest interface version that the plugin supports.")
def test_it_supports_this_interface_version(info: BackendInfo) -> None:
    """The supported range of interface versions includes the installed version."""
    assert info.interface_min <= INTERFACE_VERSION <= info.interface_max, (
        f"{info.interface_min}..{info.interface_max} lacks {INTERFACE_VERSION}"
    )
    assert info.interface_min >= 1, f"interface versions are counted from 1, interface_min is {info.interface_min}"


@promise("PluginInfo.interface_max", "Not a version without a day in :data:`INTERFACE_DATES`.")
def test_it_supports_versions_that_exist(info: BackendInfo) -> None:
    """No version is claimed that isn't fixed yet: the plugin can't know its rules."""
    known = ", ".join(f"{version} of {day}" for version, day in INTERFACE_DATES.items())
    assert info.interface_max in INTERFACE_DATES, f"interface_max is {info.interface_max}; versions are {known}"
    assert info.interface_min in INTERFACE_DATES, f"interface_min is {info.interface_min}; versions are {known}"


@promise("CiDeclaration", "``outrider ci-matrix`` turns it into a matrix row.")
def test_its_ci_declaration_can_be_used(info: BackendInfo) -> None:
    """The level exists, at least one runner label is declared, and a workflow can take every word."""
    fault = declaration_fault(info.ci)
    assert not fault, fault


@promise(
    "BackendHooks.create_backend",
    "Raise :class:`~outrider.device.errors.ConfigError` for an unknown or invalid option, and "
    ":class:`~outrider.device.errors.BackendLoadError` with the reason if the device isn't available.",
)
def test_an_unknown_option_is_refused(kit: Kit) -> None:
    """An unknown option raises :class:`ConfigError` and is not ignored."""
    with pytest.raises(ConfigError):
        kit.registry.create(f"{kit.spec.name}:no_such_option_of_anybody=1")


@promise(
    "BackendHooks.create_backend",
    "Raise :class:`~outrider.device.errors.ConfigError` for an unknown or invalid option, and "
    ":class:`~outrider.device.errors.BackendLoadError` with the reason if the device isn't available.",
)
def test_a_device_that_is_not_there_is_refused(kit: Kit) -> None:
    """Device 4096 and the device after the last one raise an error that names the device."""
    beyond = {4096} | ({kit.info.device_count} if kit.info.device_count else set())
    for ordinal in sorted(beyond):
        with pytest.raises(BackendLoadError) as caught:
            kit.registry.create(f"{kit.spec.name}:{ordinal}")
        assert str(ordinal) in str(caught.value), f"the error doesn't say which device was asked for: {caught.value}"


@promise("Backend.label", "Return name and device for messages:")
def test_it_says_what_it_is(kit: Kit, backend: Backend) -> None:
    """Name, device and label of the backend agree with the requested specification."""
    expect(backend.name, kit.spec.name, "backend.name")
    assert isinstance(backend.device, torch.device), f"backend.device is a {type(backend.device).__name__}"
    if backend.device.index is not None:
        expect(backend.device.index, kit.spec.ordinal, "the index of backend.device")
    assert kit.spec.name in backend.label
    assert str(backend.device) in backend.label


@promise("Backend.versions", "Return the versions that a report of a run should carry: driver, runtime, device name.")
def test_it_knows_its_versions(backend: Backend) -> None:
    """The versions are text by name, and include the version of torch."""
    versions = backend.versions()
    assert versions.get("torch"), f"versions() lacks torch: {dict(versions)}"
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in versions.items()), dict(versions)


@promise("Backend", "Two backend objects for one device share nothing")
def test_two_backends_share_nothing(kit: Kit, backend: Backend) -> None:
    """A backend refuses streams and events of another backend, and each backend counts stream names from the start."""
    other = kit.open()
    ours, theirs = backend.create_stream("shared"), other.create_stream("shared")
    expect(theirs.name, "shared", "the name of the first stream 'shared' of a second backend")
    with pytest.raises(OutriderError), backend.on(theirs):
        pass
    with pytest.raises(OutriderError):
        ours.record(other.create_event("foreign"))
    foreign = other.create_event("foreign")
    theirs.record(foreign)
    with pytest.raises(OutriderError):
        ours.wait(foreign)
    other.synchronize()


@promise("PluginInfo.usable", "False if the plugin knows that it can't run on this machine.")
def test_it_runs_where_it_says_so(info: BackendInfo) -> None:
    """An opened backend describes itself as usable, without a reason against it."""
    if not info.usable:
        not_applicable("the registry refuses a backend that says it can't run, so nothing here was opened")
    expect(info.reason, "", "the reason against a usable backend")
