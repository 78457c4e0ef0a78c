"""Guided requests on a device: ``python tests/engine/guided_on_device.py BACKEND``. Prints figures; exit code 1 where wrong.

The mask kernel against its reference, tokens of guided requests beside others against plain loops, and what an iteration
takes. It needs no library that compiles grammars: the guide is a stand-in over token ids.
"""

import argparse
import sys
import time

import torch

from outrider import Engine, EngineConfig, SamplingParams, get_backend
from outrider.bundled import bundled
from outrider.device import KernelSet
from outrider.engine import Regex
from outrider_proof.decode_program import ResidueGrammars


def kernel(backend):
    """Milliseconds of the mask over 32 requests of 5 nodes and 151,936 tokens, by the backend's kernels and the reference."""
    device, kernels = backend.device, backend.kernels_in_use
    print(f"kernels: {kernels.name}")
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((32, 5, 151_936), (1, 1, 2048), (3, 4, 70)):
            logits = torch.randn(shape, device=device).to(dtype)
            bitmask = torch.randint(-(2**31), 2**31, (*shape[:2], -(-shape[2] // 32)), device=device).to(torch.int32)
            ours, wanted = kernels.apply_token_bitmask(logits, bitmask), KernelSet().apply_token_bitmask(logits, bitmask)
            assert torch.equal(ours, wanted), (dtype, shape)
            took = []
            for each in (kernels, KernelSet()):
                backend.synchronize()
                began = time.perf_counter()
                for _ in range(50):
                    each.apply_token_bitmask(logits, bitmask)
                backend.synchronize()
                took.append((time.perf_counter() - began) / 50 * 1e3)
            print(f"  {dtype}, {shape}: {took[0]:.4f} ms, the reference {took[1]:.4f} ms")


def served(engine, prompts, guided, tokens):
    """The outputs, and seconds an iteration; those requests whose index is in ``guided`` are guided."""
    ResidueGrammars.into(engine)
    guides = [Regex("residues") if index in guided else None for index in range(len(prompts))]
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, guide=guide) for guide in guides]
    ids = [engine.add_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    found = {request: [] for request in ids}
    before, began = engine.stats.iterations, time.perf_counter()
    while engine.has_unfinished:
        for output in engine.step():
            found[output.request_id] += output.tokens
    seconds = time.perf_counter() - began
    return [tuple(found[request]) for request in ids], seconds / (engine.stats.iterations - before)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    backend = get_backend(options.backend)
    stream = backend.create_stream("kernel")
    with backend.on(stream):
        kernel(backend)
    config = EngineConfig(max_requests=8, max_context=256, dtype="float32")
    reference = Engine.from_checkpoint(bundled("target"), get_backend("cpu"), config=config)
    plain = Engine.from_checkpoint(bundled("target"), backend, config=config)
    prompts = [plain.tokenizer.encode(text) for text in ("def main(", "class Box:\n", "import os\n", "for i in range(")]
    expected, _ = served(reference, prompts, (0, 1, 2, 3), 16)
    free, _ = served(plain, prompts, (), options.tokens)
    right = True
    for mode, topk in (("fused", 1), ("staged", 1), ("fused", 3)):
        config = EngineConfig(
            max_requests=8, max_context=256, dtype="float32", mode=mode, graphs=mode == "staged", draft_topk=topk
        )
        engine = Engine.from_checkpoint(
            bundled("target"), backend, speculate="eagle", draft_dir=bundled("eagle"), config=config
        )
        for guided in ((), (0, 2), (0, 1, 2, 3)):
            served(engine, prompts, guided, options.tokens)
            outputs, seconds = served(engine, prompts, guided, options.tokens)
            same = all(
                output[: len(expected[index])] == expected[index] if index in guided else output == free[index]
                for index, output in enumerate(outputs)
            )
            right &= same
            print(f"{mode}, topk {topk}, {len(guided)} of 4 guided: {seconds * 1e3:.2f} ms an iteration, right: {same}")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
