"""L0: declarations of a backend are constant and well-formed, undeclared abilities are refused, and no checked method is
overridden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType

import pytest
import torch

from outrider.device import (
    CACHE_FORMATS,
    QUANTIZED_FORMATS,
    Backend,
    Capabilities,
    CapabilityError,
    Event,
    InterfaceError,
    KernelSet,
    OutriderError,
    Recompute,
    SpeculativeSync,
    StepMode,
    Stream,
    Waiter,
)
from outrider_conformance.kit import Kit
from outrider_conformance.lab import expect
from outrider_conformance.promises import promise
from outrider_conformance.reporting.verdict import not_applicable

BUILDS_ON: Mapping[str, str] = MappingProxyType(
    {
        "concurrent_streams": "asynchronous",
        "forks_in_capture": "captures_graphs",
        "waits_inside_graphs": "captures_graphs",
        "captures_in_part": "captures_graphs",
        "updates_graph_params": "captures_graphs",
        "row_exact_accesses": "reports_accesses",
    }
)
"""For each ability that builds on another one, the ability on which it builds."""


@promise("Backend.capabilities", "Return the capabilities of the device. Constant over the backend's life.")
def test_capabilities_are_constant(backend: Backend) -> None:
    """Capabilities are the same record before and after work, and each field has its type."""
    before = backend.capabilities
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
    "Formats of quantised weights for which the backend has its own kernels "
    "(``KernelSet.linear_quantized``). Models in these formats are loaded by default.",
)
def test_formats_that_are_declared_exist(backend: Backend) -> None:
    """The declared formats of quantised weights are a set of names of the backend interface."""
    formats = backend.capabilities.quantized_formats
    assert isinstance(formats, frozenset), f"quantized_formats is a {type(formats).__name__}"
    assert formats <= set(QUANTIZED_FORMATS), f"no formats of the backend interface: {formats - set(QUANTIZED_FORMATS)}"


@promise(
    "KernelSet.cache_formats",
    "Formats of :data:`~outrider.device.CACHE_FORMATS` in which the kernels support a cache, in addition "
    "to the queries' dtype.",
)
def test_formats_of_a_cache_exist(backend: Backend) -> None:
    """The formats of a KV cache are a set of names of the backend interface."""
    formats = backend.kernels_in_use.cache_formats
    assert isinstance(formats, frozenset), f"cache_formats is a {type(formats).__name__}"
    assert formats <= set(CACHE_FORMATS), f"no formats of the backend interface: {formats - set(CACHE_FORMATS)}"


@promise(
    "Capabilities",
    "A declared ability that doesn't work fails conformance, and so does a working ability that isn't declared.",
)
def test_declared_abilities_fit_together(backend: Backend) -> None:
    """An ability is declared only together with the ability on which it builds."""
    has = backend.capabilities
    for ability, base in BUILDS_ON.items():
        assert getattr(has, base) or not getattr(has, ability), f"{ability} is declared without {base}"
    assert not (has.asynchronous and has.host_writes_memory), "host_writes_memory is declared together with asynchronous"


@promise("Backend.kernels", "Return the kernels of this device. Constant over the backend's life.")
def test_kernels_are_constant(backend: Backend) -> None:
    """The backend returns the same KernelSet each time, and the set has a name."""
    assert isinstance(backend.kernels, KernelSet)
    assert backend.kernels is backend.kernels, "backend.kernels makes a new object each time"
    assert backend.kernels.name.strip()


@promise("Backend.use_kernels", "Call it once, before a model is loaded.")
def test_kernels_can_be_chosen_once(kit: Kit) -> None:
    """Chosen kernels are in use, the device's own kernels stay available, and a second choice is refused."""
    options = {key: value for key, value in kit.spec.options.items() if key != "kernels"}
    backend = kit.registry.create(replace(kit.spec, options=options))
    own, chosen = backend.kernels, KernelSet()
    assert backend.kernels_in_use is own, "kernels are in use although none were chosen"
    backend.use_kernels(chosen)
    assert backend.kernels_in_use is chosen
    assert backend.kernels is own
    with pytest.raises(InterfaceError):
        backend.use_kernels(KernelSet())


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
    for name in ("exact_host_lengths", "results_on_forward", "fused_host_wait", "rebind_params"):
        assert isinstance(getattr(sync, name), bool), f"{name} is {getattr(sync, name)!r}"
    if sync.rebind_params and backend.capabilities.captures_graphs:
        assert backend.capabilities.updates_graph_params, "rebind_params needs updates_graph_params"


@promise("Backend", "The public methods check the rules and report to an attached observer, then call the vendor's verb.")
def test_no_checked_method_is_overridden(backend: Backend) -> None:
    """The plugin overrides no public verb. It implements the underscored verbs, so that no check is lost."""
    stream, event = backend.create_stream("s"), backend.create_event("e")
    kept: list[tuple[object, type, tuple[str, ...]]] = [
        (stream, Stream, ("record", "wait", "synchronize", "query")),
        (event, Event, ("query", "synchronize", "elapsed_ms", "generation")),
        (
            backend,
            Backend,
            (
                *("on", "create_event", "create_flag", "synchronize", "delay", "empty_pinned", "copy_async"),
                *("keep_alive", "release_finished", "capture", "capturing", "check_not_capturing", "guard", "streams"),
            ),
        ),
    ]
    for thing, base, names in kept:
        lost = [name for name in names if getattr(type(thing), name) is not getattr(base, name)]
        assert not lost, f"{type(thing).__name__} overrides {', '.join(lost)}: implement {', '.join(f'_{n}' for n in lost)}"


@promise("CapabilityError", "An ability was asked for that the backend doesn't declare.")
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


@promise(
    "Backend.translate_error", "Return the typed error for a device exception, or None if the exception isn't the device's."
)
def test_errors_that_are_not_the_devices_pass_unchanged(backend: Backend) -> None:
    """The backend passes an error of the caller and a typed error through unchanged."""
    with pytest.raises(ValueError, match="of the caller") as caught, backend.guard("testing"):
        raise ValueError("a mistake of the caller")
    assert not isinstance(caught.value, OutriderError)
    with pytest.raises(CapabilityError), backend.guard("testing"):
        raise CapabilityError("typed already")


@promise("Backend.is_host", "Return True if the tensor is host memory from the view of this device.")
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
