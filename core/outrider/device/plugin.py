"""What a plugin package offers: two hooks, and a record that describes it without importing anything heavy.

A plugin is a module named by an entry point of the group ``outrider.backends`` (or ``outrider.kernels``, for kernels
alone). Its name there is the name that people type. The module's top level must not import the vendor's package: it is
loaded just to be described.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.kernels import KernelSet

ENTRY_POINT_GROUP = "outrider.backends"
KERNELS_GROUP = "outrider.kernels"
INTERFACE_VERSION = 1
"""Version of this interface. It rises when a plugin that was right could become wrong."""

hookspec = pluggy.HookspecMarker("outrider")
hookimpl = pluggy.HookimplMarker("outrider")


@dataclass(frozen=True, kw_only=True, slots=True)
class CiDeclaration:
    """How a CI runs this backend; ``outrider ci-matrix`` turns it into a matrix row.

    Each default is right for a backend that needs no hardware. Nothing here is asked of the machine that reads it: a
    backend that can't run there still declares where it can.
    """

    runner_labels: tuple[str, ...] = ("ubuntu-latest",)
    """Labels that a runner must have, all of them. One that no runner has makes the row "not run"."""

    container: str | None = None
    """Image that the job runs in; None: on the runner itself."""

    torch: str | None = None
    """Where torch comes from: the address of a package index (``https://…``), else a requirement (``torch==2.10.0``).
    None: the workflow's own choice, the build without an accelerator."""

    markers: tuple[str, ...] = ()
    """Words that say what's special here, such as ``graphs``; ``outrider ci-matrix --select graphs`` finds them."""

    level: str = "L4"
    """Conformance is run up to this level."""

    device_count: int = 1
    """Devices that a runner has for collectives. With two or more a job of its own runs level L6: ranks on devices of their
    own. A backend whose ranks need no further devices leaves it at 1 and declares ``level="L6"``."""

    ranks_runner_labels: tuple[str, ...] = ()
    """Labels of the runner of that job; empty: ``runner_labels``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginInfo:
    """What every plugin says about itself before anything is created.

    ``interface_min`` and ``interface_max`` are the interface versions that it supports. ``usable`` is False, with ``reason``
    and ``advice``, where the plugin knows that it can't run on this machine; finding that out must be cheap, start no
    device and import no vendor package.
    """

    name: str
    description: str
    interface_min: int = INTERFACE_VERSION
    interface_max: int = INTERFACE_VERSION
    usable: bool = True
    reason: str = ""
    advice: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendInfo(PluginInfo):
    """What a plugin says about its backend before anything is created.

    ``priority`` decides probing: the highest usable one wins ``auto``, and a negative one is never chosen unless named.
    ``options`` are those that its name takes, each with what it means; ``kernels`` is Outrider's own.

    ``cache_variables``: environment variables that each name a directory in which its kernels are kept once compiled.
    ``sanitizer_variables``: the environment under which torch's own sanitizer watches such a device; empty: it has none.
    """

    priority: int = 0
    device_count: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    cache_variables: tuple[str, ...] = ()
    sanitizer_variables: Mapping[str, str] = field(default_factory=dict)
    ci: CiDeclaration = field(default_factory=CiDeclaration)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelInfo(PluginInfo):
    """What a plugin says about its kernels. ``backends``: the names that they're for; empty: any."""

    backends: tuple[str, ...] = ()


class BackendHooks:
    """The hooks. pluggy is the cold path alone: after ``create_backend`` everything is a plain method call."""

    @hookspec
    def backend_info(self) -> BackendInfo:  # type: ignore[empty-body]
        """Describe the plugin. Cheap, repeatable, without side effects."""

    @hookspec
    def create_backend(self, ordinal: int, options: Mapping[str, str]) -> Backend:  # type: ignore[empty-body]
        """Make the backend for device ``ordinal``.

        ``options`` are the ``key=value`` pairs of the name that was asked for (``sim:seed=7``), as strings. Raise
        :class:`~outrider.device.errors.ConfigError` for one that doesn't exist or can't be used, and
        :class:`~outrider.device.errors.BackendLoadError` with the reason where the device can't be had.
        """


class KernelHooks:
    """The hooks of a plugin that brings kernels for somebody's backend, in the group ``outrider.kernels``.

    They're used where a person asks for them by name (``cpu:kernels=NAME``), never otherwise, and take the place of all
    of the backend's own. The conformance kit checks them as it checks those: ``outrider conform --backend cpu:kernels=NAME``.
    """

    @hookspec
    def kernel_info(self) -> KernelInfo:  # type: ignore[empty-body]
        """Describe the plugin. Cheap, repeatable, without side effects."""

    @hookspec
    def create_kernels(self, backend: Backend) -> KernelSet:  # type: ignore[empty-body]
        """Make the kernels for ``backend``, which has just been created; what isn't better can be left to its own.

        Raise :class:`~outrider.device.errors.BackendLoadError` with the reason where they can't be had.
        """
