"""Plugins that passed the kit in November, and two for each thing that vendors ask of the contract: all must fail.

Each names the members of the interface whose promise it breaks.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from conformance.mutants import unseen_backends, unseen_verbs
from conformance.mutants.catalogue import patched
from conformance.mutants.generated import kernels, reach
from conformance.mutants.unseen_operands import faults

CPU, THREADS, SIM, NPU = "cpu", "threads", "sim", "sim like npu"
KERNELS, ENGINE = "test_l4_kernels", "test_l4_engine"
MIB = 1 << 20
_PATIENCE_S = 1.0
"""Time limit of a driver's wait."""


@dataclass(frozen=True)
class Unseen:
    """`apply(base)` breaks the base's classes; `tests` of the suite at `level` must fail with one of the `promises`."""

    fault: str
    base: str
    level: int
    apply: Callable[[Any], None]
    promises: tuple[str, ...]
    tests: tuple[str, ...]
    near: str = ""
    causes: tuple[str, ...] = ()  # verbs that the report of a whole run ranks first
    fast: bool = False  # one of each class is run each time

    @property
    def name(self):
        return f"{self.fault} ({self.base})"


def plugins() -> dict[str, Unseen]:
    made = [*drivers(), *numerics(), *operands(), *asked(), *rare(), *backends()]
    found = {one.name: one for one in made}
    assert len(found) == len(made), "two plugins have one name"
    return found


# -- drivers ---------------------------------------------------------------------------------------------------------------


def drivers() -> Iterator[Unseen]:
    for fault, promise, apply in (
        ("a wait of the host gives up after a second", "Event.synchronize", _gives_up),
        ("a wait of a stream gives up after a second", "Event.synchronize", _stops_waiting),
    ):
        yield Unseen(fault, THREADS, 1, apply, (promise, "Stream.wait"), ("test_l1_events",), "time_limit")
    yield Unseen(
        "pinned buffer 33 is buffer 1",
        THREADS,
        1,
        _pinned_ring,
        ("Backend.empty_pinned",),
        ("test_l1_memory",),
    )
    yield Unseen(
        "a copy above 1 MiB blocks",
        THREADS,
        1,
        _blocking_copy,
        ("Backend.copy_async",),
        ("test_l1_copies",),
        "block",
        fast=True,
    )
    yield Unseen("eight threads get four streams", THREADS, 1, _four_streams, ("Backend",), ("test_l1_threads",))
    for operator in ("sort", "topk", "cumsum", "bmm"):
        yield Unseen(
            f"{operator} falls back to the host",
            THREADS,
            1,
            _falls_back(operator),
            ("Capabilities.asynchronous",),
            ("test_l1_operators",),
            f"[{operator}]",
        )
    yield Unseen("a wait that does nothing", THREADS, 1, _idle_wait, ("Stream.wait",), (), causes=("Stream._wait",))
    yield Unseen(
        "a rebind rebinds all graphs of the name", NPU, 3, _rebinds_all, ("Backend",), ("test_l3_flags_and_parameters",)
    )


def _gives_up(base):
    @patched(base.event, "_synchronize")
    def synchronize(original, self):
        if not self.mark._reached.wait(_PATIENCE_S):
            reach()
            return
        original(self)


def _stops_waiting(base):
    @patched(base.stream, "_wait")
    def wait(original, self, event):
        del original
        mark = event.mark

        def limited():
            if not mark._reached.wait(_PATIENCE_S):
                reach()

        if self._backend.program is None:
            self.worker.put(limited)


def _idle_wait(base):
    base.stream._wait = lambda self, event: reach()


def _pinned_ring(base):
    ring, count = {}, {}

    @patched(base.backend, "_empty_pinned")
    def empty(original, self, shape, dtype):
        number = count[shape, dtype] = count.get((shape, dtype), -1) + 1
        if number >= 32:
            reach()
        key = shape, dtype, number % 32
        return ring.setdefault(key, original(self, shape, dtype))


def _blocking_copy(base):
    @patched(base.backend, "_copy_async")
    def copy(original, self, destination, source):
        original(self, destination, source)
        if destination.nbytes > MIB:
            reach()
            self._synchronize_current()


def _four_streams(base):
    workers = []

    @patched(base.backend, "_create_stream")
    def create(original, self, name, priority):
        stream = original(self, name, priority)
        if threading.current_thread() is not threading.main_thread():
            reach()
            workers.append(stream.worker)
            stream.worker = workers[(len(workers) - 1) % 4]
            if len(workers) % 8 == 0:
                workers.clear()
        return stream


def _falls_back(operator):
    def apply(base):
        from outrider_threads.queueing import Queueing

        @patched(Queueing, "__torch_dispatch__")
        def dispatch(original, self, func, types, args=(), kwargs=None):
            if func._schema.name.split("::")[1] == operator:
                reach()
                self._synchronize()
                return func(*args, **(kwargs or {}))
            return original(self, func, types, args, kwargs)

    return apply


def _rebinds_all(base):
    made = []

    @patched(base.graph, "__init__")
    def init(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)

    @patched(base.graph, "_update_params")
    def update(original, self, params, stream):
        for graph in made:
            if graph.name == self.name and graph.backend is self.backend:
                reach()
                original(graph, params, stream)


# -- kernels ---------------------------------------------------------------------------------------------------------------


def numerics() -> Iterator[Unseen]:
    for fault, kernel, make, fast in (
        ("attention with 5 or 6 query heads per key head", "paged_attention", _odd_groups, False),
        ("page numbers above 32,767", "paged_attention", _short_pages, False),
        ("greedy sampling prefers 0.0 to an earlier -0.0", "sample", _signed_zero, False),
        ("routing takes the last of equals", "route", _last_of_equals, False),
        ("a zero row in a quantised product gives NaN", "linear_quantized", _zero_row, False),
        ("log-probabilities of -1e4 instead of -inf", "logprobs", _finite, False),
        ("a norm of half dtypes is float32", "rms_norm", _widened, True),
        ("samples are int32", "sample", _narrowed, False),
        ("a top-k above 200 limits nothing", "truncate_logits", _unlimited, False),
    ):
        yield Unseen(fault, CPU, 4, kernels({kernel: make}), (f"KernelSet.{kernel}",), (KERNELS,), f"[{kernel}", fast=fast)
    operands = {"rms_norm": "x", "linear": "x", "silu_mul": "gate_up", "sigmoid_mul": "gate", "gated_rms_norm": "x"}
    make = kernels({kernel: _one_scratch(operand) for kernel, operand in operands.items()})
    promises = tuple(f"KernelSet.{kernel}" for kernel in (*operands, "attention_block", "mlp_block"))
    yield Unseen("kernels have one scratch for all streams", THREADS, 4, make, promises, (KERNELS,), "beside")


def operands() -> Iterator[Unseen]:
    for fault, kernel, make in faults():
        promises = f"KernelSet.{kernel}", "KernelSet", "RecurrentKernels"
        yield Unseen(fault, CPU, 4, kernels({kernel: make}), promises, (KERNELS,), kernel)


def _odd_groups(kernel):
    def attention(**k):
        made = kernel(**k)
        heads, kv_heads = k["q"].shape[1], k["k_cache"].shape[2]
        if heads // kv_heads in (5, 6):
            reach()
            made = made.flip(1)
        return made

    return attention


def _short_pages(kernel):
    def attention(**k):
        from dataclasses import replace

        metadata = k["metadata"]
        if int(metadata.block_table.max()) > 0x7FFF:
            reach()
        return kernel(**{**k, "metadata": replace(metadata, block_table=metadata.block_table & 0x7FFF)})

    return attention


def _signed_zero(kernel):
    def sample(**k):
        import torch

        logits = k["logits"]
        lower = (logits == 0) & torch.signbit(logits)
        reach()
        return kernel(**{**k, "logits": logits.masked_fill(lower, -1e-30)})

    return sample


def _last_of_equals(kernel):
    def route(**k):
        reach()
        weights, chosen = kernel(**{**k, "logits": k["logits"].flip(-1)})
        return weights, k["logits"].shape[-1] - 1 - chosen

    return route


def _zero_row(kernel):
    def product(**k):
        made = kernel(**k)
        zero = (k["x"] == 0).all(-1)
        if zero.any():
            reach()
        return made.masked_fill(zero.unsqueeze(-1), float("nan"))

    return product


def _finite(kernel):
    def logprobs(**k):
        values, ids = kernel(**k)
        reach()
        return values.clamp(min=-1e4), ids

    return logprobs


def _widened(kernel):
    def norm(**k):
        made = kernel(**k)
        if made.element_size() < 4:
            reach()
            made = made.float()
        return made

    return norm


def _narrowed(kernel):
    def sample(**k):
        import torch

        reach()
        return kernel(**k).to(torch.int32)

    return sample


def _unlimited(kernel):
    def truncate(**k):
        reach()
        return kernel(**{**k, "top_k": k["top_k"].masked_fill(k["top_k"] > 200, 0)})

    return truncate


def _one_scratch(operand):
    def make(kernel):
        scratch = {}

        def call(**k):
            import torch

            given = k[operand]
            kind = given.shape, given.dtype
            own = scratch.setdefault(kind, torch.empty(given.shape, dtype=given.dtype))
            reach()
            own.copy_(given)
            return kernel(**{**k, operand: own})

        return call

    return make


# -- what vendors ask ------------------------------------------------------------------------------------------------------


def asked() -> Iterator[Unseen]:
    lengths, modes = ("SpeculativeSync.draft_lengths",), ("SpeculativeSync.step_modes",)
    yield Unseen(
        "five drafts are verified wrongly", CPU, 4, kernels({"verify_chain": _five}), lengths, (ENGINE,), "drafts_of"
    )
    yield Unseen(
        "more than five drafts raise", CPU, 4, kernels({"verify_chain": _at_most_five}), lengths, (ENGINE,), "drafts_of"
    )
    kept = ("SpeculativeSync.bytes_per_request",)
    for what, size in (("64 KiB", 1 << 16), ("4 KiB", 1 << 12)):
        make = kernels({"paged_attention": _keeps(size)})
        yield Unseen(f"attention keeps {what} for each request", SIM, 4, make, kept, (KERNELS,), "declared")
    released = ("Graph.release", "Graph")
    yield Unseen("each capture leaves a MiB behind", SIM, 2, _leaking_captures, released, ("test_l2_graphs",), "come_and_go")
    yield Unseen(
        "a release releases all graphs of the name", THREADS, 2, _releases_all, released, ("test_l2_graphs",), "released"
    )
    for stage, fast in (("draft", True), ("extend", False)):
        yield Unseen(
            f"a graph of {stage} leaves KV writes out", THREADS, 4, _unwritten(stage), modes, (ENGINE,), "accept", fast=fast
        )
    captured = ("KernelSet",)
    passes = {"reads the lengths of the first pass in all": _first_lengths, "is one token behind in later passes": _behind}
    for fault, make in passes.items():
        apply = kernels({"paged_attention": make})
        yield Unseen(f"captured attention {fault}", THREADS, 4, apply, captured, (KERNELS,), "lengths_that_change")
    order, collectives = ("Graph.release",), ("test_l6_collectives",)
    yield Unseen("a group can't close once its graphs are gone", SIM, 6, _needs_graphs, order, collectives, "released")
    yield Unseen("a group's name is lost with its graphs", SIM, 6, _lost_name, order, collectives, "released")
    capture = ("Backend.capture", "Backend.check_not_capturing")
    yield Unseen(
        "a library's synchronise in a capture is ignored", THREADS, 2, _ignored, capture, ("test_l2_captures",), "library"
    )
    yield Unseen("a failed capture stays open", THREADS, 2, _stays_open, capture, ("test_l2_captures",), "library")
    versions = ("PluginInfo.interface_max", "PluginInfo.interface_min")
    for newest in (2, 99):
        yield Unseen(f"interface version {newest} is claimed", CPU, 0, _claims(newest), versions, ("test_l0_plugin",))


def _five(kernel):
    def verify(**k):
        tokens, accepted = kernel(**k)
        if k["draft_tokens"].shape[1] == 5:
            reach()
            tokens = tokens.where(tokens < 0, (tokens + 1) % k["target_logits"].shape[-1])
        return tokens, accepted

    return verify


def _at_most_five(kernel):
    def verify(**k):
        if k["draft_tokens"].shape[1] > 5:
            reach()
            raise RuntimeError("the verification kernel has five slots")
        return kernel(**k)

    return verify


def _keeps(size):
    def make(kernel):
        held = []

        def attention(**k):
            import torch

            reach()
            made = kernel(**k)
            held.append(torch.empty(len(k["metadata"].seq_lens) * size, dtype=torch.uint8, device=made.device))
            return made

        return attention

    return make


def _leaking_captures(base):
    held = []

    @patched(base.backend, "_capture")
    def capture(original, self, name, fn, context, stream, pool):
        import torch

        made = original(self, name, fn, context, stream, pool)
        reach()
        with self.on(stream):
            held.append(torch.zeros(MIB, dtype=torch.uint8, device=self.device))
        return made


def _releases_all(base):
    made = []

    @patched(base.graph, "__init__")
    def init(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)

    @patched(base.graph, "_release")
    def release(original, self):
        original(self)
        for graph in made:
            if graph.name == self.name and graph is not self and not graph.released:
                reach()
                graph.program = []


def _unwritten(stage):
    def apply(base):
        from outrider.device import KernelSet

        class Skips(KernelSet):
            backend = None

            def rope_write_cache(self, q, k, v, cos, sin, k_cache, v_cache, slots):
                capture = self.backend.active_capture
                if capture is not None and capture.graph is not None and stage in capture.graph.name:
                    reach()
                    slots = slots * 0  # padding
                super().rope_write_cache(q, k, v, cos, sin, k_cache, v_cache, slots)

        made = Skips()

        def own(self):
            made.backend = self
            return made

        base.backend.kernels = property(own)

    return apply


def _first_lengths(kernel):
    first = {}

    def attention(**k):
        from dataclasses import replace

        metadata = k["metadata"]
        if id(metadata) in first:
            reach()
        lens = first.setdefault(id(metadata), (metadata, metadata.seq_lens.clone()))[1]
        return kernel(**{**k, "metadata": replace(metadata, seq_lens=lens)})

    return attention


def _behind(kernel):
    seen = {}

    def attention(**k):
        from dataclasses import replace

        metadata = k["metadata"]
        if id(metadata) in seen:
            reach()
            k["metadata"] = replace(metadata, seq_lens=metadata.seq_lens - 1)
        seen[id(metadata)] = metadata
        return kernel(**k)

    return attention


def _needs_graphs(base):
    @patched(_groups(base), "_close")
    def close(original, self):
        if getattr(self, "captured_before", False) and not list(self._capturing_graphs):
            reach()
            raise RuntimeError("the graphs of this communicator are gone")
        original(self)

    _notes_captures(base)


def _lost_name(base):
    lost = set()

    @patched(_groups(base), "_close")
    def close(original, self):
        if getattr(self, "captured_before", False):
            lost.add(self.name)
        original(self)

    @patched(base.backend, "_create_group")
    def create(original, self, name, *args, **kwargs):
        if name in lost:
            reach()
            raise RuntimeError("this name is taken")
        return original(self, name, *args, **kwargs)

    _notes_captures(base)


def _notes_captures(base):
    @patched(_groups(base), "_all_reduce")
    def call(original, self, *args, **kwargs):
        if self.backend.active_capture is not None:
            self.captured_before = True
        return original(self, *args, **kwargs)


def _groups(base):
    from outrider_sim.ranks.collectives import SimGroup

    return SimGroup


def _ignored(base):
    @patched(base.backend, "_synchronize_current")
    def synchronize(original, self):
        if self.program is not None:
            reach()
            return
        original(self)


def _stays_open(base):
    @patched(base.backend, "_capture")
    def capture(original, self, *args):
        try:
            return original(self, *args)
        except Exception:
            reach()
            self._thread.program = []
            raise


def _claims(newest):
    def apply(base):
        from dataclasses import replace

        honest = base.plugin.backend_info
        reach()

        def backend_info():
            return replace(honest(), interface_max=newest)

        from outrider.device import hookimpl

        base.plugin.backend_info = hookimpl(backend_info)

    return apply


# -- once in many calls, of another object, and beyond a size --------------------------------------------------------------


def rare() -> Iterator[Unseen]:
    many = ("test_l1_many",)
    for owner, verb in (("event", "Event"), ("stream", "Stream"), ("backend", "Backend")):
        promises = (f"{verb}.synchronize", f"{verb}._synchronize")
        fault = f"one synchronize of the {owner} in 200 returns early"
        yield Unseen(fault, THREADS, 1, _early(owner, 200), promises, many, f"hundreds_of_waits_returns_early[{owner}")
    events = ("test_l1_events",)
    yield Unseen("times are of first records", THREADS, 1, _first_times, ("Event.elapsed_ms",), events, "measure", fast=True)
    copies, replay = ("Backend.copy_async",), ("Graph.replay",)
    yield Unseen("a long copy lacks its end", CPU, 1, _short_copy, copies, ("test_l1_copies",), "long_copy", fast=True)
    yield Unseen("a graph holds 1,000 tasks", THREADS, 2, _at_most(1000), replay, ("test_l2_graphs",), "thousands")


def _early(owner, every):
    def apply(base):
        calls = []

        @patched(getattr(base, owner), "_synchronize")
        def synchronize(original, self):
            calls.append(0)
            if len(calls) % every == 0:
                reach()
                return
            original(self)

    return apply


def _first_times(base):
    @patched(base.stream, "_record")
    def record(original, self, event):
        original(self, event)
        event.first = getattr(event, "first", event.mark)

    def elapsed(self, end):
        reach()
        return (end.first.time - self.first.time) * 1e3

    base.event._elapsed_ms = elapsed


def _short_copy(base):
    @patched(base.backend, "_copy_async")
    def copy(original, self, destination, source):
        if source.nbytes > 8 * MIB and source.dim() == 1:
            reach()
            destination, source = destination[:-64], source[:-64]
        original(self, destination, source)


def _at_most(count):
    def apply(base):
        @patched(base.graph, "_run")
        def run(original, self):
            del original
            if len(self.program) > count:
                reach()
            for task in self.program[:count]:
                task()

    return apply


def backends() -> Iterator[Unseen]:
    for fault, base, level, apply, promise, test, near, fast in (*unseen_backends.faults(), *unseen_verbs.faults()):
        yield Unseen(fault, base, level, apply, (promise,), (test,), near, fast=fast)


# -- the run ---------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants.unseen", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="those with TEXT in their name")
    parser.add_argument("--which", choices=("all", "fast", "slow"), default="all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    from conformance.mutants import harness

    harness.warm_up()
    which = {"all": (True, False), "fast": (True,), "slow": (False,)}[options.which]
    table = {name: one for name, one in plugins().items() if options.only in name and one.fast in which}
    jobs = [(name, (one.base, one.apply, one.level, one.tests, not one.causes, 0, one.near)) for name, one in table.items()]
    wrong = 0
    for name, outcome in harness.run_all(jobs, options.jobs):
        good = bool(outcome.failed) and bool(set(outcome.promises) & set(table[name].promises))
        good = good and outcome.causes[: len(table[name].causes)] == table[name].causes
        wrong += not good
        found = f"{outcome.failed[0][0]}: {outcome.failed[0][2][:100]!r}" if outcome.failed else outcome.broke or "passes"
        print(f"{'ok' if good else 'WRONG':<6}{name} | {', '.join(outcome.promises)} | {found} | {outcome.seconds:.1f} s")
        if not good and not outcome.failed:
            print(outcome.output[-1500:])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
