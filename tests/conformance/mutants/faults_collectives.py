"""Faults of collectives: in torch's groups on the host (``cpu``), and in those of the simulated device (``sim``)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from conformance.mutants.catalogue import Mutant, patch, patched

LEVEL = 6


def mutants() -> Iterator[Mutant]:
    for verb, fault, base, apply in (
        ("Group._all_reduce", "always adds up", "cpu", _always_sums),
        ("Group._all_reduce", "rounds differently on each rank", "cpu", _own_bits),
        ("Group._all_reduce", "sends the operand of the call before", "cpu", _stale_operand),
        ("Group._all_reduce", "leaves out what is behind a multiple of four", "cpu", _drops_the_rest),
        ("Group._all_reduce", "returns before it has run", "cpu", _early_return),
        ("Group._all_gather", "swaps the ranks", "cpu", _swapped_gather),
        ("Group._reduce_scatter", "gives each rank the other's part", "cpu", _swapped_scatter),
        ("Group._all_to_all", "swaps the halves", "cpu", _swapped_halves),
        ("Group._broadcast", "takes the first rank for the root", "cpu", _first_root),
        ("Group._broadcast", "takes the root for a rank of the world", "cpu", _world_root),
        ("Group._send", "brings the message of before", "cpu", _old_message),
        ("Group._close", "forgets nothing: the next group of that name is the old one", "cpu", _old_group),
        ("Backend._create_group", "mixes up groups of the same ranks", "cpu", _mixed_up),
        ("Backend._create_group", "waits for ever", "cpu", _no_limit),
        ("Group", "swallows what a peer's death raises", "cpu", _swallowed),
        ("Group", "raises what the library raised", "cpu", _untyped),
        ("Group._all_reduce", "is enqueued on another stream", "sim", _elsewhere("_all_reduce")),
        ("Group._all_gather", "doesn't wait for the kernel before", "sim", _ahead("_all_gather")),
        ("Group._broadcast", "has the host wait for the other ranks", "sim", _host_waits),
        ("Group._all_to_all", "reads its operand when the host calls", "sim", _early_read),
        ("Group._reduce_scatter", "writes its result at the end of the next call", "sim", _late_write),
        ("Capabilities", "captures_collectives is declared and isn't there", "sim", _captures_nothing),
    ):
        yield Mutant(verb, fault, base, LEVEL, apply)


def _torch_group():
    from outrider.device import TorchGroup

    return TorchGroup


def _sim_group():
    from outrider_sim.ranks.collectives import SimGroup

    return SimGroup


def _always_sums(base):
    from outrider.device import Reduction

    patch(_torch_group(), "_all_reduce", lambda inner: lambda group, tensor, reduction: inner(group, tensor, Reduction.SUM))


def _own_bits(base):
    @patched(_torch_group(), "_all_reduce")
    def all_reduce(inner, group, tensor, reduction):
        inner(group, tensor, reduction)
        if group.rank and tensor.is_floating_point():
            tensor.mul_(1 + torch.finfo(tensor.dtype).eps)


def _stale_operand(base):
    @patched(_torch_group(), "_all_reduce")
    def all_reduce(inner, group, tensor, reduction):
        kept = getattr(group, "kept", None)
        group.kept = tensor.clone()
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            tensor.copy_(kept)
        inner(group, tensor, reduction)


def _drops_the_rest(base):
    @patched(_torch_group(), "_all_reduce")
    def all_reduce(inner, group, tensor, reduction):
        flat = tensor.view(-1)
        inner(group, flat[: max(len(flat) // 4 * 4, 1)], reduction)


def _early_return(base):
    import threading

    @patched(_torch_group(), "_all_reduce")
    def all_reduce(inner, group, tensor, reduction):
        made = tensor.clone()

        def later():
            inner(group, made, reduction)
            tensor.copy_(made)

        before = getattr(group, "under_way", None)
        if before is not None:
            before.join()
        group.under_way = threading.Thread(target=later, daemon=True)
        group.under_way.start()


def _swapped_gather(base):
    @patched(_torch_group(), "_all_gather")
    def all_gather(inner, group, output, tensor):
        inner(group, output, tensor)
        output.copy_(output.flip(0))


def _swapped_scatter(base):
    patch(
        _torch_group(),
        "_reduce_scatter",
        lambda inner: lambda group, output, tensor, reduction: inner(group, output, tensor.flip(0), reduction),
    )


def _swapped_halves(base):
    @patched(_torch_group(), "_all_to_all")
    def all_to_all(inner, group, output, tensor):
        inner(group, output, tensor)
        output.copy_(output.flip(0))


def _first_root(base):
    patch(_torch_group(), "_broadcast", lambda inner: lambda group, tensor, root: inner(group, tensor, 0))


def _world_root(base):
    @patched(_torch_group(), "_broadcast")
    def broadcast(inner, group, tensor, root):
        inner(group, tensor, group.ranks.index(root) if root in group.ranks else root)


def _old_message(base):
    @patched(_torch_group(), "_send")
    def send(inner, group, tensor, to):
        kept, group.kept = getattr(group, "kept", tensor), tensor.clone()
        inner(group, kept if kept.shape == tensor.shape and kept.dtype == tensor.dtype else tensor, to)


def _old_group(base):
    """The store's keys of before are found again."""
    from outrider.device import torch_collectives

    def fresh_store(name, index, store, timeout_s):
        joined = torch_collectives.dist.PrefixStore(f"again/{name}", store)
        joined.set_timeout(torch_collectives.timedelta(seconds=timeout_s))
        return joined

    torch_collectives.fresh_store = fresh_store


def _mixed_up(base):
    """One process group for all groups with as many ranks."""
    from outrider.device import torch_collectives

    def make(inner):
        def make_process_group(device, name, ranks, index, joined, timeout_s):
            return inner(device, name, tuple(sorted(ranks)), sorted(ranks).index(ranks[index]), joined, timeout_s)

        return make_process_group

    torch_collectives.make_process_group = make(torch_collectives.make_process_group)


def _no_limit(base):
    @patched(base.backend, "_create_group")
    def create(inner, backend, name, ranks, rank, store, timeout_s):
        return inner(backend, name, ranks, rank, store, 600.0)


def _swallowed(base):
    from outrider.device import CollectiveError

    @patched(_torch_group(), "_run")
    def run(inner, group, start):
        try:
            return inner(group, start)
        except CollectiveError:
            if group.last_call is None:
                raise
            return None


def _untyped(base):
    def run(group, start):
        started = start()
        if hasattr(started, "wait"):
            started.wait()
        return started

    _torch_group()._run = run


# -- of the simulated device -------------------------------------------------------------------------------------------


def _elsewhere(verb):
    def apply(base):
        @patched(_sim_group(), verb)
        def call(inner, group, *operands):
            if not hasattr(group, "elsewhere"):
                group.elsewhere = group.backend.create_stream("elsewhere")
            with group.backend._on(group.elsewhere):
                inner(group, *operands)

    return apply


def _ahead(verb):
    """The call runs on a stream of its own, which nothing holds back; the caller's stream waits for it."""

    def apply(base):
        @patched(_sim_group(), verb)
        def call(inner, group, *operands):
            backend = group.backend
            if backend.active_capture is not None:
                inner(group, *operands)
                return
            if not hasattr(group, "ahead"):
                group.ahead, group.joined = backend.create_stream("ahead"), backend.create_event("joined")
            with backend._on(group.ahead):
                inner(group, *operands)
            group.ahead.record(group.joined)
            group.called_on.wait(group.joined)

        from outrider.device import Group

        @patched(Group, "_call")
        def note_stream(inner, group, kind, stream, *operands, **options):
            group.called_on = stream
            return inner(group, kind, stream, *operands, **options)

    return apply


def _host_waits(base):
    @patched(_sim_group(), "_all_reduce")
    def all_reduce(inner, group, tensor, reduction):
        inner(group, tensor, reduction)
        if group.backend.active_capture is None:
            group.backend._synchronize()


def _early_read(base):
    @patched(_sim_group(), "_all_to_all")
    def all_to_all(inner, group, output, tensor):
        now = torch.empty_like(tensor)
        now._inner.copy_(tensor._inner)  # copies the values of this moment, in no order with other work
        group.kept = [*getattr(group, "kept", []), now]
        inner(group, output, now)


def _late_write(base):
    @patched(_sim_group(), "_reduce_scatter")
    def reduce_scatter(inner, group, output, tensor, reduction):
        kept = getattr(group, "kept", None)
        made = torch.empty_like(output)
        inner(group, made, tensor, reduction)
        if kept is not None:
            kept[0].copy_(kept[1])
        group.kept = output, made


def _captures_nothing(base):
    """A captured call runs once, when it's captured, and in no replay."""

    @patched(_sim_group(), "_issue")
    def issue(inner, group, compute, read, write, channel=None):
        if group.backend.active_capture is None:
            inner(group, compute, read, write, channel)
