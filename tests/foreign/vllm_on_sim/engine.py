"""Runs of vLLM's engine on the simulated device: a tiny random Llama, under the sanitizer, compared with transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from foreign.vllm_on_sim.workloads import Workload, split_known_findings


@dataclass(frozen=True, kw_only=True)
class VllmRun:
    """The outcome of one run of vLLM: tokens, counts and findings."""

    tokens: list[list[int]]
    right: bool
    """True if each request's tokens are those of transformers' greedy decoding."""
    operations: int
    launches: int
    """Number of kernels that Triton's interpreter ran."""
    nowhere: dict[str, int]
    """Number of accessed address ranges outside known memory, by kernel. The sanitizer doesn't see these accesses."""
    streams: int
    steps: int
    findings: list[str]
    """Texts of the findings without a page in `docs/findings`."""
    judged: dict[str, int]
    """Number of findings that a page in `docs/findings` explains, by the name of the page."""
    skipped: int
    """Number of times that the reverted ordering was left out."""
    seconds: float


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write a random Llama of one layer to `folder` and return the folder. Equal seeds give equal weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config)
        model.float().save_pretrained(folder)
    return folder


def reference_tokens(folder: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the greedy tokens of transformers on the host, `count` for each prompt."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder, trust_remote_code=False)
    model = model.float().eval()
    outputs = []
    with torch.no_grad():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(count):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            outputs.append(ids[len(prompt) :])
    return outputs


def run_workload(
    backend: Any, launches: Any, folder: Path, work: Workload, *, tokens: int, asynchronous: bool, speculate: bool,
    draft_model: bool = False, revert: Callable[[Any], Callable[[], int]] | None = None,
) -> VllmRun:  # fmt: skip
    """Decode the requests of `work` under the sanitizer and return the outcome of the run.

    Each request gets `tokens` output tokens, unless the workload stops it earlier. `revert` removes an ordering from the
    engine before the first request. It returns a function that counts how often the ordering was left out. `speculate` uses
    a draft model with `draft_model`, else n-grams, which the older runner can't schedule asynchronously.
    """
    from vllm import LLM, SamplingParams
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from outrider_sanitizer import watch

    options = _speculation_options(folder, draft_model) if speculate else {}
    if work.offload:
        from foreign.vllm_on_sim import offload as connector

        connector.install()
        options["kv_transfer_config"] = {
            "kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
        }  # fmt: skip
    if work.zeroing:
        vllm_config: Any = KVCacheConfig
        vllm_config.needs_kv_cache_zeroing = property(lambda config: True)
    write_checkpoint(folder)
    last_round = work.rounds[-1]
    reference = [
        output[: work.stop_after.get(index, tokens)]
        for index, output in enumerate(reference_tokens(folder, last_round, tokens))
    ]  # fmt: skip
    started = time.monotonic()
    with watch(backend) as report:
        engine: Any = LLM(
            str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=work.longest,
            max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks_override=work.blocks, kv_cache_memory_bytes=64 << 20,
            async_scheduling=asynchronous, disable_log_stats=True, **options,
        )  # fmt: skip
        step_count = _count_steps(engine)
        if work.recurrent:
            _add_recurrent_layer_copies(engine)
        count_skipped = revert(engine) if revert is not None else int  # int() is 0
        for prompts in work.rounds:
            stops = work.stop_after if prompts is last_round else {}
            sampling = [
                SamplingParams(
                    temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
                    stop_token_ids=[reference[index][-1]] if index in stops else None,
                )
                for index in range(len(prompts))
            ]  # fmt: skip
            results = engine.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
            if work.offload:
                engine.reset_prefix_cache()
        backend.synchronize()
    outputs = [list(result.outputs[0].token_ids) for result in results]
    findings, judged = split_known_findings(report)
    return VllmRun(
        tokens=outputs, right=outputs == reference, operations=report.operations,
        launches=sum(launches.counts.values()), nowhere=launches.unknown_accesses, streams=len(backend.streams),
        steps=step_count[0], findings=findings, judged=judged, skipped=count_skipped(),
        seconds=time.monotonic() - started,
    )  # fmt: skip


def _speculation_options(folder: Path, draft_model: bool) -> dict[str, Any]:
    """Return vLLM's options for three draft tokens, from a second random Llama or from n-grams."""
    config: dict[str, Any] = {"num_speculative_tokens": 3}
    if draft_model:
        config |= {"method": "draft_model", "model": str(write_checkpoint(folder / "draft", seed=1))}
    else:
        config |= {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return {"speculative_config": config}


def _add_recurrent_layer_copies(engine: Any) -> None:
    """Make the first runner copy the counts of accepted tokens to the host, as it does for recurrent layers.

    The model has no recurrent layers, so the copies of their states are left out.
    """
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
    """Count the calls of the runner's `execute_model`. The only element of the returned list is the count."""
    runner = _runner(engine)
    count, original = [0], runner.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return original(*args, **kwargs)

    runner.execute_model = execute_model
    return count
