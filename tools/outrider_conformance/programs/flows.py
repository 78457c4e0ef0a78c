"""Where the contents of memory go: a race that is met late reaches what was copied before.

Each write makes a *version* of a memory, which is the tensor with its contents by the order of the program. A racy download
may have found other contents, also those of writes that the program enqueues later, when the slot has been copied on. So
versions are joined by *ways*: how other contents of one become other contents of the next.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from outrider_conformance.programs import language as lang
from outrider_conformance.programs.nodes import Senseless

Carry = Callable[[Tensor], Tensor]
Contents = dict[Tensor, tuple[Tensor, ...]]  # tensors are keys by identity
Ways = dict[Tensor, tuple[tuple[Tensor, Carry], ...]]
MOST = 64
"""Further contents of one version. Values that two races hand each other in a circle would never end."""


class Flows:
    """What versions may hold beside their own contents, for each element one of them, and the ways between versions."""

    def __init__(
        self, others: dict[Tensor, tuple[Tensor, ...]], ways: dict[Tensor, tuple[tuple[Tensor, Carry], ...]]
    ) -> None:
        self._others, self._ways = others, ways  # tensors are keys by identity

    def copy(self) -> Flows:
        """For going back."""
        return Flows(dict(self._others), dict(self._ways))

    def others(self, version: Tensor) -> tuple[Tensor, ...]:
        """Its further contents."""
        return self._others.get(version, ())

    def join(self, source: Tensor, target: Tensor, carry: Carry, *, itself: bool) -> set[Tensor]:
        """Contents of ``source`` reach ``target`` from now on. ``itself``: its own too, not its further ones alone.

        Returns the versions that have more contents than before. Raises :class:`Senseless` where they have too many.
        """
        self._ways[source] = (*self._ways.get(source, ()), (target, carry))
        waiting = [(target, carry(content)) for content in (*((source,) if itself else ()), *self.others(source))]
        opened = set()
        while waiting:
            version, content = waiting.pop()
            if self._known(version, content):
                continue
            self._others[version] = (*self.others(version), content)
            if len(self._others[version]) > MOST:
                raise Senseless("it has too many outcomes")
            opened.add(version)
            waiting += [(further, onward(content)) for further, onward in self._ways.get(version, ())]
        return opened

    def _known(self, version: Tensor, content: Tensor) -> bool:
        """Whether each element is allowed there already."""
        wanted = lang.bits(content)
        missing = wanted != lang.bits(version)
        for each in self.others(version):
            missing &= wanted != lang.bits(each)
        return not bool(missing.any())
