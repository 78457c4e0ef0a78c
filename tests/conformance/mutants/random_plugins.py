"""`python -m conformance.mutants.random_plugins`: 200 broken plugins from a generator, each through the kit.

A plugin is a correct backend with one fault and a trigger: always, or (half of them) in one case alone: one size, one dtype,
one reuse or one stream. The generator knows the interface and common faults of drivers and kernels, not the tests of the kit.
A plugin counts as found if a level fails, and as named if a broken promise, or the verb that the report ranks first, is that
of the broken method. Tests with the verb in their name run first, and a run
ends at the first failure; a plugin that it doesn't name is run again up to a few failures, then whole.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.mutants.catalogue import patch
from conformance.mutants.generated import kernels, reach
from conformance.mutants.unseen import KERNELS

SEED = 56
COUNT = 200
SIZES = (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 256, 1024, 2048, 1 << 15, 1 << 16)
_MAX_FAILURES = (1, 4, 0)  # of one run after another until the plugin is named; 0: the whole run


@dataclass(frozen=True)
class RandomPlugin:
    """`apply(base)` breaks the method; `subtle`: in one case alone."""

    number: int
    method: str
    fault: str
    trigger: str
    base: str
    level: int
    apply: Callable[[Any], None]
    tests: tuple[str, ...] = ()
    near: str = ""

    @property
    def subtle(self):
        return self.trigger != "always"

    @property
    def name(self):
        return f"{self.number:03} {self.method}: {self.fault}, {self.trigger} ({self.base})"

    def is_named(self, outcome) -> bool:
        """Return whether a broken promise of `outcome`, or its first cause, is that of the method."""
        if self.method in outcome.causes[:1]:
            return True
        owner, _, verb = self.method.partition("._")
        if not verb:
            return self.method in outcome.promises
        return bool({owner, f"{owner}.{verb}"} & set(outcome.promises))


def plugins(seed: int = SEED, count: int = COUNT) -> list[RandomPlugin]:
    draw = random.Random(seed)
    made: list[RandomPlugin] = []
    while len(made) < count:
        subtle = len(made) % 2 == 1
        make = _kernel if len(made) % 4 < 2 else _verb
        made.append(make(len(made), draw, subtle))
    return made


# -- kernels ---------------------------------------------------------------------------------------------------------------

# The operand that has one row for each row of the result, and the operand whose dtype is the model's. Plugins are chosen by
# place: a kernel that leaves the interface is replaced by another one here.
ROWS = {
    "add_rms_norm": ("x", "x"),
    "apply_token_bitmask": ("logits", "logits"),
    "bias_logits": ("logits", "logits"),
    "count_tokens": ("tokens", ""),
    "fuse_embedding": ("tokens", "table"),
    "copy_rows": ("source", "source"),
    "experts": ("x", "x"),
    "gated_rms_norm": ("x", "x"),
    "gather_rows": ("rows", "state"),
    "linear": ("x", "x"),
    "gated_delta_rule": ("mixed", "mixed"),
    "linear_quantized": ("x", "x"),
    "sigmoid_mul": ("x", "x"),
    "logprobs": ("logits", "logits"),
    "move_cache": ("sources", "k_cache"),
    "paged_attention": ("q", "q"),
    "penalize_logits": ("logits", "logits"),
    "place_accepted": ("lens", ""),
    "place_tokens": ("lens", ""),
    "publish_accepted": ("rows", ""),
    "rms_norm": ("x", "x"),
    "rope_write_cache": ("q", "q"),
    "route": ("logits", "logits"),
    "sample": ("logits", ""),
    "scatter_rows": ("rows", "state"),
    "silu_mul": ("gate_up", "gate_up"),
    "truncate_logits": ("logits", "logits"),
    "verify_chain": ("target_logits", ""),
    "verify_tree": ("target_logits", ""),
}
WRITTEN = {
    "copy_rows": ("out",),
    "rope_write_cache": ("q", "k_cache", "v_cache"),
    "move_cache": ("k_cache", "v_cache"),
    "count_tokens": ("counts",),
    "scatter_rows": ("state",),
    "publish_accepted": ("lengths", "last_tokens", "results"),
    "place_accepted": ("following", "last", "positions"),
    "place_tokens": ("positions", "slots", "seq_lens"),
}


def _kernel(number: int, draw: random.Random, subtle: bool) -> RandomPlugin:
    kernel = draw.choice(tuple(ROWS))
    fault = draw.choice(sorted(DAMAGES))
    kinds = ["size", "reuse", *(["dtype"] if ROWS[kernel][1] else [])]
    trigger, when = _kernel_trigger(draw, kernel, draw.choice(kinds) if subtle else "")
    damage = DAMAGES[fault]

    def make(original):
        def call(**k):
            import torch

            hit = when(k)
            before = {name: k[name].clone() for name in WRITTEN.get(kernel, ())} if hit else {}
            made = original(**k)
            if not hit:
                return made
            if before:
                for name, old in before.items():
                    changed = (k[name] != old) & ~(k[name].isnan() & old.isnan())
                    if changed.any():
                        rows = changed.flatten(1).any(1) if changed.dim() > 1 else changed
                        index = rows.nonzero().flatten()
                        k[name][index] = damage(k[name][index].clone(), torch)
                        reach()
                        break
                return made
            parts = list(made) if isinstance(made, tuple) else [made]
            parts[0] = damage(parts[0].clone(), torch)
            reach()
            return tuple(parts) if isinstance(made, tuple) else parts[0]

        return call

    return RandomPlugin(
        number, f"KernelSet.{kernel}", fault, trigger, "cpu", 4, kernels({kernel: make}), (KERNELS,), f"[{kernel}"
    )


def _off(x, torch):
    """Change a number by more than any rounding, also an index or a flag."""
    if x.dtype is torch.bool:
        return ~x
    if not x.dtype.is_floating_point:
        return x + 1
    return torch.where(x.isfinite(), x * 1.5 + 1, torch.zeros_like(x))


def _last_row(x, torch):
    x[-1] = _off(x[-1], torch)
    return x


def _first_row(x, torch):
    x[0] = _off(x[0], torch)
    return x


def _last_column(x, torch):
    x[..., -1] = _off(x[..., -1], torch)
    return x


def _one_element(x, torch):
    flat = x.view(-1)
    flat[len(flat) // 2] = _off(flat[len(flat) // 2], torch)
    return x


DAMAGES = {
    "the last row is wrong": _last_row,
    "the first row is wrong": _first_row,
    "the last column is wrong": _last_column,
    "one number is wrong": _one_element,
    "all is wrong": _off,
}


def _kernel_trigger(draw: random.Random, kernel: str, kind: str) -> tuple[str, Callable[[dict], bool]]:
    rows, model = ROWS[kernel]
    if kind == "size":
        size = draw.choice(SIZES[:11])
        way = draw.choice(("exactly", "from"))
        if way == "exactly":
            return f"with exactly {size} rows", lambda k: len(k[rows]) == size
        return f"from {size} rows on", lambda k: len(k[rows]) >= size
    if kind == "dtype":
        dtype = draw.choice(("float64", "float32", "float16", "bfloat16"))
        return f"in {dtype} alone", lambda k: str(k[model].dtype) == f"torch.{dtype}"
    if kind == "reuse":
        every, seen = draw.choice((2, 3, 5)), Counter()

        def again(k):
            key = k[rows].shape
            seen[key] += 1
            return seen[key] % every == 0

        return f"in call {every} of a shape", again
    return "always", lambda k: True


# -- verbs -----------------------------------------------------------------------------------------------------------------


def _verb(number: int, draw: random.Random, subtle: bool) -> RandomPlugin:
    base = draw.choice(("threads", "sim"))
    method = draw.choice(sorted(FAULTS))
    if base == "sim" and method.startswith("Flag."):
        base = "sim like npu"  # the other one declares no flags
    fault, make, level = draw.choice(FAULTS[method])
    kinds = ["reuse", "stream"] + (["size", "dtype"] if method in ("Backend._copy_async", "Backend._empty_pinned") else [])
    trigger, when = _verb_trigger(draw, method, draw.choice(kinds) if subtle else "")

    def apply(broken):
        owner, _, name = method.partition(".")
        patch(getattr(broken, owner.lower()), name, lambda original: _guarded(original, make(original), when))

    return RandomPlugin(number, method, fault, trigger, base, level, apply, (), NEAR[method.partition("._")[2]])


def _guarded(original, broken, when):
    def verb(self, *args):
        if when(self, args):
            reach()
            return broken(self, *args)
        return original(self, *args)

    return verb


def _nothing(original):
    return lambda self, *args: None


def _later(original):
    """Do the call's work at the next call."""
    waiting = []

    def verb(self, *args):
        for call in waiting:
            call()
        waiting[:] = [lambda: original(self, *args)]

    return verb


def _blocking(original):
    def verb(self, *args):
        backend = self if hasattr(self, "create_stream") else self.backend
        made = original(self, *args)
        if backend.active_capture is None:
            backend._synchronize()
        return made

    return verb


def _other_stream(original):
    def verb(self, *args):
        streams = self.backend.streams
        return original(streams[streams.index(self) - 1], *args)

    return verb


def _yes(original):
    return lambda self, *args: True


def _short_copy(original):
    def copy(self, destination, source):
        original(self, destination.flatten()[:-1], source.flatten()[:-1])

    return copy


def _shared_pinned(original):
    kept: dict = {}

    def empty(self, shape, dtype):
        return kept.setdefault((shape, dtype), original(self, shape, dtype))

    return empty


NEAR = {"wait": "wait", "record": "record", "synchronize": "synchronize", "query": "query", "copy_async": "cop"}
NEAR |= {"empty_pinned": "pinned", "replay": "replay", "set": "flag", "reset": "flag"}
FAULTS: dict[str, list[tuple[str, Callable, int]]] = {
    "Stream._wait": [
        ("does nothing", _nothing, 1),
        ("is one call late", _later, 1),
        ("is on another stream", _other_stream, 1),
        ("blocks", _blocking, 1),
    ],
    "Stream._record": [("is one call late", _later, 1), ("is on another stream", _other_stream, 1), ("blocks", _blocking, 1)],
    "Stream._synchronize": [("does nothing", _nothing, 1)],
    "Stream._query": [("is always True", _yes, 1), ("blocks", _blocking, 1)],
    "Event._synchronize": [("does nothing", _nothing, 1)],
    "Event._query": [("is always True", _yes, 1), ("blocks", _blocking, 1)],
    "Backend._synchronize": [("does nothing", _nothing, 1)],
    "Backend._copy_async": [("does nothing", _nothing, 1), ("is short", _short_copy, 1), ("blocks", _blocking, 1)],
    "Backend._empty_pinned": [("hands out memory again", _shared_pinned, 1)],
    "Graph._replay": [("does nothing", _nothing, 2), ("is one call late", _later, 2), ("blocks", _blocking, 2)],
    "Flag._set": [("is one call late", _later, 3), ("blocks", _blocking, 3)],
    "Flag._wait": [("does nothing", _nothing, 3)],
    "Flag._reset": [("does nothing", _nothing, 3)],
}


def _verb_trigger(draw: random.Random, method: str, kind: str) -> tuple[str, Callable[[Any, tuple], bool]]:
    if kind == "reuse":
        every, seen = draw.choice((2, 3, 4, 7)), Counter()

        def again(self, args):
            seen[id(self)] += 1
            return seen[id(self)] % every == 0

        return f"in every call {every} of an object", again
    if kind == "stream":
        which = draw.randrange(2)

        def on_stream(self, args):
            backend = self if hasattr(self, "create_stream") else self.backend
            stream = self if hasattr(self, "_record") else next((a for a in args if hasattr(a, "_record")), None)
            if stream is None:
                return len(backend.streams) % 2 == which
            return backend.streams.index(stream) % 2 == which

        return f"on {('even', 'odd')[which]} streams alone", on_stream
    if kind == "size":
        size = draw.choice(SIZES[4:])
        return f"from {size} numbers on", lambda self, args: _count(args[0]) >= size
    if kind == "dtype":
        dtype = draw.choice(("float32", "int64", "uint8", "bfloat16"))
        return f"for {dtype} alone", lambda self, args: str(getattr(args[0], "dtype", args[-1])) == f"torch.{dtype}"
    return "always", lambda self, args: True


def _count(tensor_or_shape) -> int:
    if isinstance(tensor_or_shape, tuple):
        product = 1
        for size in tensor_or_shape:
            product *= size
        return product
    return tensor_or_shape.numel()


# -- the run ---------------------------------------------------------------------------------------------------------------


def outcomes(chosen: list[RandomPlugin], jobs_at_a_time: int, record: Path | None) -> Iterator[tuple[RandomPlugin, Any]]:
    """Each plugin with its outcome; `record` keeps outcomes between runs.

    A plugin that isn't named by its first failures is run again, at last whole, as a vendor runs it.
    """
    from conformance.mutants import harness

    named = {one.name: one for one in chosen}
    for most in _MAX_FAILURES:
        jobs = [((one.name,), (one.base, one.apply, one.level, one.tests, most, 0, one.near)) for one in named.values()]
        file = record and record.with_suffix(f".{most}")
        for (name,), outcome in harness.Record(file).completed(jobs, jobs_at_a_time):
            if not most or not outcome.failed or named[name].is_named(outcome):
                yield named.pop(name), outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants.random_plugins", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT, metavar="N")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth plugin alone")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the plugins from number N on")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep outcomes there; what it has isn't run again")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    from conformance.mutants import harness

    harness.warm_up()
    counts: Counter[str] = Counter()
    for one, outcome in outcomes(
        plugins(options.seed, options.count)[options.first :: options.every], options.jobs, options.record
    ):
        found = bool(outcome.failed or outcome.broke)
        word = "UNREACHED" if not found and not outcome.reached else "PASSES" if not found else ""
        word = word or ("named" if one.is_named(outcome) else "UNNAMED")
        for kind in ("all", "subtle" if one.subtle else "always"):
            counts[f"{kind} {word}"] += 1
        why = outcome.failed[0][0] if outcome.failed else outcome.broke
        print(f"{word:<10}{one.name} | {why} | {', '.join(outcome.promises)} | {', '.join(outcome.causes[:1])}", flush=True)
    for kind in ("all", "always", "subtle"):
        named, unnamed, passes, unreached = (counts[f"{kind} {word}"] for word in ("named", "UNNAMED", "PASSES", "UNREACHED"))
        reached = named + unnamed + passes
        print(json.dumps({"of": kind, "reached": reached, "found": named + unnamed, "named": named, "unreached": unreached}))
    total = counts["all named"] + counts["all UNNAMED"] + counts["all PASSES"]
    return 0 if counts["all named"] >= 0.95 * total else 1


if __name__ == "__main__":
    sys.exit(main())
