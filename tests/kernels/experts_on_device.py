"""Mixtures of experts on a real device: ``python tests/kernels/experts_on_device.py [SECONDS]``.

Each case is compared with the products in float64, in a graph, the layout of pairs with torch's sort, and the choice of
experts with the reference: a line for each that is WRONG, and a count. Kernels are compiled beforehand in processes of their
own; one that can't be, or that fails, is a line. Nothing new for 30 seconds: a line says where, and the exit code is 3. It is
1 where something is wrong or nothing ran.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from on_device import going, in_a_graph, waited, watched, wrong

from outrider.device import KernelSet
from outrider_triton.experts import operators as expert_ops
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import compile_only
from outrider_triton.tiles.facts import facts_of

QWEN = 128, 8, 2048, 768
"""Experts, those of a token, hidden size, inner size."""
SHAPES = {
    "Qwen3-30B-A3B": QWEN,
    "8 experts": (8, 2, 1024, 3584),
    "60 experts": (60, 4, 2048, 1408),
    "uneven": (60, 4, 520, 136),
}
TOKENS = (1, 4, 32, 64, 65, 128, 200, 256, 512)
ERROR = 6e-3
"""Relative to the largest number of the row: a rounding of bfloat16 is 4e-3, and the products in float64 round nothing."""
LAID_OUT = ((8, 8), (130, 2), (1024, 8), (4096, 8), (9000, 4))
"""Pairs, and experts of a token."""
REFERENCE = KernelSet()


# -- operands ------------------------------------------------------------------------------------------------------


def weights_of(shape, device, generator):
    experts, _, hidden, inner = shape

    def normal(*size):
        return torch.empty(size, device=device, dtype=torch.bfloat16).normal_(generator=generator).mul_(size[-1] ** -0.5)

    return normal(experts, 2 * inner, hidden), normal(experts, hidden, inner)


def drawn(shape, m, device, generator, spread=0.0):
    """Tokens, shares and experts. ``spread``: how much likelier some experts are than others, in logits of unit noise."""
    experts, count, hidden, _ = shape
    logits = torch.randn(m, experts, device=device, generator=generator)
    logits += spread * torch.randn(experts, device=device, generator=generator)
    shares, names = logits.softmax(-1).topk(count, dim=-1)
    x = torch.randn(m, hidden, device=device, generator=generator).to(torch.bfloat16)
    return x, shares / shares.sum(-1, keepdim=True), names.contiguous()


def exactly(x, shares, names, gate_up, down):
    """In float64, an expert after the other."""
    right = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for name in names.unique().tolist():
        token, slot = (names == name).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ gate_up[name].double().T).chunk(2, dim=-1)
        made = (torch.nn.functional.silu(gate) * up) @ down[name].double().T
        right.index_add_(0, token, made * shares[token, slot].double()[:, None])
    return right


# -- compiling -----------------------------------------------------------------------------------------------------


def compile_one(shape, tokens, size, gates, outputs):
    """In a process of its own: None, or why it can't be."""
    try:
        experts, count, hidden, inner = shape
        half = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
        weights = torch.empty(experts, 2 * inner, hidden, **half), torch.empty(experts, hidden, inner, **half)
        names = torch.zeros(tokens, count, device="cuda", dtype=torch.int64)
        operands = torch.empty(tokens, hidden, **half), torch.empty(tokens, count, device="cuda"), names
        with compile_only():
            torch.ops.outrider.experts.triton(*operands, *weights, size, gates, outputs, True)
    except Exception as error:  # whatever a compiler raises
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


# -- correctness ---------------------------------------------------------------------------------------------------


def check(kernels, device, end):
    """How many were right and wrong."""
    generator, counts = torch.Generator(device).manual_seed(0), [0, 0]

    def judge(name, work, allowed):
        going(name)
        try:
            off = work()
        except Exception as error:  # the next case may say more
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            off = float("inf")
        counts[off > allowed] += 1
        if off > allowed:
            print(f"WRONG {name}: {off:.2e}", flush=True)

    for (pairs, count), experts, size in itertools.product(LAID_OUT, (8, 60, 128, 256), (16, 32)):
        names = torch.randint(0, experts, (pairs // count, count), device=device, generator=generator)
        names[::2] %= 5

        def differs(names=names, experts=experts, size=size):
            made = in_a_graph(partial(expert_ops.laid_out_pairs, names, experts, size, True), times=2)
            return float(
                any((a != b).any() for a, b in zip(made, expert_ops.sorted_pairs(names, experts, size), strict=True))
            )

        judge(f"{pairs} pairs, {experts} experts, blocks of {size}", differs, 0)
    for (experts, count, _, _), m in itertools.product(SHAPES.values(), TOKENS):
        logits = torch.randn(m, experts, device=device, generator=generator).to(torch.bfloat16)

        def misrouted(logits=logits, count=count):
            weights, names = in_a_graph(partial(kernels.route, logits, count, renormalize=True))
            right, wanted = REFERENCE.route(logits.double(), count, renormalize=True)
            return wrong(weights, right) if torch.equal(names, wanted) else float("inf")

        judge(f"route {experts} experts, {m} tokens", misrouted, ERROR)
    for name, shape in SHAPES.items():
        weights = weights_of(shape, device, generator)
        for m, spread in itertools.product(TOKENS, (0.0, 2.0)):
            if time.monotonic() > end:
                print("LATE: not all cases ran", flush=True)
                return counts
            operands = drawn(shape, m, device, generator, spread)

            def off(operands=operands, weights=weights):
                right = exactly(*operands, *weights)
                own = wrong(REFERENCE.experts(*operands, *weights), right)
                return wrong(in_a_graph(partial(kernels.experts, *operands, *weights), times=3), right) / max(ERROR, 2 * own)

            judge(f"{name}, {m} tokens, spread {spread}", off, 1)
    return counts


def main() -> int:
    begun = time.monotonic()
    end = begun + float(sys.argv[1] if len(sys.argv) > 1 else 115)
    device = torch.device("cuda")
    kernels = TritonKernels(facts_of(torch.cuda.get_device_properties(device)), device=device)
    workers = max(1, min((os.cpu_count() or 2) - 1, 15))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {}
        for shape, m in itertools.product(SHAPES.values(), TOKENS):
            experts, count, hidden, inner = shape
            stack = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device="meta")
            size, gates, outputs = kernels.mixtures.experts_config(m, count, stack)
            jobs[shape, m] = pool.submit(compile_one, shape, m, size, gates.as_list(), outputs.as_list())
        watched()
        print(f"{len(waited(jobs, end))} of {len(jobs)} to check compiled", flush=True)
        right, bad = check(kernels, device, end)
        print(f"CHECKED {right + bad} cases: {bad} WRONG, after {time.monotonic() - begun:.0f} s", flush=True)
        pool.shutdown(wait=False, cancel_futures=True)
    return 0 if right and not bad else 1


if __name__ == "__main__":
    sys.exit(main())
