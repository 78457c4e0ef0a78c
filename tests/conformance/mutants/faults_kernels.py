"""Faults of level 4: kernels slightly wrong, in-place ones that write nothing, ignored arguments, the policy's work."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace

from conformance.mutants.catalogue import Mutant, patch

IN_PLACE = ("rope_write_cache", "move_cache", "count_tokens")
NUMBERS = ("linear", "rms_norm", "add_rms_norm", "silu_mul", "paged_attention", "bias_logits", "penalize_logits")
CHOICES = ("sample", "verify_chain", "verify_tree")
MIXED = ("logprobs",)
IGNORED = {
    "linear": ("bias", None),
    "paged_attention": ("window", 0),
    "sample": ("draft", False),
    "rms_norm": ("eps", 0.5),
    "verify_tree": ("sampling", False),
}
BASE = "cpu"


def mutants() -> Iterator[Mutant]:
    for name in (*NUMBERS, *CHOICES, *MIXED):
        yield Mutant(f"KernelSet.{name}", "has its last element slightly wrong", BASE, 4, _kernels({name: _off}))
    for name in NUMBERS:
        yield Mutant(f"KernelSet.{name}", "rounds to bfloat16", BASE, 4, _kernels({name: _rounds}))
    for name in IN_PLACE:
        yield Mutant(f"KernelSet.{name}", "writes nothing", BASE, 4, _kernels({name: lambda f: lambda *a, **k: None}))
    for name, (argument, value) in IGNORED.items():
        yield Mutant(f"KernelSet.{name}", f"ignores {argument}", BASE, 4, _kernels({name: _ignores(argument, value)}))
    for name, fault, make in (
        ("truncate_logits", "has its largest logit slightly wrong", _largest),
        ("add_rms_norm", "doesn't update the residual", _residual),
        ("paged_attention", "ignores the tree mask", _metadata(tree_mask=None)),
        ("paged_attention", "has a scale that is 1 % off", _scaled),
        ("paged_attention", "attends one token too many", _longer),
        ("paged_attention", "gives NaN for padding", _padding),
        ("sample", "takes one seed for the whole batch", _one("seeds")),
        ("sample", "ignores temperatures", _one("temperature")),
        ("move_cache", "moves one after the other", _sequential),
        ("rope_write_cache", "writes one slot further", _slots),
        ("rope_write_cache", "doesn't turn the keys", _unturned),
        ("plan_attention", "returns another batch", _replanned),
        ("rms_norm", "takes a weight of another size", _broadcast),
    ):
        yield Mutant(f"KernelSet.{name}", fault, BASE, 4, _kernels({name: make}))
    yield Mutant("KernelSet.sample", "reads its result on the host", "threads", 4, _kernels({"sample": _reads_host}))
    yield Mutant("KernelSet.linear", "reads a value on the host", "threads", 4, _kernels({"linear": _reads_host}))
    yield Mutant("KernelSet.rms_norm", "gives its first result again", "threads", 4, _kernels({"rms_norm": _constant}))
    for fault, apply in (
        ("does nothing", lambda inner: lambda self, plan: None),
        ("does something the first time only", _join_once),
        ("asks for work when the batch is idle", _join_idle),
        ("refreshes what isn't declared", lambda inner: lambda self, plan: (inner(self, plan), plan.refresh("more"))[0]),
    ):
        yield Mutant("SpeculativeSync.after_join", fault, "threads", 4, _joined(apply))
    yield Mutant("Backend.attach", "tells the observer of nothing", "threads", 1, _deaf)


def _kernels(changes):
    """The backend's own kernels are a set with these methods changed; the references stay as they are."""

    def apply(base):
        from outrider.device import KernelSet

        changed = type("Changed", (KernelSet,), {})
        for name, make in changes.items():
            original = getattr(KernelSet, name)
            signature = inspect.signature(original)

            kernel = make(lambda _original=original, **k: _original(k.pop("self"), **k))

            def method(*arguments, _kernel=kernel, _signature=signature, **options):
                bound = _signature.bind(*arguments, **options)
                bound.apply_defaults()
                return _kernel(**bound.arguments)

            setattr(changed, name, method)

        kernels = changed()
        base.backend.kernels = property(lambda self: kernels)

    return apply


def _last(tensor):
    changed = tensor.clone()
    flat = changed.view(-1)[-1:]
    if changed.is_floating_point():
        flat.copy_(flat * 1.25 + 0.25)
    else:
        flat.add_(1)
    return changed


def _off(kernel):
    def off(**k):
        made = kernel(**k)
        return tuple(_last(part) for part in made) if isinstance(made, tuple) else _last(made)

    return off


def _largest(kernel):
    def off(**k):
        made = kernel(**k).clone()  # the last one may be left out, and infinite
        made.view(-1)[made.view(-1).argmax()] += 0.25
        return made

    return off


def _rounds(kernel):
    import torch

    def rounds(**k):
        made = kernel(**k)
        return made.to(torch.bfloat16).to(made.dtype)

    return rounds


def _ignores(argument, value):
    return lambda kernel: lambda **k: kernel(**{**k, argument: value})


def _residual(kernel):
    return lambda **k: kernel(**{**k, "residual": k["residual"].clone()})


def _metadata(**changes):
    return lambda kernel: lambda **k: kernel(**{**k, "metadata": replace(k["metadata"], **changes)})


def _scaled(kernel):
    return lambda **k: kernel(**{**k, "scale": k["scale"] * 1.01})


def _longer(kernel):
    return lambda **k: kernel(**{**k, "metadata": replace(k["metadata"], seq_lens=k["metadata"].seq_lens + 1)})


def _padding(kernel):
    def padded(**k):
        made = kernel(**k)
        import torch

        rows = torch.arange(made.shape[0]) >= k["metadata"].query_start[-1]
        return made.masked_fill(rows[:, None, None], float("nan"))

    return padded


def _one(argument):
    return lambda kernel: lambda **k: kernel(**{**k, argument: k[argument][:1].expand_as(k[argument]).contiguous()})


def _sequential(kernel):
    def moved(**k):
        for source, destination in zip(k["sources"].tolist(), k["destinations"].tolist(), strict=True):
            for name in ("k_cache", "v_cache"):
                rows = k[name].view(-1, *k[name].shape[2:])
                rows[destination] = rows[source]

    return moved


def _slots(kernel):
    return lambda **k: kernel(**{**k, "slots": k["slots"] + 1})


def _unturned(kernel):
    def turned(**k):
        kept = k["k"].clone()
        kernel(**k)
        k["k"].copy_(kept)

    return turned


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
