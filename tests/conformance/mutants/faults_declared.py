"""Faults of what a plugin says: its description, its names, its errors, and abilities declared wrongly in both directions."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.mutants.catalogue import Mutant, patch

UNDECLARED = {
    "threads": ("asynchronous", "concurrent_streams", "event_timing", "flags", "perturbs_timing", "captures_graphs"),
    "sim": ("memory_limit", "reports_accesses", "row_exact_accesses", "forks_in_capture"),
    "sim like npu": ("updates_graph_params",),
}
TOGETHER = {  # what must go with an ability that is hidden, for the declaration to hang together
    "asynchronous": ("concurrent_streams",),
    "captures_graphs": ("forks_in_capture", "updates_graph_params", "waits_inside_graphs"),
    "reports_accesses": ("row_exact_accesses",),
}
CLAIMED = {  # ability → the level that finds a device without it
    "cpu": {"asynchronous": 1, "event_timing": 1, "flags": 0, "perturbs_timing": 0, "captures_graphs": 2, "memory_limit": 1},
    "sim": {"waits_inside_graphs": 2, "flags": 0, "updates_graph_params": 3},
    "threads": {"reports_accesses": 1, "memory_limit": 1, "waits_inside_graphs": 2, "updates_graph_params": 3},
}


def mutants() -> Iterator[Mutant]:
    for base, abilities in UNDECLARED.items():
        for ability in abilities:
            yield Mutant("Capabilities", f"{ability} works and isn't declared", base, 1, _undeclared(ability))
    for base, claims in CLAIMED.items():
        for ability, level in claims.items():
            yield Mutant("Capabilities", f"{ability} is declared and isn't there", base, level, _declared(**{ability: True}))
    for fault, changes in (
        ("concurrent_streams is declared without asynchronous", {"concurrent_streams": True}),
        ("forks_in_capture is declared without captures_graphs", {"forks_in_capture": True}),
        ("row_exact_accesses is declared without reports_accesses", {"row_exact_accesses": True}),
        ("no dtype is declared", {"dtypes": frozenset()}),
        ("a page has no token", {"page_size": 0}),
    ):
        yield Mutant("Capabilities", fault, "cpu", 0, _declared(**changes))
    for verb, fault, level, apply in (
        ("Backend.capabilities", "changes with use", 0, _changing),
        ("Backend.kernels", "is a new object each time", 0, _new_kernels),
        ("Backend.speculative_sync", "is a new object each time", 0, _new_sync),
        ("Backend.speculative_sync", "has no step mode", 0, _no_modes),
        ("Backend.speculative_sync", "belongs to another backend", 0, _foreign_sync),
        ("Backend.name", "isn't the entry point's", 0, _misnamed),
        ("Backend.versions", "lacks torch", 0, _no_versions),
        ("Backend.translate_error", "dresses up every error", 0, _translates_all),
        ("Backend.is_host", "takes device memory for the host's", 0, _all_host),
        ("Backend.copy_async", "is overridden", 0, _overridden("copy_async")),
        ("Stream.wait", "is overridden", 0, _overridden_stream("wait")),
        ("backend_info", "is different each time", 0, _unsteady_info),
        ("backend_info", "has no description", 0, _info(description=" ")),
        ("backend_info", "asks for no runner", 0, _no_runner),
        ("backend_info", "names a level that doesn't exist", 0, _no_level),
        ("backend_info", "has another name", 0, _info(name="other")),
        ("backend_info", "supports no interface version of today", 0, _info(interface_min=7, interface_max=9)),
        ("backend_info", "is usable, and gives a reason against", 0, _info(reason="too slow")),
        ("create_backend", "takes any option", 0, _any_option),
        ("create_backend", "takes any device number", 0, _any_ordinal),
        ("create_backend", "gives the same object again", 0, _same_object),
    ):
        yield Mutant(verb, fault, "cpu", level, apply)


def _undeclared(ability):
    changes = dict.fromkeys((ability, *TOGETHER.get(ability, ())), False)

    def apply(base):
        base.declare(**changes)
        if ability == "updates_graph_params":
            base.sync.rebind_params = False
            from outrider_sim import backend

            backend.SimSync.__init__ = base.sync.__init__

    return apply


def _declared(**changes):
    return lambda base: base.declare(**changes)


def _changing(base):
    from dataclasses import replace

    inner = base.backend.capabilities.fget
    base.backend.capabilities = property(lambda self: replace(inner(self), event_timing=bool(self.streams)))


def _new_kernels(base):
    from outrider.device import KernelSet

    base.backend.kernels = property(lambda self: KernelSet())


def _new_sync(base):
    base.backend.speculative_sync = property(lambda self: base.sync(self))


def _no_modes(base):
    for policy in (base.sync, *base.sync.__subclasses__()):
        policy.step_modes = frozenset()


def _foreign_sync(base):
    patch(
        base.backend,
        "__init__",
        lambda original: lambda self: (original(self), setattr(self.speculative_sync, "backend", None))[0],
    )


def _misnamed(base):
    patch(base.backend, "__init__", lambda original: lambda self: (original(self), setattr(self, "name", "Cpu 9000"))[0])


def _no_versions(base):
    base.backend.versions = lambda self: {"driver": "1"}


def _translates_all(base):
    from outrider.device import DeviceFault

    base.backend.translate_error = lambda self, error, doing: DeviceFault(f"{doing}: {error}")


def _all_host(base):
    base.backend.is_host = lambda self, tensor: True


def _overridden(name):
    def apply(base):
        inner = getattr(base.backend, name)
        setattr(base.backend, name, lambda self, *a, **k: inner(self, *a, **k))

    return apply


def _overridden_stream(name):
    def apply(base):
        inner = getattr(base.stream, name)
        setattr(base.stream, name, lambda self, *a: inner(self, *a))

    return apply


def _hook(base, name, make):
    import functools

    original = getattr(base.plugin, name)
    hook = functools.wraps(original)(make(original))  # carries pluggy's mark along
    setattr(base.plugin, name, hook)


def _info(**changes):
    from dataclasses import replace

    return lambda base: _hook(base, "backend_info", lambda original: lambda: replace(original(), **changes))


def _unsteady_info(base):
    from dataclasses import replace

    calls = []
    _hook(
        base,
        "backend_info",
        lambda original: lambda: (calls.append(1), replace(original(), priority=len(calls)))[1],
    )


def _no_runner(base):
    from outrider.device import CiDeclaration

    _info(ci=CiDeclaration(runner_labels=()))(base)


def _no_level(base):
    from outrider.device import CiDeclaration

    _info(ci=CiDeclaration(level="L9"))(base)


def _any_option(base):
    _hook(base, "create_backend", lambda original: lambda ordinal, options: original(ordinal, {}))


def _any_ordinal(base):
    _hook(base, "create_backend", lambda original: lambda ordinal, options: original(0, options))


def _same_object(base):
    kept = []

    def make(original):
        def create(ordinal, options):
            made = original(ordinal, options)
            kept.append(made)
            return kept[0]

        return create

    _hook(base, "create_backend", make)
