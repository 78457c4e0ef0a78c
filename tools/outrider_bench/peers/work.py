"""The work that every engine gets, and how it is timed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.model import ModelConfig

_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The same for all: random weights of a shape, prompts of one length, a fixed number of new tokens.

    ``accept_length``: tokens that an iteration yields, by synthetic acceptance. ``device``: as torch names it.
    """

    shape: str
    dtype: str
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    draft_tokens: int
    accept_length: float
    device: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Work:
        """From a child's argument."""
        return cls(**{name: given[name] for name in cls.__slots__ if name != "batches"}, batches=tuple(given["batches"]))

    @property
    def context(self) -> int:
        """Tokens of a request at its longest, drafts included."""
        return self.prompt_tokens + self.new_tokens + 2 * (self.draft_tokens + 1)

    def prompts(self, batch: int) -> list[list[int]]:
        """A different prompt for each request; with random weights any tokens do."""
        return [[5 + (97 * i + 31 * j) % 400 for j in range(self.prompt_tokens)] for i in range(batch)]


def checkpoint_config(config: ModelConfig, *, dtype: str, layers: int | None = None) -> dict[str, object]:
    """``config.json`` of a Llama checkpoint of this shape, as transformers reads it."""
    rope = config.rope
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.kind == "llama3":
        parameters |= {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers or config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": parameters,
        "rope_theta": rope.theta,
        "rope_scaling": parameters if rope.kind == "llama3" else None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


@contextmanager
def checkpoints(work: Work) -> Iterator[tuple[Path, Path]]:
    """Directories of a target and of a draft that hold a config each and no weights: engines fill those in at random."""
    from outrider_bench.random_weights import shape_config

    shape = shape_config(work.shape)
    with TemporaryDirectory(prefix="outrider-peers-") as root:
        target, draft = Path(root, "target"), Path(root, "draft")
        for directory, layers in ((target, None), (draft, 1)):
            directory.mkdir()
            config = checkpoint_config(shape, dtype=work.dtype, layers=layers)
            (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield target, draft


def decode_seconds(generate: Callable[[int], object], new_tokens: int) -> float:
    """What decoding takes: ``generate(new_tokens)`` less ``generate(1)``, which is the prefill. The best of three, each."""
    best = {}
    for count in (1, new_tokens):
        generate(count)  # warms up
        times = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            generate(count)
            times.append(time.perf_counter() - began)
        best[count] = min(times)
    return best[new_tokens] - best[1]


def row(work: Work, batch: int, seconds: float, *, accepted: float | None, speculate: str) -> dict[str, object]:
    """One line of the comparison; ``accepted``: tokens an iteration as the engine counted them, None for plain decoding."""
    tokens = work.new_tokens - 1  # the first one is the prefill's
    iterations = tokens / (accepted or 1.0)
    return {
        "batch": batch,
        "speculate": speculate,
        "iteration_ms": 1e3 * seconds / iterations,
        "tokens_per_s": batch * tokens / seconds,
        "acceptance_length": accepted or 1.0,
    }


def check_lengths(lengths: Sequence[int], wanted: int) -> None:
    """Every request got what it asked for. Raises :class:`~outrider_bench.child.ChildFailed`."""
    from outrider_bench.child import ChildFailed

    short = [length for length in lengths if length != wanted]
    if short:
        raise ChildFailed(f"asked for {wanted} new tokens, a request got {short[0]}: that isn't the same work")
