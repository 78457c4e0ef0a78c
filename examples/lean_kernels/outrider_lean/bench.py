"""Compare each kernel with the reference on this machine: `python -m outrider_lean.bench`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from outrider.device import KernelSet
from outrider_lean.kernels import LeanKernels

NUM_CALLS = 50


def median_us(call: Callable[[], object]) -> float:
    call()
    durations = []
    for _ in range(NUM_CALLS):
        started = time.perf_counter()
        call()
        durations.append(time.perf_counter() - started)
    return sorted(durations)[NUM_CALLS // 2] * 1e6


def main() -> None:
    reference, lean = KernelSet(), LeanKernels()
    print(f"{'kernel':<12} {'rows x width':>14} {'reference':>12} {'lean':>12} {'ratio':>7}")
    for rows, width in ((1, 256), (16, 4096), (256, 4096)):
        x, weight, pair = torch.randn(rows, width), torch.randn(width), torch.randn(rows, 2 * width)
        calls: dict[str, Callable[[KernelSet], object]] = {
            "rms_norm": lambda kernels, x=x, w=weight: kernels.rms_norm(x, w, 1e-5),
            "silu_mul": lambda kernels, pair=pair: kernels.silu_mul(pair),
        }
        for name, call in calls.items():
            slow, fast = (median_us(lambda k=k, call=call: call(k)) for k in (reference, lean))
            print(f"{name:<12} {rows:>6} x {width:>5} {slow:>9.1f} us {fast:>9.1f} us {slow / fast:>7.2f}")


if __name__ == "__main__":
    main()
