"""Finding, checking and choosing plugins: backends, and what else a distribution can bring.

Plugins are entry points. They are filtered by name *before* anything is loaded, each is loaded behind its own guard, and
its hooks are audited, because pluggy itself accepts a plugin that lacks a hook or an argument. This is the only place
that holds pluggy managers; what a hook has made is a plain object.

Nothing here reads the environment: the command line reads ``OUTRIDER_BACKEND`` and passes it in.
"""

from outrider.registry.backends import AUTO, BackendSpec, Registry, get_backend, parse_spec
from outrider.registry.plugins import Candidate, PluginGroup, Plugins, Status

__all__ = [
    "AUTO",
    "BackendSpec",
    "Candidate",
    "PluginGroup",
    "Plugins",
    "Registry",
    "Status",
    "get_backend",
    "parse_spec",
]
