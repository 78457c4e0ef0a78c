"""A tiny random Llama through vLLM's engine on the simulated device, watched, with its tokens held against transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PROMPTS = ((5, 6, 7, 8, 5, 6, 7), (9, 10, 11), (3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4))
LONG_PROMPTS = tuple(tuple(3 + (first + at * at) % 60 for at in range(length)) for first, length in ((1, 41), (7, 19), (20, 70)))
"""Prompts of several blocks, one of them of two chunks: their blocks are stored while later steps are on their way."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run showed."""

    tokens: list[list[int]]
    right: bool
    """Each request's tokens are those of transformers' greedy decoding."""
    operations: int
    launches: int
    """Kernels that Triton's interpreter ran."""
    nowhere: dict[str, int]
    """Ranges by kernel that lie in no known memory; nobody was told of them."""
    streams: int
    steps: int
    findings: list[str] = field(default_factory=list)
    seconds: float


def checkpoint(folder: Path) -> Path:
    """A random Llama of one layer; the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False,
        )  # fmt: skip
        made: Any = LlamaForCausalLM(config)
        made.float().save_pretrained(folder)
    return folder


def expected(folder: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens of transformers on the host."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder, trust_remote_code=False)
    model = model.float().eval()
    found = []
    with torch.no_grad():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(count):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            found.append(ids[len(prompt) :])
    return found


def run(
    backend: Any, launches: Any, folder: Path, *, tokens: int, asynchronous: bool, speculate: bool, offload: bool,
    before: Callable[[], None] | None = None,
) -> Outcome:  # fmt: skip
    """Decode `PROMPTS` (`LONG_PROMPTS` with `offload`), `tokens` each, under the sanitizer. `before` is called when vLLM is imported and nothing has run."""
    from vllm import LLM, SamplingParams

    from outrider_sanitizer import watch

    more: dict[str, Any] = {}
    if speculate:
        more["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }  # fmt: skip
    if offload:
        from outrider_vllm import offload as connector

        connector.install()
        more["kv_transfer_config"] = {
            "kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
        }  # fmt: skip
    if before is not None:
        before()
    prompts = LONG_PROMPTS if offload else PROMPTS
    started = time.monotonic()
    with watch(backend) as report:
        engine: Any = LLM(
            str(checkpoint(folder)), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256,
            max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks_override=64, kv_cache_memory_bytes=64 << 20,
            async_scheduling=asynchronous, disable_log_stats=True, **more,
        )  # fmt: skip
        counted = _count_steps()
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": list(p)} for p in prompts]
        rounds = 2 if offload else 1  # the second finds its prefixes, on the device or in the host's cache
        for _ in range(rounds):
            results = engine.generate(given, sampling, use_tqdm=False)
            if offload:
                engine.reset_prefix_cache()
        backend.synchronize()
    got = [list(r.outputs[0].token_ids) for r in results]
    return Outcome(
        tokens=got, right=got == expected(folder, prompts, tokens), operations=report.operations,
        launches=sum(launches.counts.values()), nowhere=launches.nowhere, streams=len(backend.streams), steps=counted[0],
        findings=[str(f) for f in report], seconds=time.monotonic() - started,
    )  # fmt: skip


def _count_steps() -> list[int]:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    counted, before = [0], GPUModelRunner.execute_model

    def execute_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return before(runner, *args, **kwargs)

    GPUModelRunner.execute_model = execute_model
    return counted
