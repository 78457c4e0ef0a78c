"""Faults of kernels that no generated one has: by engines, by graphs, by shapes; and of what the policy does at the join."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from conformance.mutants.catalogue import Mutant, patch
from conformance.mutants.generated import kernels

BASE = "cpu"


def mutants() -> Iterator[Mutant]:
    for name, fault, base, make in (
        ("paged_attention", "attends one token too many", BASE, _longer),
        ("paged_attention", "gives NaN for padding", BASE, _padding),
        ("move_cache", "moves one after the other", BASE, _sequential),
        ("rope_write_cache", "writes one slot further", BASE, _slots),
        ("plan_attention", "returns another batch", BASE, _replanned),
        ("rms_norm", "takes a weight of another size", BASE, _broadcast),
        ("sample", "reads its result on the host", "threads", _reads_host),
        ("linear", "reads a value on the host", "threads", _reads_host),
        ("rms_norm", "gives its first result again", "threads", _constant),
    ):
        yield Mutant(f"KernelSet.{name}", fault, base, 4, kernels({name: make}))
    for fault, apply in (
        ("does nothing", lambda inner: lambda self, plan: None),
        ("does something the first time only", _join_once),
        ("asks for work when the batch is idle", _join_idle),
        ("refreshes what isn't declared", lambda inner: lambda self, plan: (inner(self, plan), plan.refresh("more"))[0]),
    ):
        yield Mutant("SpeculativeSync.after_join", fault, "threads", 4, _joined(apply))
    yield Mutant("Backend.attach", "tells the observer of nothing", "threads", 1, _deaf)


def _longer(kernel):
    return lambda **k: kernel(**{**k, "metadata": replace(k["metadata"], seq_lens=k["metadata"].seq_lens + 1)})


def _padding(kernel):
    def padded(**k):
        made = kernel(**k)
        import torch

        rows = torch.arange(made.shape[0]) >= k["metadata"].query_start[-1]
        return made.masked_fill(rows[:, None, None], float("nan"))

    return padded


def _sequential(kernel):
    def moved(**k):
        for source, destination in zip(k["sources"].tolist(), k["destinations"].tolist(), strict=True):
            for name in ("k_cache", "v_cache"):
                rows = k[name].view(-1, *k[name].shape[2:])
                rows[destination] = rows[source]

    return moved


def _slots(kernel):
    return lambda **k: kernel(**{**k, "slots": k["slots"] + 1})


def _replanned(kernel):
    return lambda **k: replace(kernel(**k), seq_lens=k["metadata"].seq_lens - 1)


def _broadcast(kernel):
    def broad(**k):
        width = k["x"].shape[-1]
        if k["weight"].shape[-1] != width:
            k["weight"] = k["weight"][:1].expand(width).contiguous()
        return kernel(**k)

    return broad


def _reads_host(kernel):
    def reads(**k):
        made = kernel(**k)
        made.flatten()[0].item()
        return made

    return reads


def _constant(kernel):
    kept = {}

    def constant(**k):
        made = kernel(**k)
        return kept.setdefault((tuple(made.shape), made.dtype), made)

    return constant


def _joined(make):
    def apply(base):
        from outrider.device import Recompute

        base.sync.recompute_after_join = frozenset({Recompute.MROPE_POSITIONS})
        patch(base.sync, "after_join", make)

    return apply


def _join_once(inner):
    def once(self, plan):
        if not getattr(plan, "method_calls", ()):
            inner(self, plan)

    return once


def _join_idle(inner):
    def idle(self, plan):
        from outrider.device import Recompute

        inner(self, plan)
        if plan.idle:
            plan.recompute(Recompute.MROPE_POSITIONS)

    return idle


def _deaf(base):
    base.backend.attach = lambda self, observer: None
