"""Writing of a quantized copy of a checkpoint in the compressed-tensors format, rounded to the nearest without calibration
data.
"""

from __future__ import annotations

import errno
import json
import math
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.device import ConfigError
from outrider.device.kernels.formats import ElementFormat
from outrider.device.kernels.weight_formats import WeightFormat, weight_format
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import GGUF_LIST, CheckpointFiles, read_json
from outrider.model.checkpoint.loading import Progress
from outrider.model.checkpoint.location import refuse_other_formats
from outrider.model.checkpoint.mapping import is_model, vision_name
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.media.chat_template import MORE_TEMPLATES
from outrider.model.quantization.config import read_quantization
from outrider.model.quantization.storages import COMPRESSED_STORAGES

_PRODUCT_MODULES = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"}
    | {"w1", "w2", "w3", "fc", "input_proj"}
    | {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"}  # of latent attention, which never multiplies by the whole of kv_b_proj
    | {"per_layer_input_gate", "per_layer_projection"}  # of layers with an input of their own for each token
    | {"in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj"}  # of recurrent layers, whose gates have few rows
)
"""Last name components of modules with a product: in layers, in experts, and in the fusion of a draft head."""
_HEAD = "lm_head"
_WEIGHT = ".weight"
_INDEX_FILE = "model.safetensors.index.json"
_REWRITTEN_FILES = ("config.json", GGUF_LIST, "*.safetensors", "*.bin", "*.index.json", "*.pt", "*.pth")


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCheckpoint:
    """Numbers of tensors and bytes of a written checkpoint."""

    quantized: int
    """Number of quantized weights."""
    plain: int
    """Number of unquantized tensors."""
    bytes_before: int
    """Bytes of all tensors of the source."""
    bytes_after: int
    """Bytes of all written tensors."""


def fitting_group(source: Path, format: str) -> int | None:
    """Return the number of columns per scale in ``format`` that divides the columns of all weights in the checkpoint
    ``source``.

    None for a format without groups. Raises :class:`ConfigError` if no group divides the columns of a weight.
    """
    rounding, files = weight_format(format), open_checkpoint(source)
    if not rounding.is_grouped:
        return None
    return min(rounding.fitted(files.shape(key)[1]).columns for key in _keys_to_quantize(files, head=False))


def quantize_checkpoint(
    source: Path,
    out: Path,
    *,
    format: str,
    group: int | None = None,
    head: bool = False,
    progress: Progress | None = None,
) -> WrittenCheckpoint:
    """Write the new directory ``out`` with the product weights of ``source`` quantized to ``format``, and all else copied.

    ``format`` is a name in :data:`~outrider.device.kernels.weight_formats.WEIGHT_FORMATS`. ``group`` replaces the columns
    that share a scale in a format with groups. ``head`` also quantizes the output head. The source may be a draft head.

    ``out`` appears only when it is complete. Raises :class:`ConfigError` for impossible options, :class:`CheckpointError` for
    a checkpoint that is already quantized or cannot be, and OSError if the disk cannot hold the result.
    """
    rounding = weight_format(format)
    if group is not None:
        rounding = _with_group(rounding, group)
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} is there already; name a folder that isn't")
    refuse_other_formats(source)
    config = read_json(source / "config.json")
    if read_quantization(source) is not None:
        raise CheckpointError(f"{source}: is quantised already; expected a plain checkpoint")
    files = open_checkpoint(source)
    if head and _has_tied_head(config, files):
        raise _no_head_error(files)
    keys = _keys_to_quantize(files, head=head)
    for key in keys if rounding.is_grouped else ():
        if files.shape(key)[1] % rounding.columns:
            raise CheckpointError(
                f"{files.tensors[key].path}: tensor {key!r} has {files.shape(key)[1]} columns, no multiple of the group "
                f"{rounding.columns}; name another with --group"
            )
    _check_disk_space(files, keys, out, rounding)
    partial = out.parent / f".{out.name}.partial-{secrets.token_hex(8)}"  # processes of two containers may have one number
    try:
        partial.mkdir(parents=True)
        written = _write_tensors(files, keys, partial, rounding, progress)
        described = {**config, "quantization_config": compressed_config(rounding, _unquantized_modules(files, keys))}
        (partial / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        for other in sorted(source.iterdir()):
            if other.is_file() and not any(other.match(each) for each in _REWRITTEN_FILES):
                shutil.copyfile(other, partial / other.name)
        if (source / MORE_TEMPLATES).is_dir():
            shutil.copytree(source / MORE_TEMPLATES, partial / MORE_TEMPLATES)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return written


def _keys_to_quantize(files: CheckpointFiles, *, head: bool) -> list[str]:
    """Return the names of the checkpoint's weights that will be quantized."""
    found = []
    for key in files.tensors:
        if ".experts." in f".{key}." and len(files.shape(key)) == 3:
            raise CheckpointError(
                f"{files.tensors[key].path}: tensor {shown(key)} holds all experts of a layer; such a checkpoint can't be "
                "quantised yet; take one with a tensor for each expert"
            )
        module, last = key.removesuffix(_WEIGHT), key.removesuffix(_WEIGHT).rpartition(".")[2]
        is_product = last in _PRODUCT_MODULES or (head and last == _HEAD)
        if key.endswith(_WEIGHT) and is_product and len(files.shape(key)) == 2 and vision_name(module) is None:
            found.append(key)
    if head and not any(key.endswith(f"{_HEAD}{_WEIGHT}") for key in found):
        raise _no_head_error(files)
    if not found:
        raise CheckpointError(f"{files.origin}: holds no weight of a product by a name that is known, such as q_proj.weight")
    return found


def _has_tied_head(config: Mapping[str, Any], files: CheckpointFiles) -> bool:
    """Return True if the model uses its embedding as output head, even if the files hold a copy of it.

    A draft head may have its own output head in any case.
    """
    text = config.get("text_config")
    is_tied = any(part.get("tie_word_embeddings") is True for part in (config, text if isinstance(text, dict) else {}))
    return is_tied and is_model(files.tensors)


def _no_head_error(files: CheckpointFiles) -> ConfigError:
    return ConfigError(
        f"{files.origin}: the output head is to be quantised, and the checkpoint has none of its own: it's the embedding, "
        "which stays plain; leave --lm-head out"
    )


def _unquantized_modules(files: CheckpointFiles, keys: list[str]) -> list[str]:
    """Return the modules that stay unquantized. Readers assume that every other matrix is quantized."""
    matrices = [key for key in files.tensors if key.endswith(_WEIGHT) and len(files.shape(key)) == 2]
    modules = {key.removesuffix(_WEIGHT) for key in matrices} | {_HEAD}
    return sorted(modules - {key.removesuffix(_WEIGHT) for key in keys})


def compressed_config(format: WeightFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """Return a ``quantization_config`` in the form of compressed-tensors for the modules that are not in ``ignore``."""
    weights = {**_number(format.elements), "symmetric": not format.zeros, "dynamic": False}
    if format.rows > 1:
        weights |= {"strategy": "block", "block_structure": [format.rows, format.columns]}
    elif format.columns:
        weights |= {"strategy": "group", "group_size": format.columns}
    else:
        weights |= {"strategy": "channel" if format.rows else "tensor"}
    inputs: dict[str, Any] | None = None
    if format.activations is not None:
        inputs = {**_number(format.activations), "symmetric": True, "dynamic": True, "strategy": "token"}
        if format.activation_group:
            inputs |= {"strategy": "group", "group_size": format.activation_group}
    storage = format.elements.compressed_name
    # Serving engines give the head its own class, which the target "Linear" doesn't match.
    targets = ["Linear"] if _HEAD in ignore else ["Linear", _HEAD]
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": targets, "weights": weights, "input_activations": inputs, "format": storage}
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def _number(elements: ElementFormat) -> dict[str, Any]:
    return {"num_bits": elements.bits, "type": "float" if elements.is_float else "int"}


def _with_group(format: WeightFormat, group: int) -> WeightFormat:
    if not format.is_grouped:
        raise ConfigError(
            f"the group is {group}, and {format.name} has no scales of column groups; leave the group out, or name a format "
            "that has them"
        )
    if group < 8 or group % 8:
        raise ConfigError(f"the group is {group}, expected a positive multiple of 8")
    return replace(format, columns=group)


def _write_tensors(
    files: CheckpointFiles, keys: list[str], out: Path, rounding: WeightFormat, progress: Progress | None
) -> WrittenCheckpoint:
    """Write the checkpoint's tensors to ``out``, those named in ``keys`` quantized: one file for each source file, and an
    index if there are several. Return the counts.
    """
    wanted, total, num_done = set(keys), len(files.tensors), 0
    by_file: dict[Path, list[str]] = {}
    for key, file in files.tensors.items():
        by_file.setdefault(file.path, []).append(key)
    index: dict[str, str] = {}
    before = after = 0
    for path, names in by_file.items():
        name = f"{path.stem.replace('pytorch_model', 'model') if len(by_file) > 1 else 'model'}.safetensors"
        tensors: dict[str, Tensor] = {}
        for key in names:
            tensor = files.read_stored(key)
            before += tensor.nbytes
            if key in wanted:
                tensors |= {f"{key.removesuffix(_WEIGHT)}.{end}": part for end, part in _round(files, key, rounding).items()}
            else:
                tensors[key] = tensor.contiguous()
            num_done += 1
            if progress is not None:
                progress(key, num_done, total)
        after += sum(tensor.nbytes for tensor in tensors.values())
        index |= dict.fromkeys(tensors, name)
        _save(tensors, out / name)
    if len(by_file) > 1:
        (out / _INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": after}, "weight_map": index}, indent=2) + "\n")
    return WrittenCheckpoint(quantized=len(keys), plain=total - len(keys), bytes_before=before, bytes_after=after)


def _round(files: CheckpointFiles, key: str, rounding: WeightFormat) -> dict[str, Tensor]:
    weight = files.read_tensor(key)
    if not bool(weight.isfinite().all()):
        raise CheckpointError(f"{files.tensors[key].path}: tensor {shown(key)} has values that aren't finite")
    stored = COMPRESSED_STORAGES[rounding.elements.compressed_name].write(rounding, rounding.quantize(weight), weight.dtype)
    return {end: part.contiguous() for end, part in stored.items()}


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # the library has no other kind for a full disk
        number = errno.ENOSPC if "No space left" in str(error) or "os error 28" in str(error) else errno.EIO
        raise OSError(number, str(error), str(path)) from error


def _check_disk_space(files: CheckpointFiles, keys: list[str], out: Path, rounding: WeightFormat) -> None:
    """Raise OSError if the disk cannot hold the result."""
    wanted, needed = set(keys), 0
    for key in files.tensors:
        dtype = files.dtype(key)
        size = math.prod(files.shape(key))
        needed += (
            size * (dtype.itemsize if dtype is not None else 8) if key not in wanted else size * rounding.elements.bits // 8
        )
    parent = next(each for each in (out.parent.absolute(), *out.parent.absolute().parents) if each.exists())
    usage = shutil.disk_usage(parent)
    if not usage.total:  # a virtual file system such as /proc
        raise OSError(errno.EROFS, f"{parent} holds no files of others", str(out))
    free = usage.free
    if free < needed:
        raise OSError(errno.ENOSPC, f"needs {needed} bytes, and {free} are free", str(out))
