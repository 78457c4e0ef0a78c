"""Track the possible contents of memory: a race that is found late also changes copies made before.

Each write makes a *version* of a memory: the tensor with its contents in the order of the program. A racy download may
have read other contents, also those of writes that the program enqueues later, after the slot has been copied on.
Versions are therefore joined by *ways*: functions from other contents of one version to other contents of the next.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from outrider_conformance.programs import language as lang
from outrider_conformance.programs.nodes import ForbiddenStep

Carry = Callable[[Tensor], Tensor]
Contents = dict[Tensor, tuple[Tensor, ...]]  # tensors are keys by identity
Ways = dict[Tensor, tuple[tuple[Tensor, Carry], ...]]
MAX_CONTENTS = 64
"""Maximum number of alternative contents of one version. Two races that copy each other's values would never end."""


class Flows:
    """The alternative contents of each version of a memory, element by element, and the functions between versions."""

    def __init__(
        self, others: dict[Tensor, tuple[Tensor, ...]], ways: dict[Tensor, tuple[tuple[Tensor, Carry], ...]]
    ) -> None:
        self._others, self._ways = others, ways  # tensors are keys by identity

    def copy(self) -> Flows:
        """Return a copy of the alternatives, so that the model can undo a failed step."""
        return Flows(dict(self._others), dict(self._ways))

    def others(self, version: Tensor) -> tuple[Tensor, ...]:
        """Return the contents that a racy read may find in a version in addition to the regular contents."""
        return self._others.get(version, ())

    def join(self, source: Tensor, target: Tensor, carry: Carry, *, itself: bool) -> set[Tensor]:
        """Add the alternative contents of ``source``, and its own if ``itself``, to those of ``target``, from now on.

        Returns the versions that have more contents than before. Raises :class:`ForbiddenStep` if a version has too many
        contents.
        """
        self._ways[source] = (*self._ways.get(source, ()), (target, carry))
        waiting = [(target, carry(content)) for content in (*((source,) if itself else ()), *self.others(source))]
        opened = set()
        while waiting:
            version, content = waiting.pop()
            if self._known(version, content):
                continue
            self._others[version] = (*self.others(version), content)
            if len(self._others[version]) > MAX_CONTENTS:
                raise ForbiddenStep("it has too many outcomes")
            opened.add(version)
            waiting += [(further, onward(content)) for further, onward in self._ways.get(version, ())]
        return opened

    def _known(self, version: Tensor, content: Tensor) -> bool:
        """Return whether each element of ``content`` is an allowed content of the version already."""
        wanted = lang.bits(content)
        missing = wanted != lang.bits(version)
        for each in self.others(version):
            missing &= wanted != lang.bits(each)
        return not bool(missing.any())
