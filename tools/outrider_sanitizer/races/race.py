"""One program of the corpus, for one device or for several ranks: a fault, and the same program corrected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import Backend, CapabilityError, ControllableDevice, Group, Stream
from outrider_sanitizer.report import FindingKind, Report

if TYPE_CHECKING:
    from outrider.registry import Registry


Body = Callable[[Backend, bool], None]


class WrongValue(AssertionError):
    """A program of the corpus read a wrong value."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """One class of fault, as a small program with the fault and the same program corrected."""

    name: str
    about: str
    body: Body
    """The function that runs the program, called with the backend, and True for the corrected program."""
    kind: FindingKind | None = None
    """Finding that the sanitizer must make after one run in program order; None if only some schedules show the fault."""
    names: tuple[str, ...] = ()
    """Texts that the sanitizer's report must contain."""
    visible: bool = True
    """True if some schedule gives a wrong value or a hang."""
    within: int = 20
    """Number of schedules within which a visible fault shows."""
    needs: str = ""
    """Name of a device capability that the program needs, or an empty string."""

    def wrong(self, backend: Backend) -> None:
        """Run the program with the fault. Raises :class:`WrongValue` if the program reads a wrong value."""
        self.body(backend, False)

    def right(self, backend: Backend) -> None:
        """Run the corrected program on ``backend``. Raises :class:`WrongValue` if the program reads a wrong value."""
        self.body(backend, True)


def race(
    races: list[Race], kind: FindingKind | None = None, **fields: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that appends a body to ``races`` as a :class:`Race`.

    Its name is the function's, in hyphens, and its description is the first line of the docstring. The body is called with
    the backend, True for the corrected program, and a new stream for each further parameter, which has the parameter's name.
    ``fields`` are further fields of :class:`Race`.
    """

    def register(body: Callable[..., None]) -> Callable[..., None]:
        _, _, *streams = signature(body).parameters

        def program(backend: Backend, fixed: bool) -> None:
            body(backend, fixed, *map(backend.create_stream, streams))

        races.append(Race(name=body.__name__.replace("_", "-"), about=first_line(body), body=program, kind=kind, **fields))
        return body

    return register


def first_line(body: Callable[..., object]) -> str:
    """Return the first line of a function's docstring."""
    return (body.__doc__ or "").partition("\n")[0]


def filled(backend: Backend, stream: Stream, value: float, *shape: int) -> Tensor:
    """Return a device tensor of one value, created on ``stream``."""
    with backend.on(stream):
        return torch.full(shape or (4,), value, device=backend.device)


def order(first: Stream, *later: Stream) -> None:
    """Order the next operations of ``later`` after all operations enqueued on ``first`` so far."""
    event = first.backend.create_event("order")
    first.record(event)
    for stream in later:
        stream.wait(event)


def expect(backend: Backend, tensor: Tensor, *values: float) -> None:
    """Synchronize the device and compare a tensor. Raises :class:`WrongValue` unless each element is one of ``values``."""
    backend.synchronize()
    expect_values(tensor.flatten().tolist(), *values)


def expect_values(seen: list[float], *values: float) -> None:
    """Compare values that the host has read. Raises :class:`WrongValue` unless each of ``seen`` is one of ``values``."""
    if any(value not in values for value in seen):
        raise WrongValue(f"expected {' or '.join(map(str, values))}, found {seen}")


@dataclass(frozen=True, kw_only=True)
class ProgramRank:
    """One rank of a running program. ``everyone`` is the group of all ranks; ``store`` connects further groups."""

    index: int
    size: int
    backend: Backend
    stream: Stream
    everyone: Group
    store: Any
    tensors: list[Tensor] = field(default_factory=list)
    """The program's tensors, kept alive until the device has finished."""

    def group(self, name: str, *ranks: int) -> Group:
        """Return a further group of the given ranks, or of all ranks."""
        return self.backend.create_group(name, ranks=ranks or range(self.size), rank=self.index, store=self.store)

    def diverge(self, kind: str) -> None:
        """Make this rank's device or host diverge from those of the other ranks."""
        control_of(self.backend).diverge(kind)

    def filled(self, value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor of one value, created on this rank's stream."""
        with self.backend.on(self.stream):
            made = torch.full(shape or (4,), value, dtype=dtype, device=self.backend.device)
        self.tensors.append(made)
        return made

    def tensor(self, values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor of the given values, created on this rank's stream."""
        with self.backend.on(self.stream):
            return torch.tensor(values, dtype=dtype).to(self.backend.device)

    def read_tensor(self, tensor: Tensor) -> list[Any]:
        """Return the values of ``tensor``; waits for this rank's stream."""
        with self.backend.on(self.stream):
            values: list[Any] = tensor.cpu().tolist()
        return values


RankBody = Callable[[ProgramRank, bool], None]
"""The program of one rank: called with the rank, and True for the corrected program."""


@dataclass(frozen=True, kw_only=True)
class RankRace:
    """One divergence of ranks, as a small program with the fault and the same program corrected."""

    name: str
    category: str
    """Class of the divergence, A to G, as docs/ranks-proof.md defines them."""
    about: str
    body: RankBody
    kinds: frozenset[FindingKind]
    """Kinds of the findings that the sanitizer must make after one run with the fault."""
    decision: str = ""
    """Name of the first decision in which the ranks differ."""
    names: tuple[str, ...] = ()
    """Texts that the sanitizer's report must contain."""
    inject: str = ""
    """Name of the divergence for ``outrider explore ranks --inject``."""
    ranks: int = 2
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the simulated host, by name."""

    @property
    def kind_text(self) -> str:
        """The sanitizer's name of the alphabetically first kind."""
        return min(kind.value for kind in self.kinds)

    def devices(self, registry: Registry, ranks: int | None = None) -> list[Backend]:
        """Return new simulated devices, one per rank, with the program's options."""
        options_text = "".join(f",{key}={value}" for key, value in self.options.items())
        return [registry.create(f"sim:{index}{options_text if index == 0 else ''}") for index in range(ranks or self.ranks)]

    def run_race(self, backends: Sequence[Backend], *, fixed: bool) -> None:
        """Run each rank in its own host thread. Raises the first error of a rank."""
        control = control_of(backends[0])
        store = control.create_store()
        bodies = [partial(self._rank, index, backends, store, fixed) for index in range(len(backends))]
        control.run_threads(*bodies)

    def _rank(self, index: int, backends: Sequence[Backend], store: Any, fixed: bool) -> None:
        backend, size = backends[index], len(backends)
        everyone = backend.create_group("everyone", ranks=range(size), rank=index, store=store)
        stream = backend.create_stream("forward")
        rank = ProgramRank(index=index, size=size, backend=backend, stream=stream, everyone=everyone, store=store)
        self.body(rank, fixed)
        backend.synchronize()


def rank_race(
    races: list[RankRace], category: str, kinds: frozenset[FindingKind], **fields: Any
) -> Callable[[RankBody], RankBody]:
    """Return a decorator that appends a body to ``races`` as a :class:`RankRace`.

    Its name is the function's, in hyphens, and its description is the first line of the docstring. ``category`` is the letter
    of the class of divergence; ``fields`` are further fields of :class:`RankRace`.
    """

    def register(body: RankBody) -> RankBody:
        name = body.__name__.replace("_", "-")
        races.append(RankRace(name=name, category=category, about=first_line(body), body=body, kinds=kinds, **fields))
        return body

    return register


def control_of(backend: Backend) -> ControllableDevice:
    """Return the control of a simulated device. Raises :class:`CapabilityError` for another device."""
    if backend.control is None:
        raise CapabilityError(f"{backend.label} decides its schedules itself; explore needs one such as 'sim'")
    return backend.control


def decision_named(report: Report) -> str:
    """Return the name of the first differing decision in the report, or an empty string."""
    for finding in report:
        if finding.kind is FindingKind.DECISION:
            return finding.second.operation.removeprefix("decision ").partition(" = ")[0]
    return ""
