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
def prefetch(pointers):
    """Ask for the cache lines at ``pointers`` to be brought into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
