"""Kernels of Triton, and what the compiler makes of them for a CUDA device; printed as JSON.

In a process of its own: one that interprets kernels doesn't compile any.
"""

import json
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


def loop(x, out, total, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    read, write, found = x, out, tl.zeros((BLOCK,), tl.float32)
    for _ in range(n):
        found += tl.load(read + at)
        tl.store(write + at, found)
        read += BLOCK
        write += BLOCK
    tl.atomic_add(total, tl.sum(found))


def swaps(x, out, source, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    one, two = x, out
    for _ in range(n):
        tl.store(two + at, tl.load(source + at))
        one, two = two, one


def picks(x, out, source, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.load(source) > 3:
        chosen = x
        tl.store(source, 1.0)
    else:
        chosen = out
    tl.store(chosen + at, 1.0)


def leaves(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0)
    if at >= n:
        return
    if at == 0:  # noqa: SIM108  # a branch of the kernel
        found = tl.load(x + at)
    else:
        found = tl.load(x + at) - tl.load(x + at - 1)
    if found < 0:
        return
    tl.store(out + at, found)


def beside(x, out, source, n, BLOCK: tl.constexpr):
    at = tl.program_id(0)
    if n > 0:
        place = source + at * BLOCK + n
        tl.store(out + at, tl.load(place))
    else:
        place = x + at * BLOCK + n
        tl.store(place, 1.0)


def ttir(function: Any) -> str:
    kernel = JITFunction(function)
    signature = {name: {"n": "i32", "BLOCK": "constexpr"}.get(name, "*fp32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs={(len(signature) - 1,): 128})
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"])


if __name__ == "__main__":
    print(json.dumps({function.__name__: ttir(function) for function in (add, loop, swaps, picks, leaves, beside)}))
