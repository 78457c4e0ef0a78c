"""Diagnose failed tests: the broken promise, the place and the likely causes of each, and the causes of a whole run.

Equal errors become one group. The verbs of the plugin are ranked as in spectrum-based fault localization (Abreu, Zoeteweij
and van Gemund, 2006): a verb is suspicious if many failed tests and few passed tests call it.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from math import sqrt
from types import FrameType, MappingProxyType
from typing import Any
from unittest.mock import patch

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
from outrider_conformance.promises import Promise, first_sentence

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "Backend": "state that backend objects or the process share, or that an exception leaves unrestored",
        "Backend.attach": "work that the backend doesn't report to the observer, or reports on one thread only",
        "Backend.capture": "`_capture` runs work instead of recording it, or leaves its thread in the capture after an error",
        "Backend.copy_async": "the copy runs on another stream than the one passed, blocks the host, or handles offsets, "
        "strides or element sizes wrongly",
        "Backend.create_graph_pool": "memory of the pool is freed while a graph uses it",
        "Backend.create_stream": "two streams share one queue, or the priority isn't passed to the driver",
        "Backend.delay": "`_delay` blocks the host, or keeps another stream busy instead",
        "Backend.empty_pinned": "the host memory isn't page-locked, or is allocated twice",
        "Backend.keep_alive": "the memory is reused before the event has completed",
        "Backend.on": "`_on` doesn't make this stream current, or doesn't restore the previous one (also after an "
        "exception, and in each thread)",
        "Backend.provoke_fault": "the plugin doesn't check a status of the driver, or loses the status after one read",
        "Backend.release_finished": "`Event._query` never returns True, or returns True too early",
        "Backend.synchronize": "`_synchronize` skips a stream, or drops an error of queued work",
        "Backend.translate_error": "`translate_error` doesn't recognise an exception of the driver",
        "BackendHooks": "the module imports a missing package, ignores an option or device index, or sets global state",
        "Capabilities": "a declared ability that doesn't work, or one that works undeclared: the message names it",
        "CapabilityError": "a call for an undeclared ability does something else instead of raising an error",
        "CaptureContext": "a replay reads the buffer contents of the capture instead of the current contents",
        "BackendInfo": "a statement of `backend_info` that the registry or the commands can't use",
        "CaptureError": "an error in a capture is swallowed, or leaves the stream capturing",
        "CiDeclaration": "the `ci` of `backend_info`",
        "DeviceFault": "a failure of queued work is raised as a plain RuntimeError, or not at all",
        "Event": "the event has no generations: a queued wait uses the latest record at the time when it runs; or the "
        "handle is freed while a wait for it is queued",
        "Event.elapsed_ms": "times measured on the host, or in another unit than milliseconds",
        "Event.query": "`_query` answers for another generation, blocks, or turns an error into True or False",
        "Event.synchronize": "`_synchronize` returns before the record has been reached, or drops an error",
        "Event.synchronize_within": "`_synchronize_within` blocks for longer than its limit, or drops an error",
        "Fence": "the fence orders the host instead of the stream, or neither",
        "Flag": "set, wait or reset of the flag doesn't run in the stream's order",
        "Graph": "a replay reads the contents of the capture instead of the current ones, runs out of the stream's order, "
        "allocates new memory, or shares scratch memory with another graph",
        "Graph.update_params": "a rebind changes replays that are queued already, or no replay at all",
        "GraphPool": "two graphs use the same memory of the pool at the same time",
        "Group": "a collective runs out of the stream's order, mixes up ranks, roots or groups, or drops a peer's error",
        "KernelSet": "the kernel handles padding, strides, the last partial block or this dtype differently from the "
        "reference",
        "RecurrentKernels": "the kernel picks tiles, splits sums or rounds states by the number of tokens in the call",
        **dict.fromkeys(
            ("KernelSet.attention_block", "KernelSet.mlp_block", "KernelSet.experts_block", "KernelSet.recurrent_block"),
            "the block ignores a field of its weights or tokens: a size of the failing shape that isn't 0 names it",
        ),
        "KernelSet.plan_attention": "a renewed plan is another object, or a captured graph keeps what it read from the plan",
        "KernelSet.batch_invariant": "the kernel or its library picks the order of a sum by the number of rows",
        "KernelSet.unused_overrides": "an override only passes its calls on, or computes none of the kit's shapes and dtypes",
        "KernelSet.sample": "the order of temperature, top-k, top-p and the draw, or the use of the random numbers",
        "KernelSet.verify_chain": "acceptance or the residual distribution after a rejection",
        "KernelSet.verify_tree": "acceptance along the tree, or the residual distribution after a rejection",
        "MemoryInfo": "figures of `memory_info` in another unit, or of another device",
        "Observer": "accesses that aren't reported, or are reported with other addresses",
        "OutOfDeviceMemory": "`translate_error` doesn't recognise the driver's out-of-memory error",
        "PluginInfo": "the statements of `backend_info` about this machine",
        "SpeculativeSync": "a declared step mode or exception that isn't true of the device; a kernel that is wrong "
        "in a batch; a wait that doesn't order",
        "SpeculativeSync.after_join": "an override of `after_join` omits what the policy declares, or doesn't call `super()`",
        "Stream": "the queue runs work out of order, or two streams order each other",
        "Stream.query": "`_query` returns True while work is pending, blocks, or turns an error into an answer",
        "Stream.record": "the record completes before earlier work of the stream, or is made on another stream",
        "Stream.synchronize": "`_synchronize` returns before the queue is empty, or drops an error",
        "Stream.wait": "`_wait` isn't enqueued, waits for the event's latest record instead of the one at the call, or "
        "blocks the host; or `_record` completes too early, which looks the same",
    }
)
"""The usual cause of a broken promise, by the interface member that promises. A member without an entry uses its class's."""

_WAITED = "earlier queued work failed: the call that raised here only waited for that work"
_KINDS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    (DeviceLost, "the device is lost: look for the first failure of the run, later failures follow from it"),
    (OutOfDeviceMemory, "memory is never freed, or another process uses the device too"),
    (DeviceFault, _WAITED),
    (CapabilityError, "the test needs an ability that the backend doesn't declare, or an operator that the device lacks"),
    (NotImplementedError, "the plugin doesn't implement a verb or an operator"),
    ((TypeError, AttributeError), "a verb has other parameters, or another result, than the backend interface requires"),
    (ImportError, "a package isn't installed here"),
)
_LATE = "enqueued work waits for something that is never enqueued, a lock is taken twice, or a wait has no end"

VERBS: tuple[type, ...] = (Stream, Event, Flag, Graph, Backend, KernelSet, SpeculativeSync, Fence)
"""The interface classes whose methods a plugin implements."""
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
    """The explanation of a failed test for a report."""

    promise: Promise | None
    """The broken promise, or None if the interface promises nothing about the failure."""
    where: str = ""
    """The phase, the verb of the interface and the line of the plugin in which the failure was raised."""
    causes: tuple[str, ...] = ()
    """Likely causes, the likeliest first."""

    def text(self) -> str:
        """Return place and causes as lines of text, without the words of the promise."""
        lines = [f"where: {self.where}"] if self.where else []
        return "\n".join([*lines, *(f"likely cause: {cause}" for cause in self.causes)])


def diagnose(checked: Promise | None, error: BaseException, phase: str = "call") -> Diagnosis:
    """Return the diagnosis of a test that ended with ``error`` in pytest's ``phase``.

    ``checked`` is the promise that the test checks. The promise is broken if the test's own check failed. An exception from
    another place concerns the verb that raised it, and not the promise that the test would have checked later.
    """
    cause = error.__cause__
    named: Promise | None = getattr(error, "promise", None) or getattr(cause, "promise", None)  # the error names its promise
    if named is not None:
        return Diagnosis(named, causes=_causes(named, None))
    if isinstance(error, AssertionError) and cause is not None and not isinstance(cause, AssertionError):
        error = cause  # the error in the failing schedule
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
        promise = checked if checked is not None and checked[0] == member else _quoted(member)
        return Diagnosis(promise, where, _causes(promise, error))
    outside = "not in a verb of the backend interface, so no promise is quoted"
    return Diagnosis(None, ", ".join(filter(None, [where, place, outside])), _causes(None, error))


def cause_of(member: str) -> str:
    """Return the entry of :data:`CAUSES` for a member of the backend interface, or an empty string."""
    return CAUSES.get(member) or CAUSES.get(member.partition(".")[0], "")


def verb_of(member: str) -> str:
    """Return the method that a plugin implements for a member (``_wait`` for ``Stream.wait``), or an empty string."""
    owner, _, name = member.partition(".")
    base = {base.__name__: base for base in VERBS}.get(owner)
    return f"_{name}" if base is not None and name and hasattr(base, f"_{name}") else ""


def _causes(promise: Promise | None, error: BaseException | None) -> tuple[str, ...]:
    raised = [error, error.__cause__] if error is not None else []
    kind = next((text for types, text in _KINDS if any(isinstance(each, types) for each in raised)), "")
    if promise is None:
        return (kind,) if kind else ()
    likely, verb = cause_of(promise[0]), verb_of(promise[0])
    if verb and verb not in likely:
        likely += f" (checked through your {promise[0].partition('.')[0]}'s `{verb}`)"
    return tuple(filter(None, [kind, likely]))


def _phase(phase: str) -> str:
    if phase == "call":
        return ""
    return "before the test, while opening the backend" if phase == "setup" else "after the test, while draining the device"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _checked_here(error: BaseException, frames: list[FrameType]) -> bool:
    kit = [frame for frame in frames if not _module(frame).startswith(("_pytest", "pytest", "pluggy"))]
    return isinstance(error, AssertionError) and bool(kit) and _module(kit[-1]).startswith("outrider_conformance")


def _raised_in(frames: list[FrameType]) -> str | None:
    """Return the innermost verb of the interface, or None if code of Outrider that the verb calls raised."""
    for frame in reversed(frames):
        name, module = frame.f_code.co_name, _module(frame)
        if module.startswith(_CALLERS):
            return None
        if module.startswith("outrider.registry") and name in _HOOKS:
            return _HOOKS[name]
        if module == "outrider.device.stream" and name == "__enter__":
            return "Backend.on"
        receiver = frame.f_locals.get("self")
        for base in VERBS:
            if isinstance(receiver, base) and not name.startswith("_") and hasattr(base, name):
                return f"{base.__name__}.{name}"
    return None


def _quoted(member: str) -> Promise | None:
    promise = first_sentence(member)
    return promise if promise[1] else None


def _plugin_line(error: BaseException) -> str:
    """Return the innermost line of code outside Outrider, torch and Python's library."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_foreign(frame):
            return f"{_module(frame)}, line {line}, in {frame.f_code.co_name}"
    return ""


def _is_foreign(frame: FrameType) -> bool:
    package = _module(frame).partition(".")[0]
    return package not in _KNOWN and package not in sys.stdlib_module_names and not frame.f_code.co_filename.startswith("<")


_MAX_CAUSES = 3
_MAX_GROUPS = 5
_MAX_NAMED_TESTS = 4
_MAX_REASON_LINES = 12
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?")
_ABSTRACT = re.compile(r"Can't instantiate abstract class (\w+) .*abstract methods? '?([\w, ']+\w)")
_PARAMETER = re.compile(r"\[([A-Z]\w+\.\w+)\]$")
_PROMISED = 0.05
"""Weight of the fraction of failures that break the promise of the verb itself. It decides between verbs that the same tests
call.
"""

Verdicts = Sequence[Mapping[str, Any]]


@contextmanager
def tracing_verbs() -> Generator[set[str]]:
    """Collect the verbs of the plugin that are called inside the scope, on any thread, as ``Stream._wait``.

    The public methods of the interface are replaced inside the scope: each one calls the plugin's method of its name.
    """
    called: set[str] = set()

    def traced(verb: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(verb)
            return method(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for base in VERBS:
            for name, method in list(vars(base).items()):
                if callable(method) and not name.startswith("_") and hasattr(base, f"_{name}"):
                    stack.enter_context(patch.object(base, name, traced(f"{base.__name__}._{name}", method)))
        yield called


def ranked_causes(tests: Verdicts, called: Mapping[str, Iterable[str]]) -> list[dict[str, Any]]:
    """Return the verbs that explain the failed ``tests``, the best explanation first.

    ``called`` has the verbs that each test called. Each further verb explains failures that the verbs before it don't.
    """
    failed = {test["id"]: test for test in tests if test["outcome"] == "failed"}
    absent = {test: found for test, entry in failed.items() if (found := _ABSTRACT.search(str(entry["reason"])))}
    if absent:
        owner, method = next(iter(absent.values())).groups()
        why = f"{owner} doesn't implement it; the name is misspelt if the class has a similar method"
        explained = list(absent)
        return [{"verb": f"{owner}.{method}", "failed": len(explained), "passed": 0, "cause": why, "tests": explained}]

    def suspects(test: Mapping[str, Any]) -> set[str]:
        if _PARAMETER.search(str(test["id"])):  # a test of the one verb that its parameter names
            return set(filter(None, [_promised(test)]))
        own = "" if _WAITED in test.get("causes", ()) else _promised(test)  # a wait is no suspect of an earlier failure
        return {*called.get(test["id"], ()), *filter(None, [own])}

    by_passed = Counter(verb for test in tests if test["outcome"] == "passed" for verb in suspects(test))
    left = {test: suspects(entry) for test, entry in failed.items()}
    causes: list[dict[str, Any]] = []
    while left and len(causes) < _MAX_CAUSES:
        by_failed = Counter(verb for verbs in left.values() for verb in verbs)
        own = Counter(_promised(failed[test]) for test in left)
        if not by_failed:
            break
        total = len(left)

        def suspicion(verb: str) -> float:
            count = by_failed[verb]  # noqa: B023  (called in this turn of the loop)
            return count / sqrt(total * (count + by_passed[verb])) + _PROMISED * own[verb] / total  # noqa: B023

        # Of equals, a verb that makes an object is the last: the test calls it to prepare.
        verb = max(sorted(by_failed), key=lambda verb: (suspicion(verb), "._create_" not in verb))
        explained = [test for test, verbs in left.items() if verb in verbs]
        member = verb.replace("._", ".")
        causes.append(
            {"verb": verb, "failed": len(explained), "passed": by_passed[verb], "cause": cause_of(member), "tests": explained}
        )
        left = {test: verbs for test, verbs in left.items() if verb not in verbs}
    return causes


def _promised(test: Mapping[str, Any]) -> str:
    """Return the verb whose promise the test checks, or the member if no verb keeps its promise (a kernel, a capability), or
    an empty string for a whole class of verbs. A parameter of the test may name the verb.
    """
    named = _PARAMETER.search(str(test["id"]))
    member = str((test["promise"] or {}).get("member", ""))
    member = named[1] if named is not None and verb_of(named[1]) else member
    if verb := verb_of(member):
        return f"{member.partition('.')[0]}.{verb}"
    return "" if member in {base.__name__ for base in VERBS} else member


def grouped(tests: Verdicts) -> list[dict[str, Any]]:
    """Return the failed ``tests`` in groups, the largest first: equal errors but for numbers, or parameters of one test."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for test in tests:
        if test["outcome"] == "failed":
            reason = str(test["reason"]).partition("\n")[0]
            groups.setdefault(_NUMBER.sub("#", reason), []).append(test)
    merged: dict[str, list[Mapping[str, Any]]] = {}
    for error, members in groups.items():
        functions = {str(test["id"]).partition("[")[0] for test in members}
        merged.setdefault(functions.pop() if len(functions) == 1 else error, []).extend(members)
    return [
        {"reason": str(members[0]["reason"]), "tests": [test["id"] for test in members]}
        for members in sorted(merged.values(), key=lambda members: (members[0]["level"], -len(members)))
    ]


def summary_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the lines that sum up the failures of a report: causes by the number of failures, then each group once."""
    lines = [f"look first at {cause_line(cause)}" for cause in report["causes"]]
    by_id = {test["id"]: test for test in report["tests"]}
    for number, group in enumerate(report["failures"][:_MAX_GROUPS], 1):
        first, count = by_id[group["tests"][0]], len(group["tests"])
        named = ", ".join(group["tests"][:_MAX_NAMED_TESTS])
        named += f" and {count - _MAX_NAMED_TESTS} more" if count > _MAX_NAMED_TESTS else ""
        lines += ["", f"{number}. {count} failed test{'s' if count > 1 else ''}: {named}"]
        shown = group["reason"].partition("\n\n")[0].splitlines()[:_MAX_REASON_LINES]  # without the script of a program
        left_out = len(group["reason"].splitlines()) - len(shown)
        lines += [f"   {line}" for line in shown]
        lines += [f"   … {left_out} more lines in the report"] if left_out else []
        if first["promise"] and not group["reason"].startswith(f"{first['promise']['member']} promises"):
            lines.append(f"   {first['promise']['member']} promises: “{first['promise']['words']}”")
        lines += [f"   where: {first['where']}"] if first["where"] else []
        lines += [f"   likely cause: {cause}" for cause in first["causes"]]
        lines += [f"   alone: {first['alone']}"] if first["alone"] else []
    rest = len(report["failures"]) - _MAX_GROUPS
    return [*lines, "", f"{rest} more errors: --report DIR writes them all"] if rest > 0 else lines


def cause_line(cause: Mapping[str, Any]) -> str:
    """Return one entry of :func:`ranked_causes` as text."""
    why = f": {cause['cause']}" if cause["cause"] else ""
    how = "called" if "._" in cause["verb"] else "checked"
    return f"`{cause['verb']}` ({how} by {cause['failed']} failed and {cause['passed']} passed tests){why}"
