"""One start of an engine, timed from the outside of its process to the first token (``outrider bench startup``)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outrider_bench.child import answer

_PROMPT_TOKENS = 32


def start(work: Mapping[str, Any]) -> dict[str, object]:
    """Seconds of each stage, in order, and what was compiled and captured.

    *import*: from the process's start until torch and the engine's modules are there. *load*: the weights are on the device.
    *allocate*: caches, buffers, streams. *first token*: from a request's arrival to its first token.
    """
    import outrider.engine.engine  # noqa: F401  (what is timed)

    imported = time.time()
    from outrider.cli.models import Running, Sizes, bundled
    from outrider.cli.starting import chosen
    from outrider.engine.config import Choice, EngineConfig
    from outrider.engine.engine import Engine
    from outrider.engine.loading import load_checkpoint
    from outrider.engine.requests.request import SamplingParams
    from outrider.engine.resolve import resolve
    from outrider.engine.situation import situation_of
    from outrider.registry import Registry
    from outrider.speculative.proposer import PlainProposer
    from outrider_bench.random_model import RandomModel

    running = Running(**work["running"])
    dtype, sizes = work["dtype"], Sizes(max_requests=work["batch"], max_context=work["max_context"], **work["sizes"])
    device = Registry().create(work["backend"])
    device.synchronize()
    opened = time.time()
    tokenizer = None
    if work["shape"] is not None:
        random = RandomModel(
            shape=work["shape"], speculate=work["speculate"], draft_tokens=work["draft_tokens"], accept_length=None
        )
        own: tuple[Choice, ...] = ()
        if dtype is None:
            own = (random.dtype(device),)
            dtype = str(own[0].value)
        asked = random.config(
            running=running,
            max_requests=work["batch"],
            dtype=dtype,
            max_context=work["max_context"],
            sizes=sizes,
        )
        model, proposer = random.make(device, asked.torch_dtype)
        config = resolve(asked, situation_of(device, model, proposer or PlainProposer()), own)
    else:
        asked = EngineConfig(dtype=dtype, draft_tokens=work["draft_tokens"], **asdict(running), **sizes.given)
        draft = bundled("eagle") if work["speculate"] == "eagle" else None
        loaded = load_checkpoint(bundled("target"), device, asked, draft_dir=draft, speculate=work["speculate"])
        model, proposer, tokenizer, config = loaded.model, loaded.proposer, loaded.tokenizer, loaded.config
    device.synchronize()
    loaded_at = time.time()
    engine = Engine(model, device, proposer=proposer, config=config, tokenizer=tokenizer)
    device.synchronize()
    made = time.time()
    engine.add_request([1] * min(_PROMPT_TOKENS, engine.max_context - 2), SamplingParams(max_tokens=2, ignore_eos=True))
    while not any(output.tokens for output in engine.step()):
        pass
    first = time.time()
    compiled = engine.warm_up.seconds if engine.warm_up is not None else 0.0
    captured = engine.captured.seconds if engine.captured is not None else 0.0
    stages = {
        "import": imported - work["started"],
        "open the device": opened - imported,
        "load": loaded_at - opened,
        "allocate": made - loaded_at - compiled - captured,
        "compile kernels": compiled,
        "capture graphs": captured,
        "first token": first - made,
    }
    return {
        "dtype": config.dtype,
        "chosen": chosen(engine),
        "stages": stages,
        "total": first - work["started"],
        "compiled": dict(engine.warm_up.compiled) if engine.warm_up is not None else None,
        "captured": str(engine.captured) if engine.captured is not None else None,
        "versions": dict(device.versions()),
        "device": str(device.device),
    }


if __name__ == "__main__":
    answer(start)
