"""What the engine is asked for: small cases, each of which reaches a part of vLLM that orders streams against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Prompt = tuple[int, ...]


def spread(first: int, length: int) -> Prompt:
    """A prompt without repetitions that a look-up of n-grams would find early."""
    return tuple(3 + (first + at * at) % 60 for at in range(length))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Rounds of requests; the tokens of the last round are compared."""

    name: str
    purpose: str
    rounds: tuple[tuple[Prompt, ...], ...]
    offload: bool = False
    """With the simple KV offload connector; the device's prefix cache is emptied after each round."""
    blocks: int = 64
    longest: int = 256
    stop_after: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Request of the last round → how many tokens it makes before one that stops it: the scheduler can't foresee that."""
    zeroing: bool = False
    """New blocks of the cache are zeroed, as for models with recurrent layers."""
    recurrent: bool = False
    """The first runner is told that the model has recurrent layers whose states are aligned with blocks; there are none."""


_SHORT = ((5, 6, 7, 8, 5, 6, 7), (9, 10, 11), (3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4))
_LONG = (spread(1, 41), spread(7, 19), spread(20, 70))
_FIRST, _SECOND = spread(1, 70), spread(7, 41)

WORKLOADS = (
    Workload(name="plain", purpose="three short requests", rounds=(_SHORT,)),
    Workload(name="offload", purpose="blocks are stored while later steps are on their way, and loaded in the second round",
             rounds=(_LONG, _LONG), offload=True),
    Workload(name="scarce", purpose="so few blocks that a request which is loaded takes over those of one that was stopped "
             "while its next step is on its way", rounds=((_SECOND,), (_FIRST, _SECOND)), offload=True, blocks=8, longest=96,
             stop_after=MappingProxyType({0: 3})),
    Workload(name="zeroing", purpose="new blocks are zeroed", rounds=(_LONG,), zeroing=True),
    Workload(name="recurrent", purpose="counts of accepted tokens go to the host in each step", rounds=(_SHORT,),
             recurrent=True),
)  # fmt: skip


def workload(name: str) -> Workload:
    """The workload of that name. Raises `KeyError`."""
    return {w.name: w for w in WORKLOADS}[name]
