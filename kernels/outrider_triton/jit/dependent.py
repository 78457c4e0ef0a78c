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


@triton.jit
def ask_for_share(soon, each, total, THREADS: tl.constexpr):
    """Ask for this program's share of the first ``total`` bytes at ``soon``: ``each`` bytes a thread, 0 for none.

    A hint that weights are read soon, by another kernel. Nothing depends on it.
    """
    if each > 0:
        program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
        offset = (program.to(tl.int64) * THREADS + tl.arange(0, THREADS)) * each
        address = soon.to(tl.int64, bitcast=True) + tl.minimum(offset, total - each)
        _ask(address, (offset * 0 + each).to(tl.int32))
