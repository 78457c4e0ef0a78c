"""Programmatic dependent launch, and reading weights ahead."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel start and wait for the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


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
