"""The work that every engine gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider_bench.mixed_load import MixedLoad, token_ids
from outrider_bench.peers.quantized import compressed_tensors

if TYPE_CHECKING:
    from outrider.model import ModelConfig

PHASES = ("decode", "prefill", "mixed", "context")
_SPARE = 1.1
_PROMPT_TOKENS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The same for all: random weights of a shape, and what is done with them.

    ``decode``: batches of ``batches`` requests, prompts of ``prompt_tokens``, ``new_tokens`` of each. ``prefill``: the first
    token of one prompt of each of ``lengths``. ``mixed``: a load of ``requests`` of drawn lengths (``prompts``, ``outputs``,
    by ``seed``). ``context``: one request that decodes behind a prompt of each of ``contexts``.

    ``accept_length``: tokens that an iteration yields on average, by synthetic acceptance; ``rates``: the chance of each
    drafted place that it and all before it pass, by which every engine accepts. ``max_requests``: requests that run at the
    same time at most; ``max_context``: tokens that one may have, None for what it needs. ``memory``: share of the device's
    memory, for an engine that takes a share. ``device``: as torch names it. ``keep``: a directory for what engines compile;
    None: nothing is kept. ``quantize``: the format of the layers' weights, also the draft's; ``quantize_head``: of the output
    head too. ``draft_output_head``: the format of the copy of the output head that our own engine draws drafts with;
    ``draft_vocabulary``: the tokens that it draws them from; ``draft_quantize``: the format of its draft's layers alone.
    """

    shape: str
    dtype: str
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    draft_tokens: int
    accept_length: float
    rates: tuple[float, ...]
    device: str
    phases: tuple[str, ...]
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    requests: int
    seed: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    max_requests: int
    max_context: int | None
    memory: float
    keep: str | None = None
    quantize: str | None = None
    quantize_head: bool = False
    draft_output_head: str | None = None
    draft_vocabulary: str | None = None
    draft_quantize: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Work:
        """From a child's argument."""
        return cls(**{name: _tuples(given[name]) for name in cls.__slots__})

    @property
    def quantized(self) -> str | None:
        """What is quantised, for people."""
        return self.quantize and f"{self.quantize}, output head {'too' if self.quantize_head else 'plain'}"

    @property
    def load(self) -> MixedLoad:
        """The mixed load."""
        return MixedLoad(requests=self.requests, seed=self.seed, prompts=self.prompts, outputs=self.outputs)

    @property
    def _drafts(self) -> int:
        return 2 * (self.draft_tokens + 1)

    @property
    def longest(self) -> tuple[int, str]:
        """Tokens of a request at its longest, and the options that say so."""
        found = {
            "decode": (self.prompt_tokens + self.new_tokens, "--prompt-tokens and --new-tokens"),
            "prefill": (max(self.lengths) + 1, "--prefill-tokens and a new token"),
            "mixed": (self.load.longest, "--prompts and --outputs"),
            "context": (max(self.contexts) + self.new_tokens, "--contexts and --new-tokens"),
        }
        return max(found[phase] for phase in self.phases)

    @property
    def shape_context(self) -> int:
        """Tokens that a model of this shape was made for."""
        from outrider.model.shapes import shape_config

        return shape_config(self.shape).max_context

    @property
    def context(self) -> int:
        """Tokens of a request that an engine is made for: ``max_context``, or at its longest, with room for drafts where the
        model has it.
        """
        if self.max_context is not None:
            return self.max_context
        return min(self.longest[0] + self._drafts, self.shape_context)

    @property
    def cached_tokens(self) -> int:
        """Tokens that the cache must hold at the same time at most, with a little room."""
        most = [self.context]
        if "decode" in self.phases:
            most.append(max(self.batches) * (self.prompt_tokens + self.new_tokens + self._drafts))
        if "mixed" in self.phases:
            lengths = sorted((prompt + output + self._drafts for prompt, output in self.load.lengths), reverse=True)
            most.append(sum(lengths[: self.max_requests]))
        return round(_SPARE * max(most)) + 64 * self.max_requests

    @property
    def vocabulary(self) -> int:
        """Of how many tokens prompts are made; with random weights any do."""
        from outrider.model.shapes import shape_config

        return min(_PROMPT_TOKENS, shape_config(self.shape).vocab_size)

    def prompt(self, number: int, tokens: int, vocabulary: int) -> list[int]:
        """A prompt that differs from those of other numbers near it."""
        return token_ids(number, tokens, vocabulary)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def checkpoint_config(config: ModelConfig, *, dtype: str, layers: int | None = None) -> dict[str, object]:
    """``config.json`` of a checkpoint of this shape, as transformers reads it."""
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
    named = {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    }
    family = config.family if config.family in named else "llama"
    return {
        "architectures": [named.get(family, "LlamaForCausalLM")],
        "model_type": family,
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
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias and family == "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
        "torch_dtype": dtype,
        **({"sliding_window": config.windows[0] or None} if family == "mistral" else {}),
        **_experts(config),
    }


def _experts(config: ModelConfig) -> dict[str, object]:
    """What config.json says of a mixture of experts."""
    experts = config.experts
    if experts is None:
        return {}
    return {
        "num_local_experts" if config.family == "mixtral" else "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.renormalize,
        "mlp_only_layers": list(experts.dense_layers),
        "decoder_sparse_step": 1,
    }


def checkpoints(work: Work, place: Path) -> tuple[Path, Path]:
    """Directories of a target and of a draft that hold a config each and no weights: engines fill those in at random.

    They are always the same in a ``place``: an engine that keeps what it compiled finds it by the directory's name.
    """
    from dataclasses import replace

    from outrider_bench.random_weights import shape_config

    shape = shape_config(work.shape)
    # The draft is a Llama layer, whatever the target is: that is what published EAGLE heads are.
    draft_shape = replace(shape, family="llama", qk_norm=False, attention_bias=False, tie_embeddings=False, experts=None)
    quantized = [] if work.quantize is None else [work.quantize, *(["head"] if work.quantize_head else [])]
    root = place / "-".join([*Path(work.shape).parts[-2:], work.dtype, *quantized]).replace("/", "")
    target, draft = root / "target", root / "draft"
    for directory, config, layers in ((target, shape, None), (draft, draft_shape, 1)):
        directory.mkdir(parents=True, exist_ok=True)
        content = checkpoint_config(config, dtype=work.dtype, layers=layers)
        if work.quantize is not None:
            content["quantization_config"] = compressed_tensors(work.quantize, head=work.quantize_head)
        (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return target, draft


def cache_bytes(work: Work, *, drafts: bool) -> int:
    """Bytes of the keys and values of :attr:`Work.cached_tokens`, those of a draft layer included."""
    from outrider.engine.config import DTYPES
    from outrider_bench.random_weights import shape_config

    shape = shape_config(work.shape)
    layers = shape.num_layers + (1 if drafts else 0)
    return work.cached_tokens * 2 * layers * shape.num_kv_heads * shape.head_size * DTYPES[work.dtype].itemsize
