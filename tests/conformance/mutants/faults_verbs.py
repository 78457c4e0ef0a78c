"""The mechanical part: each verb of streams, events, flags, graphs and the backend, with each fault that fits it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from conformance.mutants.catalogue import Mutant, other, patch, patched, previous, under

BOTH = ("threads", "sim")

# verb → (level at which the kit must notice, bases)
DOES_NOTHING = {
    "Stream._record": (1, BOTH),
    "Stream._wait": (1, BOTH),
    "Stream._synchronize": (1, BOTH),
    "Event._synchronize": (1, BOTH),
    "Backend._synchronize": (1, BOTH),
    "Backend._delay": (1, ("threads",)),  # a simulated delay is virtual: the schedules don't need it
    "Backend._copy_async": (1, BOTH),
    "Graph._replay": (2, BOTH),
    "Graph._update_params": (3, ("sim like npu",)),
    "Flag._set": (3, ("threads", "sim like npu")),
    "Flag._wait": (3, ("threads", "sim like npu")),
    "Flag._reset": (3, ("threads", "sim like npu")),
    "Fence.signal": (1, BOTH),
    "Fence.wait": (1, BOTH),
    "Fence.wait_host": (1, BOTH),
}
SYNCHRONISES = {
    "Stream._record": (1, BOTH),
    "Stream._wait": (1, BOTH),
    "Stream._query": (1, BOTH),
    "Event._query": (1, BOTH),
    "Backend._delay": (1, BOTH),
    "Backend._copy_async": (1, BOTH),
    "Graph._replay": (2, BOTH),
    "Flag._set": (3, ("threads", "sim like npu")),
    "Flag._reset": (3, ("threads", "sim like npu")),
    "Fence.signal": (1, BOTH),
    "Fence.done": (1, BOTH),
}
WAITS_FOR_THE_DEVICE = {"Stream._synchronize": (1, BOTH), "Event._synchronize": (1, BOTH)}
ANOTHER_STREAM = {
    "Stream._record": (1, BOTH),
    "Stream._wait": (1, BOTH),
    "Stream._synchronize": (1, BOTH),
    "Stream._query": (1, BOTH),
    "Backend._on": (1, BOTH),
    "Backend._delay": (1, ("threads",)),
    "Graph._replay": (2, BOTH),
    "Graph._update_params": (3, ("sim like npu",)),
    "Flag._set": (3, ("threads", "sim like npu")),
    "Flag._wait": (3, ("threads", "sim like npu")),
    "Flag._reset": (3, ("threads", "sim like npu")),
}
ANOTHER_GENERATION = {"Stream._wait": (1, BOTH), "Event._query": (1, BOTH), "Event._synchronize": (1, BOTH)}
ON_THE_HOST_AT_ONCE = {
    "Backend._copy_async": (1, BOTH),
    "Graph._replay": (2, ("threads",)),
    "Flag._set": (3, ("threads",)),
    "Flag._reset": (3, ("threads",)),
}
TWICE = {"Graph._replay": (2, BOTH)}
ANSWERS = {"Stream._query": (1, BOTH), "Event._query": (1, BOTH), "Fence.done": (1, BOTH)}


def mutants() -> Iterator[Mutant]:
    yield from _each(DOES_NOTHING, "does nothing", _nothing)
    yield from _each(SYNCHRONISES, "synchronises the device", _synchronising)
    yield from _each(WAITS_FOR_THE_DEVICE, "waits for the whole device", _device)
    yield from _each(ANOTHER_STREAM, "goes to another stream", _elsewhere)
    yield from _each(ANOTHER_GENERATION, "takes the generation before", _generation("before"))
    yield from _each(ANOTHER_GENERATION, "takes the first generation for ever", _generation("first"))
    yield from _each(ON_THE_HOST_AT_ONCE, "happens at once, on the host", _at_once)
    yield from _each(DOES_NOTHING, "happens the first time only", _once)
    yield from _each(TWICE, "happens twice", _twice)
    yield from _each(ANSWERS, "is always True", _answer(True))
    yield from _each(ANSWERS, "is always False", _answer(False))


def _each(verbs, fault, make):
    for verb, (level, bases) in verbs.items():
        for base in bases:
            yield Mutant(verb, fault, base, level, lambda base, verb=verb: make(base, *_method(base, verb), verb))


def _method(base, verb):
    from outrider.device import EventFence

    owner, _, name = verb.partition(".")
    owners = {"Stream": base.stream, "Event": base.event, "Flag": base.flag, "Graph": base.graph, "Backend": base.backend}
    owners |= {"Fence": EventFence}
    return owners[owner], name


def _stream_of(verb, self, arguments):
    """The stream that a call of the verb is about, where it's about one."""
    kind = verb.partition(".")[0]
    if kind == "Stream":
        return self
    return next((a for a in arguments if hasattr(a, "_record") and hasattr(a, "_wait")), None)


def _nothing(base, owner, name, verb):
    @patched(owner, name)
    def nothing(original, self, *arguments):
        if verb == "Stream._record" and base.get_record(arguments[0]) is None:
            original(self, *arguments)  # the driver has something to wait for, and never anything newer
        if verb == "Fence.signal" and self.event.generation == 0:
            original(self, *arguments)


def _synchronising(base, owner, name, verb):
    @patched(owner, name)
    def synchronising(original, self, *arguments):
        result = original(self, *arguments)
        backend = getattr(self, "backend", None) or getattr(getattr(self, "event", None), "backend", self)
        if backend.active_capture is None:
            backend._synchronize()
            if name in ("_query", "done"):
                return original(self, *arguments)
        return result


def _device(base, owner, name, verb):
    original = base.stream._synchronize

    def device(self):
        for stream in self.backend.streams:
            original(stream)

    setattr(owner, name, device)


def _elsewhere(base, owner, name, verb):
    @patched(owner, name)
    def elsewhere(original, self, *arguments):
        stream = _stream_of(verb, self, arguments)
        if stream.backend.active_capture is not None:
            return original(self, *arguments)
        if verb.startswith("Stream."):
            return original(other(stream), *arguments)
        return original(self, *(other(stream) if a is stream else a for a in arguments))


def _generation(which):
    def apply(base, owner, name, verb):
        previous(base)

        @patched(owner, name)
        def stale(original, self, *arguments):
            event = arguments[0] if arguments else self
            if event.backend.active_capture is not None:
                return original(self, *arguments)
            return under(base, event, getattr(event, which), lambda: original(self, *arguments))

    return apply


def _at_once(base, owner, name, verb):
    if verb == "Backend._copy_async":

        def copy(self, destination, source):
            with _host_view(base):
                _raw(destination).copy_(_raw(source))

        setattr(owner, name, copy)
    elif verb == "Graph._replay":
        patch(owner, name, lambda original: lambda self, stream: self._run())
    else:
        now = {"_set": lambda self: self._flag.set(), "_reset": lambda self: self._flag.clear()}[name]
        patch(owner, name, lambda original: lambda self, stream: now(self))


@contextlib.contextmanager
def _host_view(base):
    import torch

    with torch.utils._python_dispatch._disable_current_modes():
        yield


def _raw(tensor):
    """The memory behind a tensor of the simulated device, or the tensor."""
    return getattr(tensor, "raw", tensor)


def _once(base, owner, name, verb):
    @patched(owner, name)
    def once(original, self, *arguments):
        # A record counts per event: a driver that never recorded an event has nothing to wait for.
        thing = arguments[0] if verb == "Stream._record" else self
        if name in getattr(thing, "_done_once", ()):
            return
        original(self, *arguments)
        backend = self if verb.startswith("Backend") else getattr(self, "event", self).backend
        if verb.startswith("Backend") or backend.active_capture is None:
            thing._done_once = {*getattr(thing, "_done_once", ()), name}


def _twice(base, owner, name, verb):
    patch(owner, name, lambda original: lambda self, *a: (original(self, *a), original(self, *a))[1])


def _answer(value):
    def apply(base, owner, name, verb):
        patch(owner, name, lambda original: lambda self: value)

    return apply
