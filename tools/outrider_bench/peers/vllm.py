"""vLLM: dummy weights, an EAGLE draft, and its own synthetic rejection sampling."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

from outrider_bench.child import ChildFailed, answer
from outrider_bench.peers.work import Work, check_lengths, checkpoints, decode_seconds, row

_COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
_MEMORY = 0.85


def measure(given: Mapping[str, Any]) -> dict[str, object]:
    """Its defaults: compiled, in its graphs. One engine a child: ``speculate`` says which."""
    vllm = import_module("vllm")
    work = Work.of(given)
    speculative = given["speculate"] != "none"
    with checkpoints(work) as (target, draft):
        options: dict[str, object] = {
            "model": str(target),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": work.dtype,
            "max_model_len": work.context,
            "max_num_seqs": max(work.batches),
            "gpu_memory_utilization": _MEMORY,
            "enable_prefix_caching": False,
        }
        if speculative:
            options["disable_log_stats"] = False  # they say what was accepted
            options["speculative_config"] = {
                "method": "eagle",
                "model": str(draft),
                "num_speculative_tokens": work.draft_tokens,
                "rejection_sample_method": "synthetic",
                **_acceptance(work),
            }
        engine = vllm.LLM(**options)
        rows = [_row(vllm, engine, work, batch, speculative) for batch in work.batches]
    how = "synthetic rejection sampling" if speculative else "no speculation"
    return {"version": version("vllm"), "settings": f"LLM.generate, defaults, {how}", "results": rows}


def _acceptance(work: Work) -> dict[str, object]:
    """The acceptance by length, under the name that this version has for it."""
    known = getattr(import_module("vllm.config").SpeculativeConfig, "__dataclass_fields__", {})
    if "synthetic_acceptance_length" in known:
        return {"synthetic_acceptance_length": work.accept_length}
    if "synthetic_acceptance_rates" in known:
        drafts = work.accept_length - 1
        rates = [max(0.0, min(1.0, drafts - number)) for number in range(work.draft_tokens)]
        return {"synthetic_acceptance_rates": rates}
    raise ChildFailed("this vLLM has no synthetic acceptance of a given length: with random weights it would accept nothing")


def _row(vllm: Any, engine: Any, work: Work, batch: int, speculative: bool) -> dict[str, object]:
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts(batch)]

    def generate(count: int) -> None:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        made = engine.generate(prompts, params, use_tqdm=False)
        check_lengths([len(each.outputs[0].token_ids) for each in made], count)

    before = _counted(engine) if speculative else None
    seconds = decode_seconds(generate, work.new_tokens)
    accepted = None
    if before is not None:
        drafts, passed = (after - earlier for after, earlier in zip(_counted(engine), before, strict=True))
        accepted = 1 + passed / drafts
    return row(work, batch, seconds, accepted=accepted, speculate="eagle" if speculative else "none")


def _counted(engine: Any) -> tuple[float, float]:
    """Drafts verified so far, and drafted tokens that passed. Raises :class:`ChildFailed` where it doesn't say."""
    values = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    found = [values.get(name) for name in _COUNTERS]
    if any(value is None for value in found):
        raise ChildFailed(f"this vLLM doesn't say how much it accepted ({', '.join(_COUNTERS)} are missing)")
    return float(found[0] or 0), float(found[1] or 0)


if __name__ == "__main__":
    answer(measure)
