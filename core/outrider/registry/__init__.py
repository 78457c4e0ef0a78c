"""Discovery, checks and selection of plugins: backends, kernel sets, proposers and transports.

Plugins are entry points. The registry filters them by name before it loads one. It loads each plugin separately, so that an
error of one doesn't affect the others, and audits its hooks, because pluggy accepts missing hooks and arguments. Only this
package uses pluggy managers.

The registry doesn't read environment variables: the command line reads ``OUTRIDER_BACKEND`` and passes its value.
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
