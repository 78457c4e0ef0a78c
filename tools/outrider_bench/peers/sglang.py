"""SGLang: dummy weights, an EAGLE draft, and its simulated acceptance length."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

from outrider_bench.child import ChildFailed, answer
from outrider_bench.peers.work import Work, check_lengths, checkpoints, decode_seconds, row

_MEMORY = 0.85


def variables(accept_length: float, speculate: str) -> dict[str, str]:
    """The environment in which it simulates acceptance."""
    if speculate == "none":
        return {}
    return {"SGLANG_SIMULATE_ACC_LEN": f"{accept_length:g}", "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}


def measure(given: Mapping[str, Any]) -> dict[str, object]:
    """Its defaults, attention included. One engine a child: ``speculate`` says which."""
    sglang = import_module("sglang")
    work = Work.of(given)
    speculative = given["speculate"] != "none"
    with checkpoints(work) as (target, draft):
        options: dict[str, object] = {
            "model_path": str(target),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": work.dtype,
            "context_length": work.context,
            "max_running_requests": max(work.batches),
            "mem_fraction_static": _MEMORY,
            "disable_radix_cache": True,
        }
        if speculative:
            options |= {
                "speculative_algorithm": "EAGLE",
                "speculative_draft_model_path": str(draft),
                "speculative_num_steps": work.draft_tokens,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": work.draft_tokens + 1,
            }
        engine = sglang.Engine(**options)
        try:
            rows = [_row(engine, work, batch, speculative) for batch in work.batches]
        finally:
            engine.shutdown()
    how = "simulated acceptance length" if speculative else "no speculation"
    return {"version": version("sglang"), "settings": f"Engine.generate, defaults, {how}", "results": rows}


def _row(engine: Any, work: Work, batch: int, speculative: bool) -> dict[str, object]:
    prompts = work.prompts(batch)
    verified: list[float] = []

    def generate(count: int) -> None:
        params = {"temperature": 0.0, "max_new_tokens": count, "min_new_tokens": count, "ignore_eos": True}
        made = engine.generate(input_ids=prompts, sampling_params=params)
        check_lengths([each["meta_info"]["completion_tokens"] for each in made], count)
        if speculative and count > 1:
            for each in made:
                if not each["meta_info"].get("spec_verify_ct"):
                    raise ChildFailed("this SGLang doesn't say how often it verified (spec_verify_ct is missing)")
                verified.append((count - 1) / each["meta_info"]["spec_verify_ct"])

    seconds = decode_seconds(generate, work.new_tokens)
    accepted = sum(verified) / len(verified) if speculative else None
    return row(work, batch, seconds, accepted=accepted, speculate="eagle" if speculative else "none")


if __name__ == "__main__":
    answer(measure)
