"""What a program of several ranks in the corpus is, and how it's run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import Backend, ControllableDevice, Group, Stream
from outrider_sanitizer.findings import Kind, Report

if TYPE_CHECKING:
    from outrider.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a running program. ``everyone``: the group of all ranks. ``store``: where further groups meet."""

    index: int
    size: int
    backend: Backend
    stream: Stream
    everyone: Group
    store: Any

    def group(self, name: str, *ranks: int) -> Group:
        """A further group."""
        return self.backend.create_group(name, ranks=ranks or range(self.size), rank=self.index, store=self.store)

    def diverge(self, kind: str) -> None:
        """Let this rank's device, or its host, depart from the others'."""
        control_of(self.backend).diverge(kind)

    def filled(self, value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of one value, made on this rank's stream."""
        with self.backend.on(self.stream):
            return torch.full(shape or (4,), value, dtype=dtype, device=self.backend.device)

    def tensor(self, values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of given values, made on this rank's stream."""
        with self.backend.on(self.stream):
            return torch.tensor(values, dtype=dtype).to(self.backend.device)

    def read(self, tensor: Tensor) -> list[Any]:
        """The values, when the stream has come there."""
        with self.backend.on(self.stream):
            values: list[Any] = tensor.cpu().tolist()
        return values


RankBody = Callable[[Rank, bool], None]
"""The program of one rank: called with the rank, and True for the corrected program."""


@dataclass(frozen=True, kw_only=True)
class RankRace:
    """One way in which ranks come apart: ``body(rank, fixed)`` is what each rank runs, with the fault or corrected.

    ``of``: its class, A to F, as docs/ranks-proof.md has them. ``kinds`` are the findings that the sanitizer must make of the
    wrong one after one run, and each of ``names`` stands in its report. ``decision``: what the first difference is called.
    ``options`` are the simulated host's.
    """

    name: str
    of: str
    about: str
    body: RankBody
    kinds: frozenset[Kind]
    decision: str = ""
    names: tuple[str, ...] = ()
    inject: str = ""
    ranks: int = 2
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind_text(self) -> str:
        """What the sanitizer calls the first of its kinds."""
        return min(kind.value for kind in self.kinds)

    def devices(self, registry: Registry, ranks: int | None = None) -> list[Backend]:
        """Fresh simulated devices for it."""
        given = "".join(f",{key}={value}" for key, value in self.options.items())
        return [registry.create(f"sim:{index}{given if index == 0 else ''}") for index in range(ranks or self.ranks)]

    def run(self, backends: Sequence[Backend], *, fixed: bool) -> None:
        """Run it, each rank in a host thread. Raises what failed first."""
        control = control_of(backends[0])
        store = control.create_store()
        bodies = [partial(self._rank, index, backends, store, fixed) for index in range(len(backends))]
        control.run_threads(*bodies)

    def _rank(self, index: int, backends: Sequence[Backend], store: Any, fixed: bool) -> None:
        backend, size = backends[index], len(backends)
        everyone = backend.create_group("everyone", ranks=range(size), rank=index, store=store)
        stream = backend.create_stream("forward")
        rank = Rank(index=index, size=size, backend=backend, stream=stream, everyone=everyone, store=store)
        self.body(rank, fixed)
        backend.synchronize()


def rank_race(
    races: list[RankRace], category: str, about: str, kinds: frozenset[Kind], **fields: Any
) -> Callable[[RankBody], RankBody]:
    """Return a decorator that appends a body to ``races`` as a :class:`RankRace` with the function's name, in hyphens.

    ``category`` is the letter of the class of divergence; ``fields`` are further fields of :class:`RankRace`.
    """

    def register(body: RankBody) -> RankBody:
        name = body.__name__.replace("_", "-")
        races.append(RankRace(name=name, of=category, about=about, body=body, kinds=kinds, **fields))
        return body

    return register


def control_of(backend: Backend) -> ControllableDevice:
    """The handle of a simulated device."""
    control = backend.control
    assert control is not None, f"{backend.label} decides its schedules itself; ranks of the corpus need one such as 'sim'"
    return control


def decision_named(report: Report) -> str:
    """The decision that the report names first; empty: none."""
    for finding in report:
        if finding.kind is Kind.DECISION:
            return finding.second.operation.removeprefix("decision ").partition(" = ")[0]
    return ""
