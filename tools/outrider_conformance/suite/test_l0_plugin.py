"""L0: the registry finds the plugin, which describes itself and refuses what it cannot do; declarations are constant.

Undeclared abilities are refused, and no checked method is overridden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType

import pytest
import torch

from outrider.device import (
    CACHE_FORMATS,
    INTERFACE_DATES,
    INTERFACE_VERSION,
    QUANTIZED_FORMATS,
    Backend,
    BackendLoadError,
    Capabilities,
    CapabilityError,
    ConfigError,
    Event,
    Flag,
    KernelSet,
    OutriderError,
    Recompute,
    SpeculativeSync,
    StepMode,
    Stream,
    Waiter,
)
from outrider.registry.backends import KERNELS_OPTION
from outrider_conformance.commands.ci_matrix import declaration_fault
from outrider_conformance.kit import Kit
from outrider_conformance.lab import builtin_exceptions, check_not_overridden, error_of, expect
from outrider_conformance.promises import promise
from outrider_conformance.reporting.verdict import not_applicable

_CHEAP_SECONDS = 2.0


@promise("BackendHooks.backend_info", "Describe the plugin. Cheap, repeatable, without side effects.")
def test_it_describes_itself_again_and_again(kit: Kit) -> None:
    """Two descriptions are equal and have the name of the entry point. The second one takes almost no time."""
    first = kit.registry.backends.info(kit.spec.name)
    start = time.perf_counter()
    second = kit.registry.backends.info(kit.spec.name)
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
        f"loading the plugin changes {', '.join(verdict.changes)}: set the device up in create_backend, and its driver alone"
    )


@promise("BackendHooks.create_backend", "Leave the process as it was:")
def test_opening_it_leaves_the_process_as_it_was(kit: Kit, backend: Backend) -> None:
    """The first opening changes no global state of torch, no signal handler and no working directory, and prints nothing."""
    assert not kit.opening_changes, (
        f"create_backend changes {', '.join(kit.opening_changes)} of {backend.label}: restore it before create_backend "
        "returns, or use it only inside the calls that need it"
    )


@promise("PluginInfo.interface_min")
def test_it_supports_this_interface_version(kit: Kit) -> None:
    """The supported range of interface versions includes the installed version."""
    info = kit.info
    assert info.interface_min <= INTERFACE_VERSION <= info.interface_max, (
        f"{info.interface_min}..{info.interface_max} lacks {INTERFACE_VERSION}"
    )
    assert info.interface_min >= 1, f"interface versions are counted from 1, interface_min is {info.interface_min}"


@promise("PluginInfo.interface_max", "Not a version without a day in :data:`INTERFACE_DATES`.")
def test_it_supports_versions_that_exist(kit: Kit) -> None:
    """No version is claimed that isn't fixed yet: the plugin can't know its rules."""
    info = kit.info
    known = ", ".join(f"{version} of {day}" for version, day in INTERFACE_DATES.items())
    assert info.interface_max in INTERFACE_DATES, f"interface_max is {info.interface_max}; versions are {known}"
    assert info.interface_min in INTERFACE_DATES, f"interface_min is {info.interface_min}; versions are {known}"


@promise("CiDeclaration", "``outrider ci-matrix`` turns it into a matrix row.")
def test_its_ci_declaration_can_be_used(kit: Kit) -> None:
    """The level exists, at least one runner label is declared, and a workflow can take every word."""
    fault = declaration_fault(kit.info.ci)
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


@promise("Backend.versions")
def test_it_knows_its_versions(backend: Backend) -> None:
    """The versions are text by name, and include the version of torch."""
    versions = backend.versions()
    assert versions.get("torch"), f"versions() lacks torch: {dict(versions)}"
    expect(dict(backend.versions()), dict(versions), "versions called twice")
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


@promise("PluginInfo.usable")
def test_it_runs_where_it_says_so(kit: Kit) -> None:
    """An opened backend describes itself as usable, without a reason against it."""
    info = kit.info
    if not info.usable:
        not_applicable("the registry refuses a backend that says it can't run, so nothing here was opened")
    expect(info.reason, "", "the reason against a usable backend")
    expect(info.advice, "", "the advice how to make a usable backend usable")


@promise("BackendInfo.device_count", "Number of devices on this machine, each of which ``create_backend`` opens")
def test_the_last_device_that_it_counts_can_be_opened(kit: Kit, backend: Backend) -> None:
    """The number of devices is positive, and the last device opens."""
    count = kit.info.device_count
    if count is None:
        not_applicable("the plugin doesn't count its devices")
    assert count > kit.spec.ordinal, f"device_count is {count}, and {backend.label} is open"
    if count - 1 != kit.spec.ordinal:
        error = error_of(lambda: kit.registry.create(replace(kit.spec, ordinal=count - 1)).synchronize())
        assert error is None, f"device_count is {count}, and device {count - 1} doesn't open: {error}"


@promise("BackendInfo.options", "Options of the backend's name, each with its meaning. Outrider itself defines ``kernels``.")
def test_the_options_and_variables_that_it_declares_can_be_set(kit: Kit) -> None:
    """Each declared option has a name that can be typed and a meaning, and is not refused as an unknown option is.

    Each declared environment variable has a name of letters, digits and underscores.
    """

    def answer(option: str) -> str:
        try:
            kit.registry.create(f"{kit.spec.name}:{option}=no-such-value")
        except OutriderError as error:
            return str(error).replace(option, "OPTION")
        return "accepted"

    unknown = answer("no_such_option_of_anybody")
    for variable in (*kit.info.cache_variables, *kit.info.sanitizer_variables):
        assert str(variable).isidentifier(), f"{variable!r} is no name of an environment variable"
    for option, meaning in kit.info.options.items():
        assert option.isidentifier(), f"option {option!r} can't be typed: use letters, digits and underscores"
        assert option != KERNELS_OPTION, f"option {option!r} is declared, and Outrider answers it before the plugin sees it"
        assert meaning.strip(), f"option {option!r} has no meaning: `outrider backends` shows it"
        assert answer(option) != unknown, f"option {option!r} is declared, and create_backend refuses it as unknown"


BUILDS_ON: Mapping[str, str] = MappingProxyType(
    {
        "concurrent_streams": "asynchronous",
        "forks_in_capture": "captures_graphs",
        "waits_inside_graphs": "captures_graphs",
        "captures_in_part": "captures_graphs",
        "updates_graph_params": "captures_graphs",
        "row_exact_accesses": "reports_accesses",
        "captures_collectives": "collectives",
        "peer_memory": "collectives",
    }
)
"""For each ability that builds on another one, the ability on which it builds."""


@promise("Backend.capabilities", "Return the capabilities of the device. Constant over the backend's life.")
def test_capabilities_are_constant(kit: Kit, backend: Backend) -> None:
    """Capabilities are the same record before and after work and in each backend object, and each field has its type."""
    before = backend.capabilities
    expect(before.as_dict(), kit.facts["capabilities"], "capabilities, compared with those of the first backend object")
    assert isinstance(before, Capabilities), f"capabilities is a {type(before).__name__}"
    stream = backend.create_stream("s")
    with backend.on(stream):
        torch.ones(4, device=backend.device)
    stream.synchronize()
    expect(backend.capabilities, before, "capabilities after some work")
    for field in fields(Capabilities):
        if field.name not in ("dtypes", "preferred_dtypes", "page_size", "quantized_formats"):
            assert isinstance(getattr(before, field.name), bool), f"{field.name} is {getattr(before, field.name)!r}"
    assert before.dtypes, "no dtype is declared: no model could run"
    assert all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in before.dtypes), before.dtypes


@promise("Capabilities.preferred_dtypes", "in which the backend's own kernels run, best first.")
def test_what_is_preferred_is_declared(backend: Backend) -> None:
    """Preferred dtypes are declared and distinct, and the page size is a whole number from 1 to 65536."""
    has = backend.capabilities
    assert isinstance(has.preferred_dtypes, tuple), has.preferred_dtypes
    assert len(set(has.preferred_dtypes)) == len(has.preferred_dtypes), f"a dtype is named twice: {has.preferred_dtypes}"
    assert set(has.preferred_dtypes) <= has.dtypes, f"preferred and not declared: {set(has.preferred_dtypes) - has.dtypes}"
    size = has.page_size
    assert type(size) is int, f"page_size is {size!r}"
    assert 1 <= size <= 65536, f"page_size is {size}"


@promise(
    "Capabilities.quantized_formats",
    "Formats of quantised weights in which models are loaded by default: those of the backend's own kernels "
    "(``KernelSet.linear_quantized``), or all, if the torch references are its kernels.",
)
def test_formats_that_are_declared_exist(backend: Backend) -> None:
    """The declared formats of quantised weights are a set of names of the backend interface."""
    formats = backend.capabilities.quantized_formats
    assert isinstance(formats, frozenset), f"quantized_formats is a {type(formats).__name__}"
    assert formats <= set(QUANTIZED_FORMATS), f"no formats of the backend interface: {formats - set(QUANTIZED_FORMATS)}"


@promise("KernelSet.cache_formats")
def test_formats_of_a_cache_exist(backend: Backend) -> None:
    """The formats of a KV cache are a set of names of the backend interface."""
    formats = backend.kernels_in_use.cache_formats
    assert isinstance(formats, frozenset), f"cache_formats is a {type(formats).__name__}"
    assert formats <= set(CACHE_FORMATS), f"no formats of the backend interface: {formats - set(CACHE_FORMATS)}"


@promise("KernelSet.optional_operands", "Operands that few models have, and that these kernels take:")
def test_operands_that_are_declared_exist(backend: Backend) -> None:
    """The declared operands are a set of names of the backend interface."""
    operands = backend.kernels_in_use.optional_operands
    assert isinstance(operands, frozenset), f"optional_operands is a {type(operands).__name__}"
    unknown = operands - KernelSet.optional_operands
    assert not unknown, f"no operands of the backend interface: {unknown}"


@promise(
    "Capabilities",
    "A declared ability that doesn't work fails conformance, and so does a working ability that isn't declared.",
)
def test_declared_abilities_fit_together(backend: Backend) -> None:
    """An ability is declared only together with the ability on which it builds."""
    has = backend.capabilities
    for ability, base in BUILDS_ON.items():
        assert getattr(has, base) or not getattr(has, ability), f"{ability} is declared without {base}"
    for ability, verb in (("captures_graphs", "_capture"), ("flags", "_create_flag"), ("collectives", "_create_group")):
        own = getattr(type(backend), verb) is not getattr(Backend, verb)
        assert own or not getattr(has, ability), f"{ability} is declared, and the plugin doesn't implement {verb}"
    assert not (has.asynchronous and has.host_writes_memory), "host_writes_memory is declared together with asynchronous"


@promise("Backend.kernels", "Return the kernels of this device. Constant over the backend's life.")
def test_kernels_are_constant(backend: Backend) -> None:
    """The backend returns the same KernelSet each time, and the set has a name."""
    assert isinstance(backend.kernels, KernelSet)
    assert backend.kernels is backend.kernels, "backend.kernels makes a new object each time"
    assert backend.kernels.name.strip()


@promise("Backend.speculative_sync", "Return the policy of this device. Constant over the backend's life.")
def test_the_policy_is_well_formed(backend: Backend) -> None:
    """Each declaration of the policy has its type, and none contradicts the capabilities."""
    sync = backend.speculative_sync
    assert isinstance(sync, SpeculativeSync)
    assert sync is backend.speculative_sync, "backend.speculative_sync makes a new object each time"
    assert sync.backend is backend, "the policy belongs to another backend object"
    assert sync.step_modes, "no step mode is declared: no engine could run"
    assert all(isinstance(mode, StepMode) for mode in sync.step_modes), sync.step_modes
    assert isinstance(sync.published_waiter, Waiter), sync.published_waiter
    assert all(isinstance(what, Recompute) for what in sync.recompute_after_join), sync.recompute_after_join
    assert sync.refresh_before_replay <= {"rope_positions"}, f"refresh_before_replay is {set(sync.refresh_before_replay)}"
    for name in ("exact_host_lengths", "results_on_forward", "fused_host_wait", "rebind_params"):
        assert isinstance(getattr(sync, name), bool), f"{name} is {getattr(sync, name)!r}"
    lengths, size = sync.draft_lengths, sync.bytes_per_request
    assert lengths is None or (lengths and all(type(n) is int and n > 0 for n in lengths)), f"draft_lengths is {lengths!r}"
    assert type(size) is int, f"bytes_per_request is {size!r}"
    assert size >= 0, f"bytes_per_request is {size}"
    if sync.rebind_params and backend.capabilities.captures_graphs:
        assert backend.capabilities.updates_graph_params, "rebind_params needs updates_graph_params"


@promise("Backend", "The public methods check the rules and report to an attached observer, then call the vendor's verb.")
def test_no_checked_method_is_overridden(backend: Backend) -> None:
    """The plugin overrides no public verb. It implements the underscored verbs, so that no check is lost."""
    check_not_overridden(backend.create_stream("s"), Stream)
    check_not_overridden(backend.create_event("e"), Event, "generation")
    check_not_overridden(backend, Backend, "keep_alive", "release_finished", "streams", "use_kernels", "kernels_in_use")
    check_not_overridden(backend, Backend, "capturing", "check_not_capturing", "guard")
    if backend.capabilities.flags:
        check_not_overridden(backend.create_flag("f"), Flag)


@promise("CapabilityError")
@pytest.mark.parametrize(
    ("ability", "use"),
    [
        ("stream_priorities", lambda b: b.create_stream("s", priority=-1)),
        ("event_timing", lambda b: b.create_event("e", timing=True)),
        ("flags", lambda b: b.create_flag("f")),
        ("perturbs_timing", lambda b: b.delay(b.create_stream("s"), 10)),
    ],
    ids=["stream_priorities", "event_timing", "flags", "perturbs_timing"],
)
def test_an_ability_is_there_or_refused(backend: Backend, ability: str, use: Callable[[Backend], object]) -> None:
    """A declared ability works, and an undeclared one raises an error."""
    if getattr(backend.capabilities, ability):
        assert ability == "perturbs_timing" or use(backend) is not None
        if ability == "perturbs_timing":
            use(backend)
    else:
        with pytest.raises(CapabilityError):
            use(backend)


@promise("Backend.translate_error")
def test_errors_that_are_not_the_devices_pass_unchanged(backend: Backend) -> None:
    """Typed errors, torch's own errors and builtin exceptions of the caller pass a scope that translates errors unchanged."""

    def fail(error: BaseException) -> None:
        with backend.guard("testing"):
            raise error

    torchs = error_of(lambda: torch.ones(2) + torch.ones(3))
    bare = ValueError(), KeyError(3), OSError(5, "of the test")
    for error in (CapabilityError("typed already"), *bare, *([torchs] if torchs is not None else []), *builtin_exceptions()):
        if not isinstance(error, MemoryError | NotImplementedError):  # these are the device's
            found = error_of(partial(fail, error))
            assert found is error, f"translate_error turns {error!r} into {found!r}: return None unless the device raised it"


@promise("Backend.is_host")
def test_host_and_device_memory_are_told_apart(backend: Backend) -> None:
    """The backend recognises device tensors, and host tensors unless the device computes in host memory."""
    stream = backend.create_stream("s")
    with backend.on(stream):
        there = torch.ones(4, device=backend.device)
    stream.synchronize()
    assert not backend.is_host(there), f"a tensor on {there.device} is taken for host memory"
    if backend.device.type == torch.ones(1).device.type:
        not_applicable("the device computes in host memory")
    assert backend.is_host(torch.ones(4)), "a host tensor is taken for device memory"
