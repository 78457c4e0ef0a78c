"""Pairs of programs for torch's `cuda` names: a racy one, and its correct twin, in one text.

A line that ends in `#racy` is in the racy program alone, one that ends in `#right` in the twin alone. The racy program's
finding has `kind` and names the lines that end in `#first` and `#second`; a pair without a kind has two correct programs.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider_sanitizer import FindingKind

START = """
import threading
import numpy as np, torch
side = torch.cuda.Stream()
"""


class Pair(NamedTuple):
    kind: FindingKind | None
    text: str


RELEASED = """
x = torch.ones(8, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(side):
    y = x * 2  #first
torch.cuda.current_stream().wait_stream(side)  #right
del x  #second
torch.cuda.synchronize()
y.tolist()
"""

RELEASED_STORAGE = """
x = torch.ones(8, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(side):
    y = x * 2  #first
torch.cuda.current_stream().wait_stream(side)  #right
x.untyped_storage().resize_(0)  #second
torch.cuda.synchronize()
y.tolist()
"""

PINNED_RELEASED = """
from outrider_sim.torch_device.launches import mapped
p = torch.ones(8, pin_memory=True)
x = torch.zeros(8, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(side):
    x.copy_(mapped(p))  #first
side.synchronize()  #right
del p  #second
torch.cuda.synchronize()
x.tolist()
"""

THREADS = """
x = torch.zeros(8, device="cuda")
done, ready = torch.cuda.Event(), threading.Event()
torch.cuda.synchronize()

def write():
    with torch.cuda.stream(side):
        x.fill_(2)  #first
    done.record(side)
    ready.set()  #right

def read():
    ready.wait()  #right
    other = torch.cuda.Stream()
    other.wait_event(done)
    with torch.cuda.stream(other):
        x * 2  #second

threads = [threading.Thread(target=body) for body in BODIES]
threads[0].start()
import time
time.sleep(0.02)  #racy
threads[1].start()
for thread in threads:
    thread.join()
torch.cuda.synchronize()
"""

THREADS_THAT_WAIT = """
x, q = torch.zeros(8, device="cuda"), torch.zeros(8, pin_memory=True)
other, ready = torch.cuda.Stream(), threading.Event()
torch.cuda.synchronize()

def write():
    with torch.cuda.stream(side):
        q.copy_(x.add_(1), non_blocking=True)  #first
    ready.set()  #right

def read():
    ready.wait()  #right
    WAIT
    q.sum()  #second

threads = [threading.Thread(target=body) for body in BODIES]
threads[0].start()
import time
time.sleep(0.02)  #racy
threads[1].start()
for thread in threads:
    thread.join()
torch.cuda.synchronize()
"""
HOST_WAITS = {
    "stream": "side.synchronize()",
    "device": "torch.cuda.synchronize()",
    "query": "while not side.query(): pass",
    "stream-by-stream": "other.wait_stream(side); other.synchronize()",
    "event": "event = torch.cuda.Event(); event.record(side); event.synchronize()",
    "event-query": "event = torch.cuda.Event(); event.record(side)\n    while not event.query(): pass",
}

RELEASED_AT_THE_END = """
x = torch.ones(8, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(side):
    y = x * 2  #first
torch.cuda.current_stream().wait_stream(side)  #right
del x  #second
torch.cuda.synchronize()
"""

NEVER_RECORDED = """
x = torch.zeros(8, device="cuda")
event = torch.cuda.Event()
torch.cuda.synchronize()
x.fill_(2)  #first
event.record()  #right
side.wait_event(event)
with torch.cuda.stream(side):
    y = x + 1  #second
torch.cuda.synchronize()
"""

PIECEWISE = """
pool = torch.cuda.graph_pool_handle()
x, out = torch.ones(1 << 12, device="cuda"), torch.zeros(1 << 12, device="cuda")
first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(first, pool=pool):
    between = x * 2
with torch.cuda.graph(second, pool=pool):
    torch.add(between, 1, out=out)
del between
torch.cuda.synchronize()
first.replay()
with torch.cuda.stream(side):  #racy
    x.fill_(3)  #racy #second
second.replay()
torch.cuda.synchronize()
"""

CUSTOM = """
@torch.library.custom_op("unseen::NAME", mutates_args=("cache",), device_types=None)
def write_slots(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    cache[slots] = values
write_slots.register_fake(lambda cache, slots, values: None)
torch.sim.declare_rows("unseen::NAME", {"cache": lambda call: call["slots"]})
cache, values = torch.zeros(8, 4, device="cuda"), torch.ones(2, 4, device="cuda")
one, two = torch.tensor([0, 1], device="cuda"), torch.tensor([SLOTS], device="cuda")
torch.cuda.synchronize()
write_slots(cache, one, values)  #first
with torch.cuda.stream(side):
    write_slots(cache, two, values)  #second
torch.cuda.synchronize()
"""

FORKED_CAPTURE = """
x, z = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.add_(z)  #first
    main.wait_stream(side)  #right
    y = x + z  #second
    main.wait_stream(side)  #racy
graph.replay()
torch.cuda.synchronize()
"""

ARRAY_OF_DLPACK = """
x, p = torch.ones(8, device="cuda"), torch.zeros(8, pin_memory=True)
torch.cuda.synchronize()
array = torch.from_dlpack(p).numpy()
p.copy_(x, non_blocking=True)  #first
torch.cuda.synchronize()  #right
array.dumps()  #second
torch.cuda.synchronize()
"""

TRANSPOSED_INDEX = """
x = torch.zeros(3, 16, device="cuda")
columns, cells = torch.tensor([2, 3], device="cuda"), torch.tensor([[5]] * 3, device="cuda")
cells = torch.tensor([[3]] * 3, device="cuda")  #racy
torch.cuda.synchronize()
y = x.movedim(1, 0)[columns]  #first
with torch.cuda.stream(side):
    x.scatter_(1, cells, 3.0)  #second
torch.cuda.synchronize()
"""

NUMPY_LINE = """
p, x = torch.zeros(8, pin_memory=True), torch.ones(8, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(side):
    p.copy_(x, non_blocking=True)  #first
side.synchronize()  #right
np.testing.assert_array_equal(p.numpy(), p.numpy())  #second
"""

TWO_WRITERS = """
x, values = torch.zeros(8, 2, device="cuda"), torch.arange(4.0, device="cuda").view(2, 2)
slots = torch.tensor([3, 3], device="cuda")  #racy
slots = torch.tensor([3, 4], device="cuda")  #right
OPERATION  #first
torch.cuda.synchronize()
y = x * 1  #second
torch.cuda.synchronize()
"""
WRITERS = {
    "index_copy": "x.index_copy_(0, slots, values)",
    "index_put": "x[slots] = values",
    "scatter": "x.scatter_(0, slots.view(2, 1).expand(2, 2), values)",
    "put": "x.put_(slots, values[:, 0])",
}


UNORDERED_COPY = """
plan, lengths = torch.zeros(8, device="cuda"), torch.full((8,), 2.0)
torch.cuda.synchronize()
with torch.cuda.stream(side):
    y = plan * 2  #first
side.synchronize()  #right
torch.sim.copy_unordered(plan, lengths)  #second
torch.cuda.synchronize()
"""

REMAPPED = """
x = torch.ones(8, device="cuda")
torch.cuda.synchronize()
torch.sim.remap(x)  #first
x.fill_(2)  #right
y = x * 2  #second
torch.cuda.synchronize()
"""

UNMAPPED_UNDER_TRANSFER = """
nic = torch.cuda.Stream()
kv, remote = torch.ones(8, device="cuda"), torch.zeros(8, pin_memory=True)
torch.cuda.synchronize()
with torch.cuda.stream(nic):
    remote.copy_(kv, non_blocking=True)  #first
nic.synchronize()  #right
torch.sim.remap(kv)  #second
torch.cuda.synchronize()
"""


def _turned(text: str) -> str:
    """Swap the marks of the two accesses, for a run in which the second comes first."""
    return text.replace("#first", "#then").replace("#second", "#first").replace("#then", "#second")


def pairs() -> dict[str, Pair]:
    """Return the pairs by name."""
    kinds = FindingKind
    found = {
        "released-under-a-reader": Pair(kinds.REUSE, RELEASED),
        "storage-released-under-a-reader": Pair(kinds.REUSE, RELEASED_STORAGE),
        "pinned-released-under-a-kernel": Pair(kinds.REUSE, PINNED_RELEASED),
        "threads-record-first": Pair(kinds.READ_AFTER_WRITE, THREADS.replace("BODIES", "(write, read)")),
        "threads-wait-first": Pair(kinds.WRITE_AFTER_READ, _turned(THREADS.replace("BODIES", "(read, write)"))),
        "released-at-the-end": Pair(kinds.REUSE, RELEASED_AT_THE_END),
        "event-never-recorded": Pair(kinds.READ_AFTER_WRITE, NEVER_RECORDED),
        "copy-that-no-stream-orders": Pair(kinds.WRITE_AFTER_READ, UNORDERED_COPY),
        "remapped-and-not-written": Pair(kinds.STALE, REMAPPED),
        "unmapped-under-a-transfer": Pair(kinds.WRITE_AFTER_READ, UNMAPPED_UNDER_TRANSFER),
        "piecewise-graphs": Pair(kinds.WRITE_AFTER_READ, PIECEWISE),
        "fork-in-a-capture": Pair(kinds.READ_AFTER_WRITE, FORKED_CAPTURE),
        "array-of-a-dlpack-tensor": Pair(kinds.READ_AFTER_WRITE, ARRAY_OF_DLPACK),
        "index-of-a-transposed-view": Pair(kinds.WRITE_AFTER_READ, TRANSPOSED_INDEX),
        "line-of-a-numpy-read": Pair(kinds.READ_AFTER_WRITE, NUMPY_LINE),
    }
    for name, slots in (("custom-slots-overlap", "1, 2"), ("custom-slots-apart", "2, 3")):
        kind = kinds.WRITE_AFTER_WRITE if "overlap" in name else None
        found[name] = Pair(kind, CUSTOM.replace("SLOTS", slots).replace("NAME", name.replace("-", "_")))
    for name, wait in HOST_WAITS.items():
        waits = THREADS_THAT_WAIT.replace("WAIT", wait)
        found[f"host-waits-for-{name}"] = Pair(kinds.READ_AFTER_WRITE, waits.replace("BODIES", "(write, read)"))
        turned = _turned(waits.replace("BODIES", "(read, write)"))
        found[f"host-waited-before-for-{name}"] = Pair(kinds.WRITE_AFTER_READ, turned)
    for name, operation in WRITERS.items():
        found[f"two-writers-{name}"] = Pair(kinds.TWO_WRITERS, TWO_WRITERS.replace("OPERATION", operation))
    return found
