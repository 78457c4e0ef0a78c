"""Checkpoints of a published shape: configs alone, for engines that fill in random weights, or whole files.

Engines are started from whole files to measure start-up.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.device.errors import ConfigError
from outrider.registry.children import interruptions_held

if TYPE_CHECKING:
    from outrider.model import ModelConfig

_FILE_BYTES = 4 << 30
_RANDOM_VALUES = 16 << 20  # larger tensors repeat these values
_STANDARD_DEVIATION = 0.02
_MARK = "written.json"
"""Name of the file that states the shape of a checkpoint once all its files are written."""
_UNQUANTIZED_LAYERS = (r"re:.*\.mlp\.gate$", r"re:.*\.shared_expert_gate$", r"re:.*\.conv1d$", r"re:.*\.in_proj_[ab]+$")
"""Layers that a quantized config leaves out: routers, and the short convolutions and gates of recurrent layers."""
_WORD_LETTERS = 5
"""Number of letters of a token of a made-up tokenizer."""


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """Directories of a target and of its EAGLE head, and the size of both in bytes."""

    target: Path
    draft: Path
    bytes: int


def find_or_write_checkpoint(shape: str, root: Path) -> tuple[RandomCheckpoint, bool]:
    """Return the checkpoint of ``shape`` in ``root``, and True if it was there already.

    A checkpoint that was there is read once, so that it is in the page cache like one that has just been written. A missing
    or empty directory gets a new checkpoint. Raises :class:`ConfigError` for a directory with other content, or one that
    can't be read or written.
    """
    from safetensors import SafetensorError

    try:
        return _find_or_write(shape, root)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the checkpoint of {shape} in {root} can't be read or written: {why}; name another directory"
        ) from error


def _find_or_write(shape: str, root: Path) -> tuple[RandomCheckpoint, bool]:
    mark = root / _MARK
    if mark.is_file():
        found, size = _read_mark(mark)
        if found != shape:
            raise ConfigError(f"{root} holds a checkpoint of {found}, not of {shape}; name another directory")
        for file in root.glob("*/*.safetensors"):
            with file.open("rb", buffering=0) as opened:
                while opened.read(_RANDOM_VALUES):
                    pass
        return RandomCheckpoint(root / "target", root / "draft", size), True
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"{root} holds something else than a checkpoint that was written whole; name an empty directory")
    made = [each for each in (root, *root.parents) if not each.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        written = write_checkpoint(shape, root)
        mark.write_text(json.dumps({"shape": shape, "bytes": written.bytes}), encoding="utf-8")
    except BaseException:
        with interruptions_held():
            _remove(root, made)
        raise
    return written, False


def _remove(root: Path, made: Sequence[Path]) -> None:
    """Remove the files of an incomplete checkpoint and the directories ``made`` for it, inner ones first."""
    for part in ("target", "draft"):
        shutil.rmtree(root / part, ignore_errors=True)
    with suppress(OSError):  # the first error explains more
        (root / _MARK).unlink(missing_ok=True)
        for each in made:
            each.rmdir()


def _read_mark(mark: Path) -> tuple[str, int]:
    """Return the shape and the size in bytes of the checkpoint in the directory of ``mark``."""
    try:
        said = json.loads(mark.read_text(encoding="utf-8"))
        return str(said["shape"]), int(said["bytes"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{mark} doesn't name the checkpoint next to it ({type(error).__name__}: {error}); remove that directory, "
            "or name another one"
        ) from error


def write_checkpoint(shape: str, root: Path, *, dtype: str = "bfloat16", shard: int = _FILE_BYTES) -> RandomCheckpoint:
    """Write a target and an EAGLE head of ``shape`` below ``root``, the target in files of about ``shard`` bytes.

    Norms are ones, matrices are random. The tokenizer is that of the bundled model, which has fewer tokens. The files are in
    the page cache, as far as the memory holds them.
    """
    from outrider.bundled import bundled
    from outrider.model.checkpoint.mapping import decoder_targets
    from outrider.model.config.shapes import shape_config
    from outrider.model.heads.eagle import eagle_targets

    config = shape_config(shape)
    head = eagle_head_config(config)
    target, draft = root / "target", root / "draft"
    total = 0
    for directory, model, pieces in (
        (target, config, decoder_targets(config, ())),
        (draft, head, eagle_targets(head, ())),
    ):
        directory.mkdir(parents=True)
        content = checkpoint_config(model, dtype=dtype)
        (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
        shapes = [(piece.key, piece.shape) for each in pieces for piece in each.pieces]
        total += _write(directory, shapes, dtype, shard if directory == target else 1 << 60)
    shutil.copyfile(bundled("target") / "tokenizer.json", target / "tokenizer.json")
    return RandomCheckpoint(target, draft, total)


def _write(directory: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], dtype: str, shard: int) -> int:
    """Write one file, or several files with an index; return their size in bytes."""
    import torch
    from safetensors.torch import save_file

    from outrider.engine.config import DTYPES

    torch_dtype = DTYPES[dtype]
    values = torch.empty(min(_RANDOM_VALUES, max(prod(shape) for _, shape in shapes)))
    block = values.normal_(std=_STANDARD_DEVIATION, generator=torch.Generator().manual_seed(0)).to(torch_dtype)

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch_dtype)
        return block.repeat(-(-prod(shape) // len(block)))[: prod(shape)].view(shape)

    files = list(_shards(shapes, torch_dtype.itemsize, shard))
    placed: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({key: tensor(shape) for key, shape in part}, directory / name, {"format": "pt"})
        placed |= dict.fromkeys((key for key, _ in part), name)
    total = sum((directory / name).stat().st_size for name in set(placed.values()))
    if len(files) > 1:
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": placed})
        (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return total


def _shards(
    shapes: Sequence[tuple[str, tuple[int, ...]]], itemsize: int, most: int
) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    part: list[tuple[str, tuple[int, ...]]] = []
    size = 0
    for key, shape in shapes:
        more = prod(shape) * itemsize
        if part and size + more > most:
            yield part
            part, size = [], 0
        part.append((key, shape))
        size += more
    yield part


# -- configs -----------------------------------------------------------------------------------------------------------


def checkpoint_config(config: ModelConfig, *, dtype: str) -> dict[str, object]:
    """Return the ``config.json`` of a checkpoint of this shape, as transformers reads it.

    Raises :class:`ConfigError` for a shape with attention sinks or norms of results, of which no config is written yet.
    """
    if config.attention_sinks or config.sandwich is not None:
        raise ConfigError(f"no checkpoint of a {config.family} shape can be written; name a published one by its directory")
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
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    }
    family = config.family.removesuffix("_text") + ("_text" if config.recurrent is not None else "")
    family = family if family in named else "llama"
    return {
        "architectures": [named.get(family, "LlamaForCausalLM")],
        "model_type": family,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
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
        **_recurrent(config),
    }


def _recurrent(config: ModelConfig) -> dict[str, object]:
    """Return the config entries of a hybrid model with an MTP head of one layer, in the form of Qwen3.5's text side."""
    recurrent = config.recurrent
    if recurrent is None:
        return {}
    rotated = int(config.head_size * config.rope.rotated_share) // 2
    height = -(-rotated // 3)
    sections = [height, -(-(rotated - height) // 2), (rotated - height) // 2]
    return {
        "layer_types": [
            "linear_attention" if layer in recurrent.layers else "full_attention" for layer in range(config.num_layers)
        ],
        "full_attention_interval": config.attention_layers[0] + 1,
        "attn_output_gate": config.attention_gate,
        "linear_key_head_dim": recurrent.key_size,
        "linear_value_head_dim": recurrent.value_size,
        "linear_num_key_heads": recurrent.key_heads,
        "linear_num_value_heads": recurrent.value_heads,
        "linear_conv_kernel_dim": recurrent.kernel_size,
        "mamba_ssm_dtype": str(recurrent.state_dtype).removeprefix("torch."),
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope.theta,
            "partial_rotary_factor": config.rope.rotated_share,
            "mrope_section": sections,
            "mrope_interleaved": True,
        },
    }


def _experts(config: ModelConfig) -> dict[str, object]:
    """Return the config entries of a mixture of experts."""
    experts = config.experts
    if experts is None:
        return {}
    return {
        "num_local_experts" if config.family == "mixtral" else "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.renormalize,
        **({"shared_expert_intermediate_size": experts.shared_size} if experts.shared_size else {}),
        "mlp_only_layers": list(experts.dense_layers),
        "decoder_sparse_step": 1,
    }


def compressed_tensors(name: str, *, head: bool) -> dict[str, object]:
    """Return the ``quantization_config`` for a format of :data:`~outrider.device.kernels.weight_formats.WEIGHT_FORMATS`.

    The config has the form that compressed-tensors writes. ``head``: quantise the output head too. Routers stay unquantized.
    vLLM quantises an output head only if a target of the config names ``lm_head``.
    """
    from outrider.device.kernels.weight_formats import weight_format
    from outrider.model.quantization.writing import compressed_config

    return compressed_config(weight_format(name), [*_UNQUANTIZED_LAYERS, *([] if head else ["lm_head"])])


def write_configs(
    shape: str, root: Path, *, dtype: str, quantize: str | None = None, quantize_head: bool = False
) -> tuple[Path, Path]:
    """Write the configs of a target and of an EAGLE draft below ``root``, without weights; return their directories.

    ``quantize`` names the weight format that the configs declare; ``quantize_head``: also for the output head.
    """
    from outrider.model.config.shapes import shape_config

    config = shape_config(shape)
    target, draft = root / "target", root / "draft"
    for directory, model in ((target, config), (draft, eagle_head_config(config))):
        directory.mkdir(parents=True, exist_ok=True)
        content = checkpoint_config(model, dtype=dtype)
        if quantize is not None:
            content["quantization_config"] = compressed_tensors(quantize, head=quantize_head)
        (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return target, draft


def eagle_head_config(config: ModelConfig) -> ModelConfig:
    """Return the config of an EAGLE head for a target with ``config``: one Llama layer, as in published heads."""
    return replace(
        config,
        family="llama",
        num_layers=1,
        windows=(0,),
        qk_norm=False,
        attention_bias=False,
        output_bias=False,
        attention_gate=False,
        attention_sinks=False,
        norm_offset=0.0,
        tie_embeddings=False,
        experts=None,
        latent=None,
        recurrent=None,
    )


def write_tokenizer(directory: Path, *, size: int, max_context: int) -> None:
    """Write a tokenizer in which every token has a text."""
    (directory / "tokenizer.json").write_text(make_tokenizer(size), encoding="utf-8")
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_context}
    (directory / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")


def make_tokenizer(size: int) -> str:
    """Return a byte-level tokenizer of ``size`` tokens, as JSON; each token but the bytes is a word after a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    for number in range(size - len(tokens)):
        word = ""
        for _ in range(_WORD_LETTERS):
            number, letter = divmod(number, len(letters))
            word += letters[letter]
        tokens.append("Ġ" + word)
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens[:size])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())
