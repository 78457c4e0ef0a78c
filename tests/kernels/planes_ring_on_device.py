"""Products with weights of four bits through a ring on a real device: ``python
tests/kernels/planes_ring_on_device.py [SECONDS]``.

Each case is compared with the reference in float64, in a graph: a line for each that is WRONG, and a count. Tile
configurations are compiled beforehand in processes of their own; one that can't be, or that fails, is a line. Nothing new for
30 seconds: a line says where, and the exit code is 3. It is 1 where a case is wrong or nothing ran.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from on_device import going, in_a_graph, waited, watched, wrong

from outrider.device import KernelSet
from outrider.device.kernels.weight_formats import weight_format
from outrider_triton.launch import compile_only
from outrider_triton.quantized import nibble_planes as nibble_plane_ops  # noqa: F401  (registers the operator)
from outrider_triton.quantized.nibble_planes import INT8_COMPONENTS, permute_rows, row_layout
from outrider_triton.quantized.plan import ProductPlan
from outrider_triton.tiles.derive.fits import shared_bytes
from outrider_triton.tiles.derive.products import _streamed_nibbles
from outrider_triton.tiles.facts import facts_of

SHAPES = ((4096, 4096), (1000, 1024), (6144, 4096), (4096, 14336), (28672, 4096))
TOKENS = {4: (1, 4), 8: (5, 8), 16: (13,)}
ERROR = 6e-3
"""Relative to the largest number of the row: a rounding of bfloat16 is 4e-3, and the reference rounds nothing."""
STORED = ProductPlan("block", False, 128, 128, planes=True, can_stream=True).stored("int4")


def product(x, weight, bias, config, pdl=True, laid=torch.bfloat16):
    own = laid, "block", 128, 128, True, config.as_list(), pdl
    return torch.ops.outrider.linear_quantized.triton_planes(
        x, weight.data, weight.scales, None, bias, list(weight.block), *own
    )


# -- compiling -----------------------------------------------------------------------------------------------------


def compile_one(config, n, k, biased):
    """In a process of its own: None, or why it can't be."""
    try:
        device = torch.device("cuda")
        data = torch.empty(n, k // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(n, k // 128, dtype=torch.float32, device=device)
        x = permute_rows(
            torch.empty(min(config.block_m, 8), k, dtype=torch.bfloat16, device=device), False, row_layout(config)
        )
        bias = torch.empty(n, dtype=torch.bfloat16, device=device) if biased else None
        own = torch.bfloat16, "block", 128, 128, True, config.as_list(), True
        with compile_only():
            torch.ops.outrider.linear_quantized.triton_planes(x, data, scales, None, bias, [1, 128], *own)
    except Exception as error:  # whatever a compiler raises
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


# -- correctness ---------------------------------------------------------------------------------------------------


def cut(facts, n, k, *, m, split, warps, box, waves):
    """Those that fit, in units of 512 columns and of 256."""
    found = [
        config
        for config in _streamed_nibbles(facts, "linear_parts", m, n, k, 0, STORED)
        if (config.split, config.warps, config.block_n) == (split, warps, box)
        and config.rows_per_program == -(-n * split // (facts.processors * waves * box)) * box
        and shared_bytes(facts, "linear_parts", config, STORED) <= facts.shared_bytes
    ]
    return list({config.prefetch_columns: config for config in found}.values())


def cases(facts):
    """Shape, tokens, cut, whether with a bias: few rows and many, one group and two, a ring that goes round and one that
    doesn't.
    """
    for n, k in SHAPES:
        for m in TOKENS:
            for split, warps, box, waves, biased in ((1, 4, 16, 1, True), (1, 8, 8, 2, False), (2, 8, 16, 1, False),
                                                     (4, 4, 8, 2, False), (4, 8, 16, 1, False)):  # fmt: skip
                for config in cut(facts, n, k, m=m, split=split, warps=warps, box=box, waves=waves):
                    yield n, k, m, config, biased
                    if split == 1 and warps == 8 and config.stages > 4:  # goes round many times
                        yield n, k, m, replace(config, stages=4), biased


def check(facts, compiled, device, end):
    """How many were right and wrong."""
    generator = torch.Generator(device).manual_seed(0)
    reference, counts, weights = KernelSet(), [0, 0], {}
    for n, k, block, config, biased in cases(facts):
        if (config, n, k, biased) not in compiled:
            continue
        if time.monotonic() > end:
            print("LATE: not all cases ran", flush=True)
            break
        if (n, k) not in weights:
            weights.clear()
            weight = weight_format("int4").random_weight(n, k, device=device, generator=generator)
            bias = torch.randn(n, device=device, generator=generator).to(torch.bfloat16)
            x = torch.randn(16, k, device=device, generator=generator).to(torch.bfloat16)
            right = reference.linear_quantized(x.double(), weight, bias.double())
            weights[n, k] = weight, bias, x, right
        weight, bias, x, right = weights[n, k]
        for m in TOKENS[block]:
            name = f"{n} x {k}, {m} tokens, bias {biased}, {config.as_list()}"
            going(name)
            try:
                rows = permute_rows(x[:m], False, INT8_COMPONENTS)
                made = in_a_graph(partial(product, rows, weight, bias if biased else None, config), times=2)
                made = made.sum(0) if config.split > 1 else made
                off = wrong(made, right[:m] if biased else right[:m] - bias.double())
            except Exception as error:  # the next case may say more
                print(f"WRONG {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                off = float("inf")
            bad = off > ERROR
            counts[bad] += 1
            if bad:
                print(f"WRONG {name}: {off:.2e}", flush=True)
    return counts


def main() -> int:
    begun = time.monotonic()
    end = begun + float(sys.argv[1] if len(sys.argv) > 1 else 150)
    device = torch.device("cuda")
    facts = facts_of(torch.cuda.get_device_properties(device))
    context = multiprocessing.get_context("spawn")
    workers = max(1, min((os.cpu_count() or 2) - 1, 15))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        checks = dict.fromkeys((config, n, k, biased) for n, k, _, config, biased in cases(facts))
        jobs = {job: pool.submit(compile_one, *job) for job in checks}
        watched()
        compiled = waited(jobs, end)
        print(f"{len(compiled)} cuts to check compiled after {time.monotonic() - begun:.0f} s", flush=True)
        right, bad = check(facts, compiled, device, end)
        print(f"CHECKED {right + bad} cases: {bad} WRONG, after {time.monotonic() - begun:.0f} s", flush=True)
        pool.shutdown(wait=False, cancel_futures=True)
    return 0 if right and not bad else 1


if __name__ == "__main__":
    sys.exit(main())
