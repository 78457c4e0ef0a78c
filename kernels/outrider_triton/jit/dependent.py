"""Programmatic dependent launch, and reading weights ahead."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may start once every program has said so; what this one writes isn't there for it before it waits."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """Wait until the kernel before has ended and what it wrote is there."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel start and wait for the one before."""
    let_next_start(PDL)
    wait_for_last(PDL)


@triton.jit
def begin_late(PDL: tl.constexpr):
    """Wait, and only then let the next kernel start: when that runs, every kernel before this one has ended.

    After :func:`begin` alone a kernel that hasn't waited yet knows of nothing that it has ended: it and all that were
    enqueued behind it may have begun while one far ahead still runs. One kernel a layer that begins late bounds this, and
    one that runs for long doesn't become slower by it.
    """
    wait_for_last(PDL)
    let_next_start(PDL)


@triton.jit
def _ask(address, size):
    """Ask the copy engine to bring ``size`` bytes (a multiple of 16) at ``address`` into L2; nothing waits for it."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask_for_rows(pointers, columns):
    """Ask for the first ``columns`` (a multiple of 8) numbers of 16 bits at each of ``pointers``."""
    if columns > 0:
        address = pointers.to(tl.int64, bitcast=True)
        _ask(address, (address * 0 + columns * 2).to(tl.int32))


@triton.jit
def fetch(pointers):
    """Have what is at ``pointers`` brought into L2. May precede the wait: who writes it yet writes it there, too."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
