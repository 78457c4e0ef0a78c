"""One start of an engine, timed from the start of its process to the first token; ``outrider bench startup`` runs it.

The module imports little, so that the import of the engine is timed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.device.stream import uncollected

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

_PROMPT_TOKENS = 32
_MAX_SERVED_TOKENS = 24


@uncollected()  # as in a command that loads an engine
def time_start(work: Mapping[str, Any]) -> dict[str, object]:
    """Return the seconds of each stage in order, and the compiled kernels and captured graphs.

    *import* lasts from the start of the process until torch and the engine's modules are imported, *load* until the weights
    are on the device. *allocate* makes caches, buffers and streams. *first token* lasts from the arrival of a request to its
    first token.
    """
    import outrider.engine.engine  # noqa: F401  (what is timed)

    imported = time.time()
    from outrider.bundled import bundled
    from outrider.cli.options.models import chosen
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.engine.setup.loading import LoadingArguments, load_checkpoint
    from outrider.registry import Registry

    device = Registry().create(work["backend"])
    device.kernels_in_use.use_tuned(Path(work["tuned"]))
    device.synchronize()
    opened = time.time()
    asked = EngineConfig(dtype=work["dtype"], draft_tokens=work["draft_tokens"], **work["settings"])
    model_dir, draft_dir = (bundled(each) if work[each] is None else Path(work[each]) for each in ("target", "eagle"))
    draft = draft_dir if work["speculate"] == "eagle" else None
    loading = LoadingArguments(config=asked, draft_dir=draft, speculate=work["speculate"])
    loaded = load_checkpoint(model_dir, device, loading)
    config = loaded.config
    device.synchronize()
    loaded_at = time.time()
    engine = Engine(loaded.model, device, proposer=loaded.proposer, config=config, tokenizer=loaded.tokenizer)
    device.synchronize()
    made = time.time()
    known = sum(engine.model.kernels.compiled().values())
    _add_requests(engine, 1, _PROMPT_TOKENS, 2)
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
        "compiled_while_serving": _serve_requests(engine) - known,
        "compiled": dict(engine.warm_up.compiled) if engine.warm_up is not None else None,
        "captured": str(engine.captured) if engine.captured is not None else None,
        "versions": dict(device.versions()),
        "device": str(device.device),
    }


def _add_requests(engine: Engine, requests: int, prompt: int, tokens: int) -> None:
    from outrider.engine.requests.sampling import SamplingParams

    for number in range(requests):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=float(number % 2))
        engine.add_request([1 + number] * max(1, min(prompt, engine.max_context - tokens)), params)


def _serve_requests(engine: Engine) -> int:
    """Serve greedy and sampled requests of several lengths; return the number of kernel variants compiled so far."""
    for prompt in (1, 40, engine.max_context // 2):
        _add_requests(engine, engine.config.max_requests, prompt, min(_MAX_SERVED_TOKENS, engine.max_context // 4))
        while engine.has_unfinished:
            engine.step()
    return sum(engine.model.kernels.compiled().values())
