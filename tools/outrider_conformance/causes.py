"""What a failed test says: which promise broke, or where it happened outside any, and what is the likely cause."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, MappingProxyType

import pytest

from outrider.device import (
    Backend,
    CapabilityError,
    DeviceFault,
    DeviceLost,
    Event,
    Fence,
    Flag,
    Graph,
    KernelSet,
    OutOfDeviceMemory,
    SpeculativeSync,
    Stream,
)
from outrider.errors import CheckpointError
from outrider_conformance.promises import docstring

Promise = tuple[str, str]
"""(member, words): a name of the backend interface, and a passage of its docstring."""

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "Backend": "state that two backend objects share, or that an exception leaves behind",
        "Backend.attach": "work that isn't reported to the observer, or reported on one thread alone",
        "Backend.capture": "`_capture` runs work instead of noting it, or leaves its thread in the capture after an error",
        "Backend.copy_async": "a copy on another stream than the one given, one that blocks, or one that handles offsets, "
        "strides or widths of the dtype wrongly",
        "Backend.create_graph_pool": "memory of a pool that is given back while a graph uses it",
        "Backend.create_stream": "two streams that are one queue, or a priority that isn't passed on",
        "Backend.delay": "`_delay` blocks the host, or keeps another stream busy",
        "Backend.empty_pinned": "host memory that isn't page-locked, or that is given out twice",
        "Backend.keep_alive": "memory that is reused before the event has completed",
        "Backend.on": "`_on` doesn't make this stream current, or doesn't restore the one before: after an exception "
        "too, and in each thread",
        "Backend.provoke_fault": "a status of the driver that isn't looked at, or is forgotten once it's read",
        "Backend.release_finished": "`Event._query` says no for ever, or says yes too early",
        "Backend.synchronize": "`_synchronize` leaves out a stream, or an error of queued work",
        "Backend.translate_error": "an exception of the driver that `translate_error` doesn't know",
        "BackendHooks": "the module imports what isn't there, an option is ignored, or a device's number isn't checked",
        "Capabilities": "a declaration that isn't true: see what the message says works, or doesn't",
        "CapabilityError": "an ability that isn't declared is answered by something else instead of an error",
        "CaptureContext": "a replay that reads what was in a buffer at its capture, instead of what is there now",
        "CaptureError": "an error in a capture that is swallowed, or leaves the stream capturing",
        "CiDeclaration": "the `ci` of `backend_info`",
        "DeviceFault": "a failure of queued work that ends as a plain RuntimeError, or as nothing",
        "Event": "an event without generations: a wait that looks up its latest record when it runs; or a handle that is "
        "freed while a wait for it is queued",
        "Event.elapsed_ms": "times taken on the host, or in another unit",
        "Event.query": "`_query` answers for another generation, blocks, or takes an error for yes or no",
        "Event.synchronize": "`_synchronize` returns before the record has been reached, or drops an error",
        "Event.synchronize_within": "`_synchronize_within` blocks for longer, or drops an error",
        "Fence": "a fence that orders the host instead of the stream, or neither",
        "Flag": "a flag whose set, wait or reset isn't in the stream's order",
        "Graph": "a replay that runs out of the stream's order, allocates anew, or shares scratch memory with another one",
        "Graph.update_params": "a rebind that changes replays which are queued already, or none at all",
        "GraphPool": "memory of a pool that two graphs use at a time",
        "Group": "a collective that isn't in the stream's order, mixes up ranks, roots or groups, or drops a peer's error",
        "KernelSet": "a kernel that handles padding, strides, sizes of the last block or this dtype otherwise than the "
        "reference",
        "KernelSet.sample": "the order of temperature, top-k, top-p and the draw, or how the random numbers are used",
        "KernelSet.verify_chain": "acceptance or the residual distribution after a rejection",
        "KernelSet.verify_tree": "acceptance along the tree, or the residual distribution after a rejection",
        "MemoryInfo": "figures of `memory_info` in another unit, or of another device",
        "Observer": "accesses that aren't reported, or with other addresses",
        "OutOfDeviceMemory": "the driver's error for lack of memory, which `translate_error` doesn't know",
        "PinnedBuffer": "memory that is freed or reused while a copy uses it",
        "PluginInfo": "what `backend_info` says about this machine",
        "SpeculativeSync": "a step mode or an exception that is declared and not true of the device; a kernel that is wrong "
        "in a batch; a wait that doesn't order",
        "Stream": "a queue that runs work out of order, or two streams that order each other",
        "Stream.query": "`_query` says yes while work is pending, blocks, or takes an error for an answer",
        "Stream.record": "a record that completes before the work ahead of it, or on another stream than this one",
        "Stream.synchronize": "`_synchronize` returns before the queue is empty, or drops an error",
        "Stream.wait": "`_wait` isn't enqueued, waits for the event's latest record instead of the one at the call, or holds "
        "up the host",
    }
)
"""By the member that promises: what breaks it, mostly. A member without a line has that of its class."""

_KINDS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    (DeviceLost, "the device can't go on: look for the first failure of the run, later ones follow from it"),
    (OutOfDeviceMemory, "memory is never given back, or the device is shared with another process"),
    (DeviceFault, "work that was queued before failed: what raised here only waited for it"),
    (CapabilityError, "an ability that the backend doesn't declare, or an operator that the device doesn't have"),
    (NotImplementedError, "a verb or an operator that the plugin doesn't implement"),
    ((TypeError, AttributeError), "a verb with other parameters, or another result, than the backend interface asks for"),
    (ImportError, "a package that isn't installed here"),
)
_LATE = "enqueued work that waits for something nobody enqueues, a lock that is held twice, or a wait without an end"

_VERBS = (Stream, Event, Flag, Graph, Backend, KernelSet, SpeculativeSync, Fence)
_HOOKS: Mapping[str, str] = MappingProxyType(
    {"create": "BackendHooks.create_backend", "info": "BackendHooks.backend_info", "select": "BackendHooks.backend_info"}
)
_LOADING = ("load_checkpoint", "open_checkpoint", "read_model_config", "from_checkpoint")
_KNOWN = frozenset(
    (
        *("outrider", "outrider_conformance", "outrider_sanitizer", "outrider_trace", "torch"),
        *("pytest", "_pytest", "pluggy", "hypothesis", "numpy"),
    )
)
_CALLERS = ("outrider.engine", "outrider.model", "outrider.speculative", "outrider_conformance", "outrider_sanitizer")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``promise``: what broke; None where the interface promises nothing of it. ``where``: what was being done. ``causes``:
    the likeliest first.
    """

    promise: Promise | None
    where: str = ""
    causes: tuple[str, ...] = ()

    def text(self) -> str:
        """For people, without the words of the promise."""
        lines = [f"where: {self.where}"] if self.where else []
        return "\n".join([*lines, *(f"likely cause: {cause}" for cause in self.causes)])


def diagnose(checked: Promise | None, error: BaseException, phase: str = "call") -> Diagnosis:
    """Why a test ended with ``error``. ``checked``: the promise that it holds the backend to; ``phase``: pytest's.

    The test's promise broke where the test's own check failed. An exception from elsewhere says something about the verb
    that raised it, and nothing about what the test would have checked later.
    """
    named: Promise | None = getattr(error, "promise", None)  # found by whoever raised it
    if named is not None:
        return Diagnosis(named, causes=_causes(named, None))
    behind = error.__cause__
    if isinstance(error, AssertionError) and behind is not None and not isinstance(behind, AssertionError):
        error = behind  # a schedule showed it
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    loading = any(frame.f_code.co_name in _LOADING and _module(frame).startswith("outrider.") for frame in frames)
    member, place = _raised_in(frames), _plugin_line(error)
    if isinstance(error, pytest.fail.Exception) and "still running" in str(error):
        where = ", in ".join(filter(None, ["while loading a checkpoint" if loading else "", member])) or _phase(phase)
        return Diagnosis(None if loading else checked, where, (_LATE,))
    if phase == "call" and not loading and (isinstance(error, pytest.fail.Exception) or _checked_here(error, frames)):
        return Diagnosis(checked, causes=_causes(checked, None))
    where = "while loading a checkpoint" if loading or isinstance(error, CheckpointError) else _phase(phase)
    if member is not None:
        where = ", ".join(filter(None, [where, f"raised in {member}", place]))
        promise = checked if checked is not None and checked[0] == member else _first_sentence(member)
        return Diagnosis(promise, where, _causes(promise, error))
    outside = "not in a verb of the backend interface, so no promise is quoted"
    return Diagnosis(None, ", ".join(filter(None, [where, place, outside])), _causes(None, error))


def cause_of(member: str) -> str:
    """The line of :data:`CAUSES` for a member of the backend interface; empty without one."""
    return CAUSES.get(member) or CAUSES.get(member.partition(".")[0], "")


def verb_of(member: str) -> str:
    """What a plugin writes for a member of the interface: ``_wait`` for ``Stream.wait``; empty where it writes nothing."""
    owner, _, name = member.partition(".")
    base = {base.__name__: base for base in _VERBS}.get(owner)
    return f"_{name}" if base is not None and name and hasattr(base, f"_{name}") else ""


def _causes(promise: Promise | None, error: BaseException | None) -> tuple[str, ...]:
    raised = [error, error.__cause__] if error is not None else []
    kind = next((text for types, text in _KINDS if any(isinstance(each, types) for each in raised)), "")
    if promise is None:
        return (kind,) if kind else ()
    likely, verb = cause_of(promise[0]), verb_of(promise[0])
    if verb and verb not in likely:
        likely += f" (look first at your {promise[0].partition('.')[0]}'s `{verb}`)"
    return tuple(filter(None, [kind, likely]))


def _phase(phase: str) -> str:
    if phase == "call":
        return ""
    return "before the test, while opening the backend" if phase == "setup" else "after the test, while draining the device"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _checked_here(error: BaseException, frames: list[FrameType]) -> bool:
    """Whether an assertion of the kit's own failed."""
    mine = [frame for frame in frames if not _module(frame).startswith(("_pytest", "pytest", "pluggy"))]
    return isinstance(error, AssertionError) and bool(mine) and _module(mine[-1]).startswith("outrider_conformance")


def _raised_in(frames: list[FrameType]) -> str | None:
    """The innermost verb of the backend interface, unless its caller's code runs inside it and that raised."""
    for frame in reversed(frames):
        name, module = frame.f_code.co_name, _module(frame)
        if module.startswith(_CALLERS):
            return None
        if module.startswith("outrider.registry") and name in _HOOKS:
            return _HOOKS[name]
        if module == "outrider.device.scopes" and name == "__enter__":
            return "Backend.on"
        this = frame.f_locals.get("self")
        for base in _VERBS:
            if isinstance(this, base) and not name.startswith("_") and hasattr(base, name):
                return f"{base.__name__}.{name}"
    return None


def _first_sentence(member: str) -> Promise | None:
    sentence = docstring(member).partition(". ")[0].rstrip(".")
    return (member, f"{sentence}.") if sentence else None


def _plugin_line(error: BaseException) -> str:
    """The innermost line of code that is neither Outrider's, nor torch's, nor Python's."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_foreign(frame):
            return f"{_module(frame)}, line {line}, in {frame.f_code.co_name}"
    return ""


def _is_foreign(frame: FrameType) -> bool:
    package = _module(frame).partition(".")[0]
    return package not in _KNOWN and package not in sys.stdlib_module_names and not frame.f_code.co_filename.startswith("<")
