"""Checkpoints in GGUF, llama.cpp's format: one file, or several parts, with weights, config, tokenizer and chat template.

:func:`unpack_gguf` writes the config and the tokenizer as the JSON files of a checkpoint directory, which every other reader
understands, and the list of the GGUF files. :func:`open_gguf` gives their tensors the names and shapes of transformers.
The package ``gguf`` reads and dequantizes. Sources: the GGUF specification in ggml's docs, and llama.cpp's conversion script.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer
from torch import Tensor

from outrider.device import ConfigError
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import (
    GGUF_LIST,
    CheckpointFiles,
    Extent,
    TensorFile,
    TensorSlice,
    read_json,
    regular_size,
    wrap_read_errors,
)
from outrider.model.checkpoint.gguf_config import (
    Convert,
    GgufMetadata,
    HybridLayout,
    hybrid_layout,
    model_config,
    without_one,
)

_UNPACKED_FORMAT = 1
"""Number of this module's output format; part of the name of the cache entry."""
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_FILE_DTYPES = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})
_QUANTIZED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_ROUNDED_TYPES = ("Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Types whose values are rounded to float16. Backends recover the integers of the others from their exact values."""
_WHOLE_NAMES = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_LAYER_NAMES = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
    }
)
_EXPERT_NAMES = MappingProxyType({"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"})
_NO_WEIGHTS = frozenset({"rope_freqs.weight"})

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SPLITS = MappingProxyType(
    {
        "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
        "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
        "qwen35": rf"{_WORDS}|\p{{N}}|{_REST}".replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}"),
        "deepseek-r1-qwen": rf"{_WORDS}|\p{{N}}|{_REST}",
        "tekken": rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Expressions that split a text before byte-pair merges, by the name in ``tokenizer.ggml.pre``."""
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r")
_PLAIN_SPLITS = ("default", "gpt-2", "gpt2", "olmo", "jais", "exaone")
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """One tensor of a GGUF file under transformers' name.

    ``index`` selects an expert's matrix of a stack. ``convert`` undoes llama.cpp's changes to the values, if there are any.
    """

    source: Any
    shape: tuple[int, ...]
    index: int | None = None
    convert: Convert | None = None


class _GgufFile(TensorFile):
    def __init__(self, path: Path, tensors: Mapping[str, _StoredTensor]) -> None:
        self._tensors = tensors
        super().__init__(path, {name: tensor.shape for name, tensor in tensors.items()})

    def read_tensor(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        from gguf import dequantize

        stored = self._tensors[name]
        with wrap_read_errors(self.path, f"tensor {name!r}"):
            data = stored.source.data if stored.index is None else stored.source.data[stored.index]
            kind = stored.source.tensor_type
            if kind.name == "BF16":
                values = torch.from_numpy(data.view(numpy.uint8).copy()).view(torch.bfloat16)
            else:
                values = torch.from_numpy(numpy.array(dequantize(data, kind)))
                if kind.name in _ROUNDED_TYPES:
                    values = _round_to_float16(values)
            values = values.reshape(_shape_of(stored.source) if stored.index is None else stored.shape)
            if stored.convert is not None:
                values = stored.convert(values)
            return values if tensor_slice is None else values[tensor_slice.slices(len(stored.shape))].clone()

    def dtype(self, name: str) -> torch.dtype | None:
        return _FILE_DTYPES.get(self._tensors[name].source.tensor_type.name, torch.float32)

    def extent(self, name: str) -> Extent | None:
        stored = self._tensors[name]
        dtype = _FILE_DTYPES.get(stored.source.tensor_type.name)
        if dtype is None or stored.convert is not None or stored.index is not None:
            return None
        return Extent(self.path, int(stored.source.data_offset), dtype)


def _round_to_float16(values: Tensor) -> Tensor:
    """Return dequantized float32 values rounded to float16, the dtype of the scales. Values beyond its range stay.

    The relative error is at most 2^-11, one eighth of that of bfloat16. A backend can then keep the weights in
    16 bits without a further error.
    """
    rounded = values.half()
    return torch.where(rounded.isfinite(), rounded.float(), values)


def _in_rotary_halves(heads: int, values: Tensor) -> Tensor:
    """Return the rows of each head in transformers' order, first all first halves of the rotated pairs.

    llama.cpp stores the two rows of a pair next to each other.
    """
    return values.reshape(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def unpack_gguf(path: Path) -> Path:
    """Write the config, the tokenizer and the chat template of a GGUF file into a cache directory and return it.

    The directory lies in the cache of ``huggingface_hub`` and is reused while the file is unchanged. Raises
    :class:`CheckpointError` for a file that is broken, of another architecture, or with an unknown tokenizer, and if the
    package ``gguf`` is missing.
    """
    from huggingface_hub import cached_assets_path

    paths = _parts(path)
    state = [(str(part.resolve()), regular_size(part), part.stat().st_mtime_ns) for part in paths]
    key = hashlib.sha256(json.dumps([_UNPACKED_FORMAT, state]).encode()).hexdigest()[:32]
    try:
        root = cached_assets_path(library_name="outrider", namespace="gguf")
        target = root / key
        if (target / GGUF_LIST).exists():
            return target
        files = _unpacked_files(paths)
        work = Path(tempfile.mkdtemp(dir=root))
    except OSError as error:
        raise CheckpointError(
            f"{path}: its config can't be unpacked into the cache: {error}; set HF_HOME to another one"
        ) from error
    try:
        for name, content in files.items():
            (work / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        os.replace(work, target)
    except OSError as error:
        if not (target / GGUF_LIST).exists():  # another process may have been faster
            raise CheckpointError(f"{target}: can't be written: {error}; set HF_HOME to another directory") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def open_gguf(directory: Path) -> CheckpointFiles:
    """Open the tensors of an unpacked checkpoint. Raises :class:`CheckpointError` if a GGUF file is missing or broken."""
    listed = read_json(directory / GGUF_LIST)
    with wrap_read_errors(directory / GGUF_LIST, "a list of GGUF files"):
        paths = [Path(each) for each in listed["files"]]
    _, _, tensors_of_parts = _open_parts(paths)
    found: dict[str, TensorFile] = {}
    for path, tensors in zip(paths, tensors_of_parts, strict=True):
        found.update(dict.fromkeys(tensors, _GgufFile(path, tensors)))
    return CheckpointFiles(paths[0], MappingProxyType(found))


def _parts(path: Path) -> list[Path]:
    """Return the paths of all part files of a GGUF checkpoint, in order. ``path`` is its first or only file."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if number != 1 or not 0 < count < 1000:
        raise CheckpointError(
            f"{path}: is part {number} of {count}; expected the first part, {stem}-00001-of-{match[3]}.gguf"
        )
    return [path.with_name(f"{stem}-{part:05}-of-{match[3]}.gguf") for part in range(1, count + 1)]


def _open_reader(path: Path) -> Any:
    if find_spec("gguf") is None:
        raise CheckpointError(
            f"{path}: GGUF files need the package gguf, which is not installed; run: pip install 'outrider[gguf]'"
        )
    from gguf import GGUFReader

    size = regular_size(path)
    with wrap_read_errors(path, "GGUF", "if it's truncated or corrupt, fetch it again"):
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError("it does not begin with GGUF")
        reader = GGUFReader(path)
        end = max((tensor.data_offset + tensor.n_bytes for tensor in reader.tensors), default=0)
        if end > size:
            raise ValueError(f"its tensors end at byte {end}, the file has {size}")
        return reader


def _open_parts(paths: list[Path]) -> tuple[list[Any], GgufMetadata, list[dict[str, _StoredTensor]]]:
    """Return the readers of all files, the metadata, which the first file has, and the tensors of each file by name."""
    readers = [_open_reader(path) for path in paths]
    with wrap_read_errors(paths[0], "a GGUF checkpoint"):
        metadata = GgufMetadata(readers[0])
        hybrid = hybrid_layout(metadata)
        return readers, metadata, [_named_tensors(reader, metadata, hybrid) for reader in readers]


def _unpacked_files(paths: list[Path]) -> dict[str, Any]:
    """Return the contents of the JSON files that :func:`unpack_gguf` writes, by file name."""
    readers, metadata, _ = _open_parts(paths)
    with wrap_read_errors(paths[0], "a GGUF checkpoint"):
        shapes = {tensor.name: _shape_of(tensor) for reader in readers for tensor in reader.tensors}
        files = {"config.json": model_config(metadata, shapes, _rope_factors(readers), _file_dtype(readers))}
        files["generation_config.json"] = {
            "eos_token_id": [
                token
                for name in ("eos", "eot", "eom")
                if (token := metadata.optional(f"tokenizer.ggml.{name}_token_id", int)) is not None
            ],
            "bos_token_id": metadata.optional("tokenizer.ggml.bos_token_id", int),
        }
        if metadata.optional("tokenizer.ggml.model", str) is not None:
            tokenizer = _tokenizer(metadata, paths[0])
            files["tokenizer.json"] = json.loads(tokenizer.to_str())
            files["tokenizer_config.json"] = _tokenizer_config(metadata, tokenizer)
        return files | {GGUF_LIST: {"files": [str(path.resolve()) for path in paths]}}


def _named_tensors(reader: Any, metadata: GgufMetadata, hybrid: HybridLayout | None) -> dict[str, _StoredTensor]:
    """Return a file's tensors by transformers' names. Raises :class:`ConfigError` for an unknown name or type."""
    found: dict[str, _StoredTensor] = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind not in (*_FILE_DTYPES, *_QUANTIZED_TYPES):
            known = ", ".join((*_FILE_DTYPES, *_QUANTIZED_TYPES))
            raise ConfigError(f"tensor {shown(tensor.name)} has type {kind}, which isn't supported; supported are {known}")
        if tensor.name not in _NO_WEIGHTS:
            found |= _names_of(tensor, metadata, hybrid)
    return found


def _names_of(tensor: Any, metadata: GgufMetadata, hybrid: HybridLayout | None) -> dict[str, _StoredTensor]:
    shape = _shape_of(tensor)
    if tensor.name in _WHOLE_NAMES:
        convert = without_one if hybrid is not None and tensor.name == "output_norm.weight" else None
        return {_WHOLE_NAMES[tensor.name]: _StoredTensor(tensor, shape, convert=convert)}
    block = re.fullmatch(r"blk\.(\d{1,4})\.(.+)", tensor.name)
    if hybrid is not None and block is not None:
        named = hybrid.named(int(block[1]), block[2], shape)
        if named is not None:
            return {name: _StoredTensor(tensor, shape, convert=convert) for name, (shape, convert) in named.items()}
    match = re.fullmatch(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)", tensor.name)
    prefix = "" if match is None else f"model.layers.{match[1]}" if hybrid is None else hybrid.prefix(int(match[1]))
    if match is not None and match[2] in _EXPERT_NAMES and match[3] == "weight" and len(shape) == 3:
        stem = f"{prefix}.mlp.experts"
        part = _EXPERT_NAMES[match[2]]
        return {f"{stem}.{expert}.{part}.weight": _StoredTensor(tensor, shape[1:], expert) for expert in range(shape[0])}
    if match is None or match[2] not in _LAYER_NAMES:
        raise ConfigError(f"tensor {shown(tensor.name)} isn't one of a {metadata.architecture} model")
    convert = None
    if metadata.architecture == "llama" and match[2] in ("attn_q", "attn_k"):
        query_heads = metadata.of_model("attention.head_count", int)
        heads = query_heads if match[2] == "attn_q" else metadata.of_model("attention.head_count_kv", int, query_heads)
        if heads < 1 or shape[0] % (2 * heads):
            raise ConfigError(f"tensor {shown(tensor.name)} has {shape[0]} rows, which {heads} heads can't share")
        convert = partial(_in_rotary_halves, heads)
    return {f"{prefix}.{_LAYER_NAMES[match[2]]}.{match[3]}": _StoredTensor(tensor, shape, convert=convert)}


def _shape_of(tensor: Any) -> tuple[int, ...]:
    """Return a tensor's shape with the slowest dimension first, as torch has it; GGUF lists the fastest first."""
    return tuple(map(int, reversed(tensor.shape)))


def _file_dtype(readers: list[Any]) -> str:
    """Return the dtype of unquantized matrices, or bfloat16 if the matrices are quantized."""
    kinds = {tensor.tensor_type.name for reader in readers for tensor in reader.tensors if len(tensor.shape) > 1}
    dtypes = [str(dtype).removeprefix("torch.") for kind, dtype in _FILE_DTYPES.items() if kinds == {kind}]
    return dtypes[0] if dtypes else "bfloat16"


def _rope_factors(readers: list[Any]) -> Tensor | None:
    """Return the divisors of the rotary frequencies, float [D / 2] on the host for D rotated dimensions, or None if the file
    has none.
    """
    for reader in readers:
        for tensor in reader.tensors:
            if tensor.name == "rope_freqs.weight":
                return torch.from_numpy(numpy.array(tensor.data, dtype=numpy.float32))
    return None


def _tokenizer(metadata: GgufMetadata, path: Path) -> HfTokenizer:
    """Return the tokenizer: byte-level byte-pair encoding, or sentencepiece, which transformers converts.

    Raises :class:`ConfigError` for another kind of tokenizer.
    """
    kind = metadata.value("tokenizer.ggml.model", str)
    builders: Mapping[str, Callable[[], HfTokenizer]] = {
        "gpt2": partial(_byte_level_tokenizer, metadata),
        "llama": partial(_converted_tokenizer, path),
    }
    if kind not in builders:
        raise ConfigError(f"tokenizer.ggml.model is {shown(kind)}; supported are {', '.join(builders)}")
    return builders[kind]()


def _converted_tokenizer(path: Path) -> HfTokenizer:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
    )
    return HfTokenizer.from_str(tokenizer.backend_tokenizer.to_str())


def _byte_level_tokenizer(metadata: GgufMetadata) -> HfTokenizer:
    pre = metadata.value("tokenizer.ggml.pre", str, "default")
    tokens = metadata.value("tokenizer.ggml.tokens", list)
    kinds = metadata.value("tokenizer.ggml.token_type", list, [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.value("tokenizer.ggml.merges", list)]
    if len(kinds) != len(tokens) or any(len(merge) != 2 for merge in merges):
        raise ConfigError("the tokenizer has another number of token types than of tokens, or a merge that isn't of two")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConfigError("two tokens of the tokenizer have the same spelling")
    tokenizer = HfTokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    added = [number for number, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens(
        [AddedToken(tokens[number], special=kinds[number] == _CONTROL, normalized=False) for number in added]
    )
    start = metadata.optional("tokenizer.ggml.bos_token_id", int)
    if start is not None and metadata.value("tokenizer.ggml.add_bos_token", bool, False):
        text = tokens[start]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[text, "$A"], pair=[text, "$A", text, "$B:1"], special_tokens=[(text, start)]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _pre_tokenizer(pre: str) -> Any:
    if pre in _PLAIN_SPLITS:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _DIGITS_ALONE:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre not in _SPLITS:
        known = ", ".join(sorted((*_SPLITS, *_DIGITS_ALONE, *_PLAIN_SPLITS)))
        raise ConfigError(f"tokenizer.ggml.pre is {shown(pre)}, and how it splits a text isn't known; known are {known}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _tokenizer_config(metadata: GgufMetadata, tokenizer: HfTokenizer) -> dict[str, Any]:
    """Return tokenizer_config.json, which has the chat template and the special tokens."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.optional(f"tokenizer.ggml.{key}_token_id", int)
        if token is not None:
            config[f"{name}_token"] = tokenizer.id_to_token(token)
    default = metadata.optional("tokenizer.chat_template", str)
    named = metadata.named("tokenizer.chat_template.")
    if default is not None:
        config["chat_template"] = (
            [{"name": name, "template": template} for name, template in ({"default": default} | named).items()]
            if named
            else default
        )
    return config
