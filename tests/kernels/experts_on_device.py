"""Mixtures of experts on a real device: ``python tests/kernels/experts_on_device.py [SECONDS] [FILE]``.

First each case against the products in float64, in a graph, and how pairs are laid out against torch's sort: a line for each
that is WRONG, and a count. Then microseconds of one layer's experts in Qwen3-30B-A3B's shape, weights out of memory, experts
drawn uniformly: gates and outputs in several cuts with each block of tokens, then the best of either together, then what
else differs (torch's sort; experts of which some are likelier). The last lines are a table, fastest first, beside the time
that the bytes of the experts in use take. FILE gets all rows as JSON.

Cuts are compiled beforehand in processes of their own; one that can't be, or that fails, is a line. Nothing new for 30
seconds: a line says where, and the exit code is 3. It is 1 where something is wrong or nothing ran.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
from on_device import going, in_a_graph, microseconds, waited, watched, wrong

from outrider.device import KernelSet
from outrider_triton.experts import operators as expert_ops
from outrider_triton.experts.jit import products as jit
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
TOKENS = (1, 4, 32, 65, 128, 200, 512)
ERROR = 6e-3
"""Relative to the largest number of the row: a rounding of bfloat16 is 4e-3, and the products in float64 round nothing."""
BLOCKS = {128: (16, 32, 8), 32: (0, 16, 8), 256: (32, 16, 64), 64: (0, 16), 4: (0, 16)}
"""Tokens that are timed, and blocks of tokens: 0 where nothing is sorted. What decides first."""
SWEPT = (128, 32, 256, 4)
GATES = [
    *((64, 128, 4, 3), (64, 128, 4, 2), (64, 128, 4, 4), (64, 128, 8, 3), (64, 64, 4, 4), (64, 64, 4, 6), (64, 256, 4, 2)),
    *((64, 256, 8, 2), (32, 128, 4, 2), (32, 128, 4, 3), (32, 128, 4, 5), (32, 256, 4, 2), (32, 256, 4, 3), (128, 64, 4, 2)),
    *((128, 64, 8, 3), (16, 256, 4, 3)),
]
"""Rows of the gate, columns, warps, stages."""
OUTPUTS = [
    *((64, 128, 4, 3), (64, 128, 4, 2), (64, 128, 4, 4), (64, 128, 4, 6), (64, 64, 4, 4), (64, 64, 4, 8), (64, 256, 4, 2)),
    *((64, 256, 4, 3), (64, 256, 8, 3), (32, 128, 4, 3), (32, 256, 4, 2), (32, 256, 4, 3), (128, 64, 4, 3), (128, 128, 4, 2)),
    *((128, 128, 4, 3), (128, 128, 8, 3)),
]
LAID_OUT = ((8, 8), (130, 2), (1024, 8), (4096, 8), (9000, 4))
"""Pairs, and experts of a token."""
REFERENCE = KernelSet()


def made_of(cut, tokens):
    """A configuration as the operator takes it."""
    block_n, block_k, warps, stages = cut
    return [tokens, block_n, block_k, 1, warps, stages, 0, 0, 0]


def cuts(size, tokens):
    """Rows of a block of tokens, and what is tried for it: gates and outputs."""
    rows = size or max(16, tokens)
    return [made_of(cut, rows) for cut in GATES], [made_of(cut, rows) for cut in OUTPUTS]


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


def product(operands, weights, size, gates, outputs):
    return torch.ops.outrider.experts.triton(*operands, *weights, size, gates, outputs, True)


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
            product(operands, weights, size, gates, outputs)
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


# -- times ---------------------------------------------------------------------------------------------------------


class Timing:
    """Two layers of Qwen3-30B-A3B (2.4 GB), and tokens for several numbers of them."""

    def __init__(self, device, compiled, end):
        self.compiled, self.end, self.rows, self.bad = compiled, end, [], 0
        generator = torch.Generator(device).manual_seed(1)
        self.layers = [weights_of(QWEN, device, generator) for _ in range(2)]
        self.drawn = {
            (m, spread): [drawn(QWEN, m, device, generator, spread) for _ in range(4)]
            for m in BLOCKS
            for spread in (0.0, 1.5)
        }
        self.right = {key: exactly(*found[0], *self.layers[0]) for key, found in self.drawn.items()}
        self.expert = sum(each.nbytes for each in self.layers[0]) // QWEN[0]
        wide = self.layers[0][0].view(torch.int64)
        going("the rate of reading")
        us = min(microseconds(lambda number: self.layers[number % 2][0].view(torch.int64).sum(), calls=4) for _ in range(2))
        self.rate = wide.nbytes / us / 1e3
        """Gigabytes a second."""

    def used(self, m, spread):
        """Experts that some token goes to, on average."""
        return sum(names.unique().numel() for _, _, names in self.drawn[m, spread]) / 4

    def limit(self, m, spread=0.0):
        return self.used(m, spread) * self.expert / self.rate / 1e3

    def time(self, m, size, gates, outputs, what="", spread=0.0, *, checked=True):
        """A row; None where there is no time left, or it isn't compiled, or fails."""
        if (
            time.monotonic() > self.end
            or not {("gates", size, tuple(gates[:6])), ("outputs", size, tuple(outputs[:6]))} <= self.compiled
        ):
            return None
        going(f"{m} tokens, {size}, {gates}, {outputs}, {what}")
        operands = self.drawn[m, spread]
        try:
            if checked:
                off = wrong(product(operands[0], self.layers[0], size, gates, outputs), self.right[m, spread])
                if not off < 2.5 * ERROR:
                    print(f"WRONG {m} tokens, {size}, {gates}, {outputs}, {what}: {off:.2e}", flush=True)
                    self.bad += 1
            us = microseconds(
                lambda number: product(operands[number % 4], self.layers[number % 2], size, gates, outputs), calls=8
            )
        except Exception as error:  # the next one may run
            print(f"FAILED {m} tokens, {size}, {gates}, {outputs}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            return None
        row = {
            "tokens": m,
            "size": size,
            "gates": gates[1:6],
            "outputs": outputs[1:6],
            "what": what,
            "spread": spread,
            "us": us,
        }
        self.rows.append(row)
        return us


@contextmanager
def instead(name, value):
    """While it lasts, a part of the operator is another."""
    before = getattr(expert_ops, name)
    setattr(expert_ops, name, value)
    try:
        yield
    finally:
        setattr(expert_ops, name, before)


def torchs(chosen, experts, size, pdl):
    """Instead of our kernel, for all that it lays out."""
    return expert_ops.sorted_pairs(chosen, experts, size)


def swept(timing, kernels, m):
    """Fastest pairs of cuts of each block of tokens, as (us, gates, outputs)."""
    found = {}
    stack = timing.layers[0][0]
    derived = kernels.mixtures.experts_config(m, QWEN[1], stack)
    for size in BLOCKS[m]:
        gates, outputs = cuts(size, m)
        own = [each.as_list() for each in derived[1:]] if derived[0] == size else [gates[0], outputs[0]]
        timing.time(m, size, *own, "derived" if derived[0] == size else "first")
        if m not in SWEPT:
            continue
        first = [(timing.time(m, size, each, own[1], "gates"), each) for each in gates]
        second = [(timing.time(m, size, own[0], each, "outputs"), each) for each in outputs]
        best = [
            [each for _, each in sorted((row for row in rows if row[0]), key=lambda row: row[0])[:2]]
            for rows in (first, second)
        ]
        both = [(timing.time(m, size, *each, "both"), *each) for each in itertools.product(*best)]
        found[size] = sorted((row for row in both if row[0]), key=lambda row: row[0])
    return found


def varied(timing, m, size, gates, outputs):
    """What else differs, for one pair of cuts."""
    run = partial(timing.time, m, size)
    if size:
        with instead("laid_out_pairs", torchs):
            run(gates, outputs, "torch's sort")
    real = expert_ops.launch
    rest = jit.expert_outputs, jit.add_experts

    def fewer(kernel, *arguments, **settings):
        if not any(kernel is each for each in rest):
            real(kernel, *arguments, **settings)

    with instead("launch", fewer):
        run(gates, outputs, "gates alone", checked=False)


def before(timing, m):
    """Nearly as it was: torch's sort, blocks of 16."""
    with instead("laid_out_pairs", torchs):
        timing.time(m, 16, made_of((64, 128, 4, 2), 16), made_of((64, 128, 4, 3), 16), "as before")


def jobs_of(kernels):
    """What is to be compiled, as :func:`compile_one` takes it: what is checked, and what is timed."""
    checked, timed = {}, {}
    for shape, m in itertools.product(SHAPES.values(), TOKENS):
        experts, count, hidden, inner = shape
        stack = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device="meta")
        size, gates, outputs = kernels.mixtures.experts_config(m, count, stack)
        checked[shape, m] = shape, m, size, gates.as_list(), outputs.as_list()
    stack = torch.empty(QWEN[0], 2 * QWEN[3], QWEN[2], dtype=torch.bfloat16, device="meta")
    for m, sizes in BLOCKS.items():
        own, *derived = kernels.mixtures.experts_config(m, QWEN[1], stack)
        tried = [(own, *([each.as_list()] for each in derived))]
        tried += [(size, *cuts(size, m)) for size in sizes if m in SWEPT or size]
        for size, gates, outputs in tried:
            for pair in zip(gates, outputs, strict=True):
                timed.setdefault((size, *(tuple(each[:6]) for each in pair)), (QWEN, m, size, *pair))
    return checked, timed


def main() -> int:
    begun = time.monotonic()
    seconds = float(sys.argv[1] if len(sys.argv) > 1 else 115)
    device = torch.device("cuda")
    facts = facts_of(torch.cuda.get_device_properties(device))
    kernels = TritonKernels(facts, device=device)
    checked, timed = jobs_of(kernels)
    compiled = set()
    workers = max(1, min((os.cpu_count() or 2) - 1, 15))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        first, second = ({job: pool.submit(compile_one, *given) for job, given in jobs.items()} for jobs in (checked, timed))
        watched()
        print(f"{len(waited(first, begun + 0.4 * seconds))} of {len(first)} to check compiled", flush=True)
        right, bad = check(kernels, device, begun + 0.5 * seconds)
        print(f"CHECKED {right + bad} cases: {bad} WRONG, after {time.monotonic() - begun:.0f} s", flush=True)
        for size, gates, outputs in waited(second, begun + 0.65 * seconds):
            compiled |= {("gates", size, gates), ("outputs", size, outputs)}
        print(f"of {len(second)} pairs of cuts all compiled after {time.monotonic() - begun:.0f} s", flush=True)
        pool.shutdown(wait=False, cancel_futures=True)
    timing = Timing(device, compiled, begun + seconds)
    pairs = {m: timing.drawn[m, 0.0][0][2] for m in BLOCKS}
    sorting = {}
    for m, (name, lay) in itertools.product((64, 128, 256), (("ours", expert_ops.laid_out_pairs), ("torch's", torchs))):
        going(f"sorting {m} tokens")
        us = microseconds(lambda _, lay=lay, m=m: lay(pairs[m], QWEN[0], 16, True), calls=40)
        sorting[f"{m} tokens, {name}"] = round(us, 2)
    for m in BLOCKS:
        if m in (128, 256):
            before(timing, m)
        found = swept(timing, kernels, m)
        for size, best in found.items():
            if not best:
                continue
            if best[0] is min((rows[0] for rows in found.values() if rows), key=lambda row: row[0]):
                varied(timing, m, size, *best[0][1:])
            timing.time(m, size, *best[0][1:], "spread", 1.5)
    table(timing, sorting, kernels)
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w", encoding="utf-8") as file:
            said = {
                "device": torch.cuda.get_device_name(device),
                "rate": timing.rate,
                "sorting": sorting,
                "wrong": bad + timing.bad,
            }
            json.dump({**said, "limits": {m: timing.limit(m) for m in BLOCKS}, "rows": timing.rows}, file)
    return 0 if right and timing.rows and not bad and not timing.bad else 1


def table(timing, sorting, kernels):
    """Cuts are rows of the weight, columns, 1, warps, stages. What decides comes last."""
    print(f"{kernels.facts.name}, {timing.rate:.0f} GB/s read; sorting alone, us: {sorting}")
    for m in reversed(BLOCKS):
        print(f"-- {m} tokens, {timing.used(m, 0.0):.0f} experts: {timing.limit(m):.1f} us at that rate; gates, outputs")
        rows = sorted((row for row in timing.rows if row["tokens"] == m), key=lambda row: row["us"])
        tried = [row for row in rows if row["what"] in ("gates", "outputs", "both")]
        shown = [row for row in rows if row not in tried]
        for size in BLOCKS[m]:
            of_size = [row for row in tried if row["size"] == size]
            shown += of_size[:4] + [row for row in of_size[4:] if row["what"] != "both"][:1]
        for row in sorted(shown, key=lambda row: (row["spread"], row["us"])):
            end = ""
            if row["spread"]:
                end = f" ({timing.used(m, row['spread']):.0f} experts, {timing.limit(m, row['spread']):.1f} us)"
            print(f"{row['us']:7.1f} us, blocks of {row['size']:2}, {row['gates']}, {row['outputs']}, {row['what']}{end}")
    print(f"{timing.bad} WRONG among what was timed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
