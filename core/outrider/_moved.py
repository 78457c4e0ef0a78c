"""Old names of modules, for one version: what was imported under them goes on working, and is told of the new name.

One finder, installed by ``import outrider``. An old name gives the very module of the new one, not a second copy, so that
classes stay the same classes; the first use of each old name warns. Goes away with version 0.3.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # that module is slow to import, and this one is imported before a command can answer a signal
    Loader = MetaPathFinder = object

MOVED: Mapping[str, str] = {
    "outrider.sanitizer.timeline": "outrider_trace.timeline",
    "outrider.sanitizer.picture": "outrider_trace.picture",
    "outrider.sanitizer": "outrider_sanitizer",
    "outrider.conformance": "outrider_conformance",
    "outrider.device.kernels.measure": "outrider_tune.measure",
    "outrider.model.random_weights": "outrider_bench.random_weights",
    "outrider.engine.attention_plans": "outrider.engine.state.attention_plans",
    "outrider.engine.buffers": "outrider.engine.state.buffers",
    "outrider.engine.features": "outrider.engine.requests.features",
    "outrider.engine.fence_log": "outrider_proof.fence_log",
    "outrider.engine.hand_over": "outrider.engine.requests.hand_over",
    "outrider.engine.lifeline": "outrider.engine.recovery.lifeline",
    "outrider.engine.logprobs": "outrider.engine.requests.logprobs",
    "outrider.engine.media": "outrider.engine.requests.media",
    "outrider.engine.options": "outrider.engine.state.options",
    "outrider.engine.pages": "outrider.engine.requests.pages",
    "outrider.engine.plans": "outrider.engine.state.plans",
    "outrider.engine.probes": "outrider.engine.state.probes",
    "outrider.engine.request": "outrider.engine.requests.request",
    "outrider.engine.results": "outrider.engine.state.results",
    "outrider.engine.rows": "outrider.engine.state.rows",
    "outrider.engine.sampling": "outrider.engine.requests.sampling",
    "outrider.engine.scheduler": "outrider.engine.requests.scheduler",
    "outrider.engine.staging": "outrider.engine.state.staging",
    "outrider.engine.text": "outrider.engine.requests.text",
    "outrider.engine.transfer": "outrider.engine.state.transfer",
    "outrider.engine.watchdog": "outrider.engine.recovery.watchdog",
    "outrider.speculative.synthetic": "outrider_bench.synthetic",
}
"""Old name → new name, of packages with all that is below them."""


class MovedModule(DeprecationWarning):
    """A module was imported by the name that it had in an earlier version."""


def new_name(name: str) -> str | None:
    """Today's name of the module ``name``; None for one that hasn't moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return None


class _Alias(Loader):
    """Gives the module of the new name."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself. Its own name and spec come back in :meth:`exec_module`: importlib writes the old ones in."""
        del spec
        module = import_module(self._target)
        self._own = (module.__spec__, module.__loader__, module.__package__)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run again."""
        module.__spec__, module.__loader__, module.__package__ = self._own


class MovedFinder(MetaPathFinder):
    """Finds modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an alias, with the file of the real module: pytest's ``--pyargs`` looks for that."""
        del path, target
        name = new_name(fullname)
        if name is None:
            return None
        real = find_spec(name)
        if real is None:
            return None
        if fullname in MOVED:  # once for a package: what is below it follows
            warnings.warn(
                f"the module {fullname} is now {name}; the old name goes away with outrider 0.3", MovedModule, stacklevel=2
            )
        spec = ModuleSpec(fullname, _Alias(name), origin=real.origin, is_package=real.submodule_search_locations is not None)
        spec.submodule_search_locations = real.submodule_search_locations
        spec.has_location = True
        return spec


def install() -> None:
    """Put the finder before Python's own, once: they would find a second copy of what lies below an old name."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())
