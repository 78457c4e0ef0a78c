"""Small Triton kernels on the simulated device, run by Triton's interpreter: prints what the sanitizer says as JSON."""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton has no other switch

import torch

from outrider import get_backend
from outrider_sanitizer import watch
from outrider_sim.torch_device.tensor import SimTensor
from outrider_vllm.install import install_triton

launches = install_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def write_block(cache, block, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(cache + block * size + at, at.to(tl.float32))


@triton.jit
def write_through(table, size: tl.constexpr):
    where = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(where + tl.arange(0, size), tl.zeros((size,), tl.float32))


@triton.jit
def write_some(out, count, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, at.to(tl.float32), mask=at < count)


@triton.jit
def add_to(total, size: tl.constexpr):
    tl.atomic_add(total + tl.arange(0, size), tl.full((size,), 1.0, tl.float32))


def seen(backend, steps):
    side = torch.sim.Stream()
    backend.synchronize()
    with watch(backend) as report:
        steps(side)
        backend.synchronize()
    return [str(f) for f in report]


def main():
    backend = get_backend("sim")
    show = launches.host_address
    SimTensor.data_ptr = lambda self: show(self)
    found = {}

    def blocks(block):
        def steps(side):
            cache = torch.zeros(4, 16, device="sim")
            backend.synchronize()
            write_block[(1,)](cache, 1, size=16)
            with torch.sim.stream(side):
                cache[block].to("cpu", non_blocking=True)
            torch.sim.synchronize()

        return steps

    found["other block"] = seen(backend, blocks(2))
    found["same block"] = seen(backend, blocks(1))

    def table(side):
        x = torch.ones(16, device="sim")
        addresses = torch.tensor([x.data_ptr()], dtype=torch.uint64, device="sim")
        backend.synchronize()
        write_through[(1,)](addresses, size=16)
        with torch.sim.stream(side):
            x + 1
        torch.sim.synchronize()

    found["through a table"] = seen(backend, table)

    def some(count):
        def steps(side):
            out = torch.empty(16, device="sim")
            write_some[(1,)](out, count, size=16)
            out.to("cpu", non_blocking=True)
            torch.sim.synchronize()

        return steps

    found["left out"] = seen(backend, some(7))
    lazy = get_backend("sim:strategy=lazy")
    found["queued"] = seen(lazy, some(16))
    backend = get_backend("sim")

    def atomic(side):
        total = torch.zeros(16, device="sim")
        backend.synchronize()
        add_to[(1,)](total, size=16)
        with torch.sim.stream(side):
            total + 1
        torch.sim.synchronize()

    found["atomic"] = seen(backend, atomic)
    found["nowhere"] = launches.unknown_accesses
    print(json.dumps(found), flush=True)
    os._exit(0)  # Triton's end of process meets tensors of a device that is gone


main()
