"""Programmatic dependent launch (a kernel starts before its predecessor has ended), and prefetching of weights into L2."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def allow_next_kernel(PDL: tl.constexpr):
    """Let the next kernel of the stream start once every program has called this. That kernel sees this kernel's results only
    after its own wait.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """Wait until the preceding kernel of the stream has ended and its results are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel of the stream start, then wait for the preceding one. Kernels call this before they access memory
    that other kernels write.
    """
    allow_next_kernel(PDL)
    wait_for_previous_kernel(PDL)


@triton.jit
def begin_late(PDL: tl.constexpr):
    """Wait for the preceding kernel, and only then let the next one start: when that starts, every kernel before this one has
    ended.

    After :func:`begin`, a kernel that hasn't waited yet can't rely on any earlier kernel: it and its predecessors may all
    have started while a much earlier kernel still runs. One kernel per layer that begins late bounds this. A long kernel
    doesn't become slower by it.
    """
    wait_for_previous_kernel(PDL)
    allow_next_kernel(PDL)


@triton.jit
def _prefetch(address, size):
    """Have the copy engine prefetch ``size`` bytes (a multiple of 16) at ``address`` into L2. Nothing waits for them."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(pointers, columns):
    """Prefetch the first ``columns`` (a multiple of 8) 16-bit elements at each of ``pointers``."""
    if columns > 0:
        address = pointers.to(tl.int64, bitcast=True)
        _prefetch(address, (address * 0 + columns * 2).to(tl.int32))


@triton.jit
def prefetch_lines(pointers):
    """Prefetch the cache lines at ``pointers`` into L2. This may precede the wait, since a later write by another kernel goes
    to L2, too.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
