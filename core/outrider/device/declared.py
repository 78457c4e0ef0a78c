"""The one-time declarations of a backend: capabilities, kernels, and the order of an iteration on the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from outrider.device.capabilities import Capabilities
from outrider.device.sync import SpeculativeSync

if TYPE_CHECKING:
    from outrider.device.kernels import KernelSet


class BackendDeclarations:
    """``capabilities``, ``kernels`` and ``speculative_sync`` of a backend, each passed to the constructor or overridden.

    As constructor arguments, ``kernels`` is a kernel set or a factory that takes the backend. ``speculative_sync`` is a
    factory that takes the backend, such as the class ``SpeculativeSync`` or a subclass. Each factory is called once, on
    first access.

    Raises :class:`TypeError` if one of the three is neither passed nor overridden.
    """

    def __init__(
        self,
        capabilities: Capabilities | None,
        kernels: KernelSet | Callable[[Any], KernelSet] | None,
        speculative_sync: Callable[[Any], SpeculativeSync] | None,
    ) -> None:
        self._declarations: dict[str, Any] = {
            "capabilities": capabilities,
            "kernels": kernels,
            "speculative_sync": speculative_sync,
        }
        self._creation_lock = threading.RLock()
        for name, value in self._declarations.items():
            if value is None and getattr(type(self), name) is getattr(BackendDeclarations, name):
                raise TypeError(
                    f"{type(self).__name__} declares no {name}: pass {name}=… to Backend.__init__, or override the property"
                )

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities of the device. Constant over the backend's life."""
        declared: Capabilities = self._declarations["capabilities"]
        return declared

    @property
    def kernels(self) -> KernelSet:
        """Return the kernels of this device. Constant over the backend's life."""
        kernels: KernelSet = self._created_once("kernels")
        return kernels

    @property
    def speculative_sync(self) -> SpeculativeSync:
        """Return the policy of this device. Constant over the backend's life."""
        policy: SpeculativeSync = self._created_once("speculative_sync")
        return policy

    def _created_once(self, name: str) -> Any:
        """Return the declaration ``name``. The first access calls its factory."""
        if callable(self._declarations[name]):
            with self._creation_lock:
                factory = self._declarations[name]
                if callable(factory):
                    self._declarations[name] = factory(self)
        return self._declarations[name]

    def with_capabilities(self, **abilities: Any) -> Self:
        """Return a view of this backend that also declares ``abilities``, for tools that test undeclared abilities.

        The view is another object that shares the device and all state with this backend. Streams, events and graphs
        belong to the object whose method created them. The declarations of this backend do not change.
        """
        declared = replace(self.capabilities, **abilities)
        kind = type(type(self).__name__, (type(self),), {"capabilities": property(lambda _: declared)})
        view: Any = object.__new__(kind)
        view.__dict__ = self.__dict__
        return view  # type: ignore[no-any-return]
