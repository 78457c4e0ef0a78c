"""What a backend declares once: its capabilities, its kernels, and how an iteration is ordered on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from outrider.device.capabilities import Capabilities
from outrider.device.sync import SpeculativeSync

if TYPE_CHECKING:
    from outrider.device.kernels import KernelSet


class Declared:
    """``capabilities``, ``kernels`` and ``speculative_sync`` of a backend, each given to its constructor or overridden.

    To the constructor: ``kernels`` is a kernel set, or what makes one of the backend; ``speculative_sync`` makes a policy of
    the backend, as the class ``SpeculativeSync`` and its subclasses do. Both are made when they're first asked for, and once.

    Raises :class:`TypeError` when one of the three is neither given nor overridden.
    """

    def __init__(
        self,
        capabilities: Capabilities | None,
        kernels: KernelSet | Callable[[Any], KernelSet] | None,
        speculative_sync: Callable[[Any], SpeculativeSync] | None,
    ) -> None:
        self._given: dict[str, Any] = {
            "capabilities": capabilities,
            "kernels": kernels,
            "speculative_sync": speculative_sync,
        }
        self._making = threading.RLock()
        for what, given in self._given.items():
            if given is None and getattr(type(self), what) is getattr(Declared, what):
                raise TypeError(
                    f"{type(self).__name__} declares no {what}: pass {what}=… to Backend.__init__, or override the property"
                )

    @property
    def capabilities(self) -> Capabilities:
        """What the device can do. Constant over the backend's life."""
        declared: Capabilities = self._given["capabilities"]
        return declared

    @property
    def kernels(self) -> KernelSet:
        """The kernels of this device; constant over the backend's life."""
        made: KernelSet = self._once("kernels")
        return made

    @property
    def speculative_sync(self) -> SpeculativeSync:
        """The policy of this device; constant over the backend's life."""
        made: SpeculativeSync = self._once("speculative_sync")
        return made

    def _once(self, what: str) -> Any:
        """What was given, made of this backend by whoever asks first."""
        if callable(self._given[what]):
            with self._making:
                make = self._given[what]
                if callable(make):
                    self._given[what] = make(self)
        return self._given[what]

    def declaring(self, **abilities: Any) -> Self:
        """A view of this backend that declares ``abilities`` beside its own, for tools that ask whether they'd work.

        Another object of the same device and state: what one of the two changes, both have. Streams, events and graphs
        belong to the one whose method made them. This backend goes on declaring what it did.
        """
        declared = replace(self.capabilities, **abilities)
        kind = type(type(self).__name__, (type(self),), {"capabilities": property(lambda _: declared)})
        view: Any = object.__new__(kind)
        view.__dict__ = self.__dict__
        return view  # type: ignore[no-any-return]
