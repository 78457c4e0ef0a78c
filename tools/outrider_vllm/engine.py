"""A tiny random Llama through vLLM's engine on the simulated device, watched, with its tokens held against transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from outrider_vllm.judged import judge
from outrider_vllm.workloads import Workload


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
    findings: list[str]
    judged: dict[str, int]
    """Findings that are explained, by the name of their page in `docs/findings`."""
    skipped: int
    """How often the ordering was left out that the run was asked to leave out."""
    seconds: float


def checkpoint(folder: Path, seed: int = 0) -> Path:
    """A random Llama of one layer; the same for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False,
        )  # fmt: skip
        made: Any = LlamaForCausalLM(config)
        made.float().save_pretrained(folder)
    return folder


def expected(folder: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens of transformers on the host, `count` for each prompt."""
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
    backend: Any, launches: Any, folder: Path, work: Workload, *, tokens: int, asynchronous: bool, speculate: bool,
    draft_model: bool = False, revert: Callable[[Any], Callable[[], int]] | None = None,
) -> Outcome:  # fmt: skip
    """Decode the requests of `work`, `tokens` each, under the sanitizer. `revert` is given the engine before its first
    request and takes an ordering out; the result says how often it was left out. With `draft_model` speculation is with a
    draft model, else with n-grams, which the older runner can't schedule asynchronously.
    """
    from vllm import LLM, SamplingParams
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from outrider_sanitizer import watch

    more: dict[str, Any] = {}
    if speculate and draft_model:
        draft = str(checkpoint(folder / "draft", seed=1))
        more["speculative_config"] = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    elif speculate:
        more["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }  # fmt: skip
    if work.offload:
        from outrider_vllm import offload as connector

        connector.install()
        more["kv_transfer_config"] = {
            "kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
        }  # fmt: skip
    if work.zeroing:
        vendor: Any = KVCacheConfig
        vendor.needs_kv_cache_zeroing = property(lambda config: True)
    checkpoint(folder)
    last = work.rounds[-1]
    known = expected(folder, last, tokens)
    known = [found[: work.stop_after.get(at, tokens)] for at, found in enumerate(known)]
    started = time.monotonic()
    with watch(backend) as report:
        engine: Any = LLM(
            str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=work.longest,
            max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks_override=work.blocks, kv_cache_memory_bytes=64 << 20,
            async_scheduling=asynchronous, disable_log_stats=True, **more,
        )  # fmt: skip
        counted = _count_steps(engine)
        if work.recurrent:
            _tell_of_recurrent_layers(engine)
        skipped = revert(engine) if revert is not None else int  # int() is 0
        for prompts in work.rounds:
            stops = work.stop_after if prompts is last else {}
            sampling = [
                SamplingParams(
                    temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
                    stop_token_ids=[known[at][-1]] if at in stops else None,
                )
                for at in range(len(prompts))
            ]  # fmt: skip
            results = engine.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
            if work.offload:
                engine.reset_prefix_cache()
        backend.synchronize()
    got = [list(r.outputs[0].token_ids) for r in results]
    findings, judged = judge(report)
    return Outcome(
        tokens=got, right=got == known, operations=report.operations, launches=sum(launches.counts.values()),
        nowhere=launches.nowhere, streams=len(backend.streams), steps=counted[0], findings=findings, judged=judged,
        skipped=skipped(), seconds=time.monotonic() - started,
    )  # fmt: skip


def _tell_of_recurrent_layers(engine: Any) -> None:
    """What the first runner does for such layers, without their states: counts of accepted tokens go to the host."""
    from vllm.config import ModelConfig
    from vllm.v1.worker import mamba_utils

    def after_step(*, num_reqs: int, num_accepted_tokens_gpu: Any, num_accepted_tokens_cpu_tensor: Any, **_: Any) -> None:
        num_accepted_tokens_cpu_tensor[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs], non_blocking=True)

    module: Any = mamba_utils
    module.postprocess_mamba_align_gpu = after_step
    module.preprocess_mamba = lambda *args, **kwargs: None
    config: Any = ModelConfig
    config.is_hybrid = property(lambda config: True)
    runner = _runner(engine)
    runner._mamba_bufs = SimpleNamespace(preprocess=None, postprocess_align=None)
    runner._mamba_state_copy_funcs = {}
    runner.cache_config.mamba_cache_mode = "align"


def _runner(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def _count_steps(engine: Any) -> list[int]:
    runner = _runner(engine)
    counted, before = [0], runner.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return before(*args, **kwargs)

    runner.execute_model = execute_model
    return counted
