"""Options of a simulated device, such as `sim:seed=7,strategy=pct,d=3,like=npu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from outrider.device import ConfigError
from outrider_sim.strategies import MAKERS, integer, make_strategy
from outrider_sim.strategies import OPTIONS as STRATEGY_OPTIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Personality:
    """The behaviour of a family of devices. Times are virtual microseconds, rates are per microsecond."""

    name: str
    forks_in_capture: bool = True
    updates_graph_params: bool = False
    flags: bool = False
    exact_host_lengths: bool = False
    recompute_mrope: bool = False
    host_wait_for_published: bool = False
    results_on_forward: bool = False
    launch_us: float = 4.0
    """Host time to enqueue one operation."""
    kernel_us: float = 2.0
    """Minimum device time of an operation."""
    wait_us: float = 0.5
    """Device time of a wait on a stream."""
    sync_us: float = 8.0
    """Host time of a synchronization, in addition to the time that the host waits."""
    bytes_per_us: float = 4.0e6
    """Memory bandwidth in bytes per microsecond: 4 TB/s."""
    link_bytes_per_us: float = 5.0e4
    """Bandwidth of copies between host and device in bytes per microsecond: 50 GB/s."""
    flops_per_us: float = 5.0e8
    """Arithmetic rate in operations per microsecond: 500 TFLOP/s."""


PERSONALITIES: Mapping[str, Personality] = MappingProxyType(
    {
        "cuda": Personality(name="cuda"),
        # A stream wait costs more than a host wait on some of these parts, and results are copied on the forward stream.
        "rocm": Personality(name="rocm", wait_us=20.0, host_wait_for_published=True, results_on_forward=True),
        # Attention takes host lists of lengths, so graphs are rebound; positions are computed again after the join.
        "npu": Personality(
            name="npu",
            forks_in_capture=False,
            updates_graph_params=True,
            flags=True,
            exact_host_lengths=True,
            recompute_mrope=True,
            launch_us=8.0,
            sync_us=20.0,
        ),
    }
)

FAULTS: Mapping[str, str] = MappingProxyType(
    {
        "oom": "the n-th allocation doesn't fit",
        "error": "the n-th enqueued operation fails; the device lives on",
        "lost": "the n-th enqueued operation fails and takes the device with it",
        "stuck": "the n-th enqueued operation never ends",
    }
)

OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "like": f"personality: {', '.join(PERSONALITIES)}",
        "seed": "seed of strategies and of the device's random numbers",
        "strategy": f"who goes next: {', '.join(sorted(MAKERS))}",
        **STRATEGY_OPTIONS,
        "memory": "bytes of device memory, with suffix KiB, MiB or GiB (default 64GiB)",
        "record": "keep the schedule of the run: on (default), or off for long runs that nobody will replay",
        "poison": "fill fresh and freed memory with a pattern: on (default) or off",
        "fault": f"KIND@N joined by '+', KIND one of {', '.join(FAULTS)}",
        "resident": "collectives that a device runs at a time; 0 (default): any number",
        "eager_sends": "sends of a channel that end before their receive has begun, as buffers allow; 0 (default): none",
        "late": "copies: copies run only when nothing else can",
        "events": "generations (default), or recycled: a wait sees whatever record comes first, as a naive driver would",
        "native": "operators joined by '+', such as mm+bmm, that captures refuse: no graph can hold them (default none)",
        "name": "torch device name, one for the process (default sim)",
    }
)
"""The meaning of each option, for help and for error messages."""

MAX_DEVICES = 64
"""Maximum number of devices of one simulated host."""

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, kw_only=True, slots=True)
class SimOptions:
    """The options of one simulated device. `faults` maps (kind, n) pairs as in `OPTIONS`; `memory` is in bytes."""

    like: Personality = PERSONALITIES["cuda"]
    seed: int = 0
    strategy: str = "program"
    strategy_options: Mapping[str, str] = field(default_factory=dict)
    memory: int = 64 << 30
    poison: bool = True
    record: bool = True
    faults: frozenset[tuple[str, int]] = frozenset()
    late_copies: bool = False
    resident: int = 0
    eager_sends: int = 0
    recycled_events: bool = False
    native: frozenset[str] = frozenset()
    name: str = "sim"

    def for_further_device(self, first: SimOptions) -> SimOptions:
        """Return these options for another device of the host whose device 0 has the options `first`.

        Only memory, faults and poison are the further device's own. Raises `ConfigError` for a different scheduler or device
        kind.
        """
        plain = SimOptions(name=self.name)
        scheduling = ("seed", "strategy", "strategy_options", "record", "late_copies")
        for name in ("like", *scheduling, "recycled_events", "native", "resident", "eager_sends"):
            mine = getattr(self, name)
            if mine not in (getattr(plain, name), getattr(first, name)):
                raise ConfigError(f"option {name}: the devices of a host have it from device 0; give it there")
        return replace(first, memory=self.memory, faults=self.faults, poison=self.poison)

    def operation_faults(self) -> dict[int, str]:
        """Return the fault kinds by number of the faulty operation."""
        return {n: kind for kind, n in self.faults if kind != "oom"}

    def allocation_faults(self) -> set[int]:
        """Return the numbers of allocations that fail with out of memory."""
        return {n for kind, n in self.faults if kind == "oom"}


def parse_options(options: Mapping[str, str]) -> SimOptions:
    """Parse the `key=value` pairs of a backend's name. Raises `ConfigError` for an unknown key or an invalid value."""
    for key in options:
        if key not in OPTIONS:
            raise ConfigError(f"backend 'sim' has no option {key!r}; known: {', '.join(OPTIONS)}")
    like = _choice(options, "like", tuple(PERSONALITIES))
    strategy, seed = options.get("strategy", "program"), integer(options, "seed", 0)
    strategy_options = MappingProxyType({k: v for k, v in options.items() if k in STRATEGY_OPTIONS})
    make_strategy(strategy, seed, strategy_options)  # an error must come before torch's slot for devices is taken
    return SimOptions(
        like=PERSONALITIES[like],
        seed=seed,
        strategy=strategy,
        strategy_options=strategy_options,
        memory=_bytes(options.get("memory", "64GiB")),
        record=_choice(options, "record", ("on", "off")) == "on",
        poison=_choice(options, "poison", ("on", "off")) == "on",
        faults=_faults(options.get("fault", "")),
        resident=integer(options, "resident", 0),
        eager_sends=integer(options, "eager_sends", 0),
        late_copies=_choice(options, "late", ("nothing", "copies")) == "copies",
        recycled_events=_choice(options, "events", ("generations", "recycled")) == "recycled",
        native=frozenset(filter(None, options.get("native", "").split("+"))),
        name=options.get("name", "sim"),
    )


def _choice(options: Mapping[str, str], key: str, values: tuple[str, ...]) -> str:
    value = options.get(key, values[0])
    if value not in values:
        raise ConfigError(f"option {key}={value!r}: expected one of {', '.join(values)}")
    return value


def _bytes(text: str) -> int:
    number, factor = text, 1
    for suffix, unit in _UNITS.items():
        if text.endswith(suffix):
            number, factor = text.removesuffix(suffix), unit
    if not number.isdigit() or int(number) == 0:
        raise ConfigError(f"option memory={text!r}: expected a positive number of bytes, such as 2GiB")
    return int(number) * factor


def _faults(text: str) -> frozenset[tuple[str, int]]:
    faults = set()
    for part in filter(None, text.split("+")):
        kind, at, number = part.partition("@")
        if kind not in FAULTS or not at or not number.isdigit() or int(number) == 0:
            raise ConfigError(
                f"option fault={text!r}: {part!r} is not KIND@N with KIND one of {', '.join(FAULTS)} and N from 1"
            )
        faults.add((kind, int(number)))
    return frozenset(faults)
