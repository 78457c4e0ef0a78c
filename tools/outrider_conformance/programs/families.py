"""The abilities of a backend that limit its programs, and the weights of the kinds of steps by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outrider.device import Backend

_INTEGER_DTYPES = ("int32", "int16", "uint8", "bool")


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of a backend that decide which programs it can run."""

    dtypes: tuple[str, ...]
    flags: bool
    forks: bool
    params: bool

    @classmethod
    def declared_by(cls, backend: Backend) -> Abilities:
        """Return the abilities that a backend declares."""
        declared = backend.capabilities
        return cls(
            dtypes=(*sorted(str(dtype).removeprefix("torch.") for dtype in declared.dtypes), *_INTEGER_DTYPES),
            flags=declared.flags,
            forks=declared.forks_in_capture or not declared.captures_graphs,
            params=declared.updates_graph_params or not declared.captures_graphs,
        )


COMMON: Mapping[str, int] = MappingProxyType(
    {"slow": 4, "fill": 3, "mix": 6, "copy": 4, "upload": 2, "download": 4, "host_write": 2, "host_read": 3, "record": 4}
    | {"wait": 2, "synchronize": 2, "query": 2, "forget": 1, "elsewhere": 1, "scope": 1, "item": 1, "send": 1}
)
FAMILIES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "order": {"mix": 10, "record": 8, "wait": 6, "query": 4, "forget": 3, "synchronize": 3, "pile": 2, "relay": 8},
        "copies": {
            "copy": 10,
            "upload": 8,
            "download": 10,
            "send": 4,
            "host_write": 5,
            "host_read": 4,
            "item": 2,
            "relay": 2,
        },
        "memory": {"lend": 6, "renew": 5, "churn": 4, "mix": 10},
        "threads": {"elsewhere": 8, "together": 4, "scope": 6, "record": 6, "relay": 12},
        "graphs": {"capture": 5, "replay": 12, "drop_graph": 2, "churn": 2, "together": 1, "beside": 6, "relay": 2},
        "bound": {"capture": 5, "replay": 12, "update": 8, "signal": 8, "drop_graph": 1},
    }
)
"""Additional weights of the kinds of steps in each family of programs."""
