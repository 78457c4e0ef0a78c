"""Hooks of a plugin package: one describes the plugin without heavy imports, one creates the backend or kernels.

A plugin is a module named by an entry point of the group ``outrider.backends`` (or ``outrider.kernels``, for kernels
alone). The name of the entry point is the name that users type. The module's top level must not import the vendor's package:
the module is loaded only to be described.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import pluggy

from outrider.device.errors import ConfigError

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.kernels.kernelset import KernelSet

ENTRY_POINT_GROUP = "outrider.backends"
KERNELS_GROUP = "outrider.kernels"
INTERFACE_VERSION = 1
"""Version of this interface. It rises when a correct plugin could become incorrect."""
INTERFACE_DATES: Mapping[int, str] = MappingProxyType({1: "2026-11-28"})
"""The day on which each version of this interface was fixed. A report names version and day."""

hookspec = pluggy.HookspecMarker("outrider")
hookimpl = pluggy.HookimplMarker("outrider")


@dataclass(frozen=True, kw_only=True, slots=True)
class CiDeclaration:
    """How a CI runs this backend; ``outrider ci-matrix`` turns it into a matrix row.

    Each default is right for a backend that needs no hardware. No field depends on the machine that reads it: a backend
    that can't run on this machine still declares the runners that it needs.
    """

    runner_labels: tuple[str, ...] = ("ubuntu-latest",)
    """Labels that a runner must have, all of them. One that no runner has makes the row "not run"."""

    container: str | None = None
    """Image that the job runs in; None: on the runner itself."""

    torch: str | None = None
    """Source of torch: the address of a package index (``https://…``), else a requirement (``torch==2.10.0``).
    None: the workflow's own choice, the build without an accelerator."""

    markers: tuple[str, ...] = ()
    """Words for special properties, such as ``graphs``; ``outrider ci-matrix --select graphs`` selects rows by them."""

    level: str = "L4"
    """Conformance is run up to this level."""

    device_count: int = 1
    """Devices that a runner has for collectives. With two or more a job of its own runs level L6: ranks on devices of their
    own. A backend whose ranks need no further devices leaves it at 1 and declares ``level="L6"``."""

    ranks_runner_labels: tuple[str, ...] = ()
    """Labels of the runner of that job; empty: ``runner_labels``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginInfo:
    """The description of a plugin, returned before a backend or kernel set is created."""

    name: str
    description: str
    interface_min: int = INTERFACE_VERSION
    """Oldest interface version that the plugin supports."""
    interface_max: int = INTERFACE_VERSION
    """Newest interface version that the plugin supports. Not a version without a day in :data:`INTERFACE_DATES`."""
    usable: bool = True
    """False if the plugin knows that it can't run on this machine. The check must be cheap, start no device and import no
    vendor package."""
    reason: str = ""
    """The reason why the plugin isn't usable."""
    advice: str = ""
    """The action that makes the plugin usable; empty if it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendInfo(PluginInfo):
    """The description of a plugin's backend, returned before the backend is created."""

    priority: int = 0
    """Rank among the usable plugins: ``auto`` selects the highest. A plugin with a negative priority must be named."""
    device_count: int | None = None
    """Number of devices on this machine, each of which ``create_backend`` opens; None: unknown."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the backend's name, each with its meaning. Outrider itself defines ``kernels``."""
    cache_variables: tuple[str, ...] = ()
    """Environment variables that each name a directory of compiled kernels."""
    sanitizer_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment under which torch's own sanitizer watches the device; empty if torch has none for the device."""
    ci: CiDeclaration = field(default_factory=CiDeclaration)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelInfo(PluginInfo):
    """The description of a plugin's kernels."""

    backends: tuple[str, ...] = ()
    """Names of the backends that the kernels support; empty: all backends."""


class BackendHooks:
    """The hooks of a backend plugin. pluggy calls only these: all later calls are direct method calls."""

    @hookspec
    def backend_info(self) -> BackendInfo:  # type: ignore[empty-body]
        """Describe the plugin. Cheap, repeatable, without side effects.

        The registry calls this hook to list plugins, and again before it creates a backend.
        """

    @hookspec
    def create_backend(self, ordinal: int, options: Mapping[str, str]) -> Backend:  # type: ignore[empty-body]
        """Create the backend for device ``ordinal``.

        ``options`` are the ``key=value`` pairs of the requested name (``sim:seed=7``), as strings. Raise
        :class:`~outrider.device.errors.ConfigError` for an unknown or invalid option, and
        :class:`~outrider.device.errors.BackendLoadError` with the reason if the device isn't available.

        Leave the process as it was: torch's global state, the working directory, signal handlers and standard output belong
        to the application.
        """


def check_options(backend: str, options: Mapping[str, str], values: Mapping[str, Collection[str]]) -> None:
    """Raise :class:`ConfigError` for an option of ``backend`` that ``values`` doesn't have, or for another value."""
    for key, value in options.items():
        if key not in values:
            raise ConfigError(f"backend {backend!r} has no option {key!r}; known: {', '.join(values) or 'none'}")
        if value not in values[key]:
            raise ConfigError(f"option {key}={value!r}: expected one of {', '.join(values[key])}")


class KernelHooks:
    """The hooks of a plugin with kernels for the backend of another plugin, in the group ``outrider.kernels``.

    The kernels are used only if the user names them (``cpu:kernels=NAME``), and replace all of the backend's own kernels.
    The conformance kit checks both in the same way: ``outrider conform --backend cpu:kernels=NAME``.
    """

    @hookspec
    def kernel_info(self) -> KernelInfo:  # type: ignore[empty-body]
        """Describe the plugin, cheaply and without side effects. The registry calls this hook to list plugins
        and before it creates the kernels.
        """

    @hookspec
    def create_kernels(self, backend: Backend) -> KernelSet:  # type: ignore[empty-body]
        """Create the kernels for ``backend``, which has just been created. They may delegate to the backend's own kernels.

        Raise :class:`~outrider.device.errors.BackendLoadError` with the reason if the kernels aren't available.
        """
