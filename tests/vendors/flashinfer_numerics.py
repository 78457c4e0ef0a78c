"""Planned attention against the reference in float64, over batches that an engine has, and an engine's tokens.

For a device with FlashInfer, and for the stand-in.
"""

from dataclasses import dataclass, replace

import torch

from outrider import Engine, SamplingParams
from outrider.device import AttentionMetadata, AttentionShape, HostParam, KernelSet
from outrider.model.config.shapes import shape_config
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.lookup import NgramProposer
from outrider.speculative.tree import DynamicTree
from outrider_bench.random_weights import random_decoder, random_eagle
from outrider_proof.tiny import plain_config

PAGE, PAGES = 16, 40


@dataclass(frozen=True)
class Case:
    """``new`` tokens of each request behind ``context`` cached ones; ``tree``: one sees every second one before it."""

    name: str
    new: tuple[int, ...]
    context: tuple[int, ...]
    tree: bool = False
    window: int = 0


CASES = [
    Case("decoding", (1,) * 5, (0, 15, 16, 17, 600)),
    Case("one request", (1,), (511,)),
    Case("verifying", (4,) * 8, (5, 12, 13, 28, 100, 300, 511, 636)),
    Case("verifying one", (4,), (637 - 1,)),
    Case("many", (4,) * 32, tuple(20 * i for i in range(32))),
    Case("trees", (9,) * 3, (3, 200, 630), tree=True),
    Case("a tree", (33,), (100,), tree=True),
    Case("chunks of prompts", (70, 1, 256, 16), (0, 9, 300, 64)),
    Case("in a window", (4,) * 3, (3, 200, 630), window=64),
]


def check(backend, case, *, heads=8, kv_heads=2, size=128, dtype=torch.bfloat16, tolerance=2e-2):
    """Two batches of the case's sizes by one plan: with other lengths first, then with the case's own."""
    (stream,) = (backend.create_stream("numerics"),)
    batch, tokens, scale = len(case.new), sum(case.new), size**-0.5
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(tokens, heads + 3, size, generator=draw).to(dtype)[:, :heads]  # as it's cut out of a product
    caches = [torch.randn(1 + batch * PAGES, PAGE, kv_heads, size, generator=draw).to(dtype) for _ in range(2)]
    table = (torch.randperm(batch * PAGES, generator=draw) + 1).view(batch, PAGES).to(torch.int32)
    starts = tuple(sum(case.new[:i]) for i in range(batch + 1))
    mask = None
    if case.tree:
        lane = torch.arange(case.new[0])
        mask = ((lane[:, None] >= lane) & ((lane[:, None] - lane) % 2 == 0)).repeat(batch, 1)
    uniform = len(set(case.new)) == 1

    def metadata(lens, on):
        return AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32).to(on),
            seq_lens=torch.tensor(lens, dtype=torch.int32).to(on),
            block_table=table.to(on),
            max_query=max(case.new),
            max_kv=PAGE * PAGES,
            tree_mask=None if mask is None else mask.to(on),
            uniform=uniform,
        )

    shape = AttentionShape(
        heads=heads, kv_heads=kv_heads, head_size=size, page_size=PAGE, dtype=dtype, scale=scale, window=case.window
    )
    device, kernels = backend.device, backend.kernels_in_use
    with backend.on(stream):
        on_device = [q.to(device), *(cache.to(device) for cache in caches)]
    plan, worst = None, 0.0
    for shift in (7, 0):
        lens = tuple(min(new + before + shift, PAGE * PAGES) for new, before in zip(case.new, case.context, strict=True))
        # What lies behind a sequence is somebody else's, NaN included.
        host = [cache.clone() for cache in caches]
        for cache in host:
            behind = torch.arange(PAGES * PAGE) >= torch.tensor(lens).unsqueeze(1)
            cache[table.long()] = cache[table.long()].masked_fill(behind.view(batch, PAGES, PAGE, 1, 1), torch.nan)
            cache[0] = torch.nan
        with backend.on(stream):
            for target, cache in zip(on_device[1:], host, strict=True):
                target.copy_(cache)
            told = metadata(lens, device)
            asked = replace(told, shapes=(shape,), plan=plan, seq_lens_host=HostParam("lens", lens), host_query_start=starts)
            planned = kernels.plan_attention(asked, stream=stream)
            plan = planned.plan
            out = kernels.paged_attention(*on_device, planned, scale=scale, window=case.window)
        stream.synchronize()
        exact = [operand.double() for operand in (q, *host)]
        wanted = KernelSet().paged_attention(*exact, metadata(lens, "cpu"), scale=scale, window=case.window)
        off = (out.cpu().double() - wanted).abs()
        assert off.isfinite().all(), f"{case.name}: NaN or infinity"
        worst = max(worst, float(off.max()))
    assert plan is not None, f"{case.name}: nothing was planned"
    assert worst <= tolerance, f"{case.name}: off by {worst:.3g}"
    return worst


# -- tokens --------------------------------------------------------------------------------------------------------

NEAR_TIE = 0.1
"""Of log-probabilities: bfloat16 has steps of 1/64 between 2 and 4."""
VOCABULARY = 1024
PROPOSERS = {
    "eagle": lambda model, backend: EagleProposer(random_eagle(model, backend=backend), draft_tokens=3),
    "tree": lambda model, backend: EagleTreeProposer(random_eagle(model, backend=backend), DynamicTree(topk=3, depth=3)),
    "ngram": lambda model, backend: NgramProposer(vocab_size=VOCABULARY, draft_tokens=3),
    "none": lambda model, backend: None,
}
CONFIGS = {"called": {}, "graphs": {"graphs": True, "overlap": True}}


def random_model(backend, dtype=torch.bfloat16, size=128):
    """Random weights with heads that FlashInfer takes: those of the bundled model are of size 32."""
    shape = shape_config("tiny")
    config = replace(shape, hidden_size=4 * size, num_heads=4, num_kv_heads=2, head_size=size, vocab_size=VOCABULARY)
    return random_decoder(config, backend=backend, dtype=dtype)


def generate(backend, model, proposer, *, new_tokens, logprobs=None, **config):
    """Six prompts of different lengths, four at a time."""
    dtype = {torch.bfloat16: "bfloat16", torch.float32: "float32"}[model.dtype]
    kept = plain_config(dtype=dtype, max_requests=4, max_context=256, draft_tokens=3, **config)
    engine = Engine(model, backend, proposer=proposer, config=kept)
    prompts = [[(97 * i + 31 * j) % VOCABULARY for j in range(5 + 20 * i)] for i in range(6)]
    done = engine.generate(prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=logprobs))
    assert any(plan is not None for plan in engine._parts.attention._plans.values()), "nothing was planned"
    return done


def check_tokens(backend, model, plain, speculate, config, *, new_tokens):
    """How many prompts get other tokens than from plain decoding; each must do so first at a near-tie, since products and
    attention of four tokens are rounded otherwise than those of one.
    """
    proposer = PROPOSERS[speculate](model, backend)
    found = generate(backend, model, proposer, new_tokens=new_tokens, **CONFIGS[config])
    differ = 0
    for right, made in zip(plain, found, strict=True):
        pairs = zip(right.token_ids, made.token_ids, strict=True)
        first = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        if first is not None:
            differ += 1
            (_, best), (_, second) = right.logprobs[first].top[:2]
            assert best - second < NEAR_TIE, f"{speculate}, {config}: token {first} is none: {right.logprobs[first]}"
    return differ
