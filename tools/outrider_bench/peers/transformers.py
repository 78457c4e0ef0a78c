"""transformers: plain decoding with its static cache. It has no synthetic acceptance, so it doesn't speculate here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from outrider_bench.child import answer
from outrider_bench.peers.work import Work, check_lengths, checkpoint_config, decode_seconds, row


def measure(given: Mapping[str, Any]) -> dict[str, object]:
    """``generate`` as it comes: it compiles the model's forward pass itself where it does that on such a device."""
    import torch

    from outrider.engine.config import DTYPES
    from outrider_bench.random_weights import shape_config

    transformers = import_module("transformers")
    work = Work.of(given)
    config = transformers.LlamaConfig(**checkpoint_config(shape_config(work.shape), dtype=work.dtype))
    with torch.device(work.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[work.dtype]).eval()
    rows = []
    for batch in work.batches:
        prompts = torch.tensor(work.prompts(batch), device=work.device)

        def generate(count: int, prompts: torch.Tensor = prompts) -> None:
            made = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
                cache_implementation="static",
            )
            check_lengths([len(each) - work.prompt_tokens for each in made.tolist()], count)

        seconds = decode_seconds(generate, work.new_tokens)
        rows.append(row(work, batch, seconds, accepted=None, speculate="none"))
    return {
        "version": transformers.__version__,
        "settings": "generate(), static cache, compiled by itself where it does so on this device; no synthetic acceptance",
        "results": rows,
    }


if __name__ == "__main__":
    answer(measure)
