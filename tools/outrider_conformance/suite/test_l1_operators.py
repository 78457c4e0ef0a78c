"""L1: operators of the engine and of the reference kernels, and verbs that enqueue or ask, don't block the host.

No time is measured: a call that blocks lets the work before it finish, whatever its own time is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from outrider.device import Event, Stream
from outrider_conformance.lab import CALLS, Lab
from outrider_conformance.promises import needs, promise

_SIZE = 48
_Operator = Callable[[Tensor, Tensor], object]
"""An operator of a float matrix [48, 48] and of distinct int64 indices [48]."""
OPERATORS: Mapping[str, _Operator] = MappingProxyType(
    {
        "add": lambda x, i: x + 1,
        "add_": lambda x, i: x.add_(1),
        "arange": lambda x, i: torch.arange(_SIZE, device=x.device),
        "argmax": lambda x, i: x.argmax(-1),
        "argsort": lambda x, i: x.argsort(dim=-1, stable=True),
        "bmm": lambda x, i: torch.bmm(x.unsqueeze(0), x.unsqueeze(0)),
        "cat": lambda x, i: torch.cat((x, x)),
        "clone": lambda x, i: x.clone(),
        "contiguous": lambda x, i: x.t().contiguous(),
        "copy_": lambda x, i: x.copy_(i),
        "cumsum": lambda x, i: x.cumsum(-1),
        "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
        "exp": lambda x, i: x.exp(),
        "fill_": lambda x, i: x.fill_(1),
        "gather": lambda x, i: x.gather(1, i.expand(_SIZE, _SIZE)),
        "index_copy_": lambda x, i: x.index_copy_(0, i, x.clone()),
        "index_select": lambda x, i: x.index_select(0, i),
        "indexing": lambda x, i: x[i],
        "indexed writing": lambda x, i: x.index_put_((i,), x.clone()),
        "log_softmax": lambda x, i: x.log_softmax(-1),
        "masked_fill": lambda x, i: x.masked_fill(x > 0, 0.0),
        "matmul": lambda x, i: x @ x,
        "maximum": lambda x, i: torch.maximum(x, x),
        "mean": lambda x, i: x.mean(-1),
        "rsqrt": lambda x, i: x.abs().rsqrt(),
        "scatter_": lambda x, i: x.scatter_(1, i.expand(_SIZE, _SIZE), x.clone()),
        "scatter_add_": lambda x, i: x.scatter_add_(1, i.expand(_SIZE, _SIZE), x.clone()),
        "sigmoid": lambda x, i: x.sigmoid(),
        "softmax": lambda x, i: x.softmax(-1),
        "sort": lambda x, i: x.sort(dim=-1, descending=True, stable=True),
        "sum": lambda x, i: x.sum(-1),
        "to": lambda x, i: x.to(torch.bfloat16),
        "topk": lambda x, i: x.topk(4, dim=-1),
        "where": lambda x, i: torch.where(x > 0, x, i),
    }
)
"""The operators that must not block the host, by name."""
_Verb = Callable[[Lab, Stream, Stream, Event], object]
"""A verb that is called with a busy stream, another stream, and an event that was recorded on the busy one."""


def _fenced(lab: Lab, a: Stream, b: Stream, e: Event) -> None:
    fence = lab.backend.speculative_sync.create_fence("fence")
    fence.signal(a)
    fence.wait(b)
    fence.done()


def _in_scope(lab: Lab, a: Stream, b: Stream, e: Event) -> None:
    with lab.backend.on(a):
        pass


def _held(lab: Lab, a: Stream, b: Stream, e: Event) -> None:
    lab.backend.keep_alive([object()], until=e)
    lab.backend.release_finished()


VERBS: Mapping[str, _Verb] = MappingProxyType(
    {
        "Stream.record": lambda lab, a, b, e: lab.record(a),
        "Stream.wait": lambda lab, a, b, e: b.wait(e),
        "Stream.query": lambda lab, a, b, e: a.query(),
        "Event.query": lambda lab, a, b, e: e.query(),
        "Backend.on": _in_scope,
        "Backend.release_finished": _held,
        "Fence": _fenced,
    }
)
"""The verbs that must not block the host, by name."""


@needs("asynchronous")
@promise("Capabilities.asynchronous")
@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_does_not_block_the_host(lab: Lab, operator: str) -> None:
    """The call of an operator after slow work returns while that work runs: no operator falls back to the host."""

    def is_pending() -> bool:
        (a,) = lab.streams("a")
        with lab.backend.on(a):
            x = torch.full((_SIZE, _SIZE), 0.5, device=lab.backend.device)
            index = torch.arange(_SIZE, device=lab.backend.device)
            OPERATORS[operator](x.clone(), index)  # a first call may load a library
        a.synchronize()
        lab.slow(a)
        busy = lab.record(a, "busy")
        with lab.backend.on(a):
            OPERATORS[operator](x, index)
        return not busy.query()

    words = f"earlier work was always done after `{operator}`: the operator blocks the host, or runs on it"
    lab.check_in_some_order(is_pending, words)


@needs("asynchronous")
@promise("Capabilities.asynchronous")
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_does_not_block_the_host(lab: Lab, verb: str) -> None:
    """The call of a verb that enqueues or asks returns while earlier work runs, on its stream or on another one."""

    def is_pending() -> bool:
        a, b = lab.streams("a", "b")
        lab.slow(a)
        busy = lab.record(a, "busy")
        for _ in range(CALLS):
            VERBS[verb](lab, a, b, busy)
        return not busy.query()

    lab.check_in_some_order(is_pending, f"earlier work was always done after {verb}: the verb blocks the host")


@needs("asynchronous", "flags")
@promise("Capabilities.asynchronous")
@pytest.mark.parametrize("verb", ["Flag.set", "Flag.wait", "Flag.reset"])
def test_a_flag_does_not_block_the_host(lab: Lab, verb: str) -> None:
    """The call of a flag's verb returns while earlier work of the stream runs."""

    def is_pending() -> bool:
        (a,) = lab.streams("a")
        flag = lab.backend.create_flag("f")
        flag.set(a)
        a.synchronize()
        lab.slow(a)
        busy = lab.record(a, "busy")
        for _ in range(CALLS):
            getattr(flag, verb.removeprefix("Flag."))(a)
        return not busy.query()

    lab.check_in_some_order(is_pending, f"earlier work was always done after {verb}: the verb blocks the host")
