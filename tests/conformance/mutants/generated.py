"""Mutants that are generated: each rule of the contract, broken in each way that fits it.

They stand beside the table of `faults_*.py`, which is written by hand and which the kit was developed against. These come
from lists of operands and of verbs, and are judged by the kit as a vendor runs it. `reach()` notes that a fault took effect:
a mutant whose fault never did shows nothing, and is listed as such.
"""

from __future__ import annotations

import inspect

from conformance.mutants.catalogue import Mutant

REACHED: list[str] = []


def reach(what: str = "") -> None:
    """The fault took effect here."""
    if not REACHED:
        REACHED.append(what)


def kernels(changes):
    """The backend's own kernels are a set with these methods changed; the references stay as they are."""

    def apply(base):
        from outrider.device import KernelSet

        changed = type("Changed", (KernelSet,), {})
        for name, make in changes.items():
            setattr(changed, name, _method(name, getattr(KernelSet, name), make))
        made = changed()
        base.backend.kernels = property(lambda self: made)

    return apply


def _method(name, original, make):
    signature = inspect.signature(original)
    kernel = make(lambda **k: original(k.pop("self"), **k))

    def method(*arguments, **options):
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        return kernel(**bound.arguments)

    return method


def mutants() -> dict[str, Mutant]:
    """All of them, by name."""
    from conformance.mutants import generated_drivers, generated_kernels, generated_rules, generated_verbs

    made = [
        one for module in (generated_verbs, generated_drivers, generated_kernels, generated_rules) for one in module.mutants()
    ]
    found = {one.name: one for one in made}
    assert len(found) == len(made), "two mutants have one name"
    return found
