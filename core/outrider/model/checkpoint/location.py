"""Resolution of a checkpoint's name: a directory or a repository of the Hugging Face Hub. Other formats are refused by name.

Repositories are downloaded with ``huggingface_hub``, or taken from its cache if there is no network. Its settings apply
(``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import describe, present
from outrider.model.checkpoint.gguf_checkpoint import unpack_gguf

_REPOSITORY_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,200})?")
_FETCHED_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model", "*.tiktoken", "tiktoken.model")
_VOCABULARY_FILES = ("merges.txt", "vocab.txt", "spiece.model")
"""Files of tokenizers without a tokenizer.json."""
_TORCH_FILES = ("pytorch_model*.bin",)
_CODE_FILES = ("*.py",)
_TENSOR_FILES = ("*.safetensors", *_TORCH_FILES)
_IGNORED_FILES = ("consolidated*", "*/*.safetensors", "*/*.bin")
"""Tensor files that are never read: Mistral's own format, and those of subfolders."""

_TAKE_ORIGINAL = "take the repository that has config.json and model.safetensors, as Hugging Face writes them"
_CONVERT_FIRST = "load it with the library that wrote it and save it with transformers' save_pretrained"
_OTHER_FORMATS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "*.gguf": ("a GGUF file of llama.cpp", "give the file itself: --model FILE.gguf, or owner/name:FILE.gguf"),
        "*.ggml": ("GGML weights of llama.cpp", _TAKE_ORIGINAL),
        "consolidated*.pth": ("weights as Meta publishes them", _TAKE_ORIGINAL),
        "consolidated*.safetensors": ("weights as Mistral publishes them", _TAKE_ORIGINAL),
        "tf_model.h5": ("TensorFlow weights", _CONVERT_FIRST),
        "flax_model*.msgpack": ("Flax weights", _CONVERT_FIRST),
        "*.onnx": ("an ONNX graph", _TAKE_ORIGINAL),
        "openvino_model.xml": ("an OpenVINO model", _TAKE_ORIGINAL),
        "*.nemo": ("a NeMo archive", _CONVERT_FIRST),
        "*.engine": ("a compiled TensorRT engine", _TAKE_ORIGINAL),
        "*.mlmodel": ("a Core ML model", _TAKE_ORIGINAL),
        "weights*.npz": ("MLX weights", _TAKE_ORIGINAL),
        "*.distcp": ("a distributed training checkpoint of torch", "convert it with torch's dcp_to_torch_save first"),
        "mp_rank_*": ("a DeepSpeed or Megatron checkpoint", "convert it with the scripts of the library that wrote it"),
        "*.ckpt": ("a training checkpoint", _CONVERT_FIRST),
    }
)
_ADAPTER = "adapter_config.json"


def find_checkpoint(name_or_path: str | Path, *, code: bool = False) -> Path:
    """Return the directory of a checkpoint: ``name_or_path`` if it exists, else the Hub's snapshot of
    ``owner/name[@revision]``.

    Files missing from the Hub's cache are downloaded; without a network the cache must hold all of them. ``code`` also
    downloads the repository's Python code, which this function never runs.

    Raises :class:`CheckpointError` for a name of neither kind, for a file instead of a directory, for other formats, and if
    the Hub has no such repository or is unreachable.
    """
    path = Path(name_or_path)
    if present(path):
        if path.is_file() and path.suffix.lower() == ".gguf":
            return unpack_gguf(path)
        if path.is_file():
            refuse_other_formats(path.parent, path.name)
            raise CheckpointError(f"{path}: is a file; expected a directory with config.json and the tensor files")
        refuse_other_formats(path)
        return path
    name = str(name_or_path)
    repository, _, file = name.partition(":")
    if file.lower().endswith(".gguf") and _REPOSITORY_NAME.fullmatch(repository):
        return unpack_gguf(_fetch_file(repository, file))
    if not _REPOSITORY_NAME.fullmatch(name):
        return path  # the reader reports the missing file
    return _snapshot(name, code)


def _fetch_file(spec: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    name, _, revision = spec.partition("@")
    try:
        return Path(hf_hub_download(name, file, revision=revision or None))
    except Exception as error:  # its network stack raises many kinds
        raise CheckpointError(f"{spec}: the Hub's file {shown(file)} can't be had: {describe(error)}") from error


def _snapshot(spec: str, code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    name, _, revision = spec.partition("@")
    wanted = [*_FETCHED_FILES, *(_CODE_FILES if code else ())]

    def fetch(allowed: list[str]) -> Path:
        ignored = list(_IGNORED_FILES)
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=allowed, ignore_patterns=ignored))

    hint = "; expected a directory that is there, or a repository of the Hugging Face Hub"
    try:
        found = fetch(wanted)
        # Without a network, every requested file must be in the cache, so optional files are requested only if needed.
        older = () if any(found.glob("*.safetensors")) else _TORCH_FILES
        vocabulary = () if present(found / "tokenizer.json") else _VOCABULARY_FILES
        if older or vocabulary:
            found = fetch([*wanted, *older, *vocabulary])
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{spec}: there's no such directory, the Hub's cache doesn't hold it, and the Hub can't be reached{hint}"
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(f"{spec}: its owner asks for consent on the Hub first; give it there, and log in") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{spec}: the Hub's repository has no revision {shown(revision)}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{spec}: no such directory, and the Hub shows you no such repository{hint}") from error
    except Exception as error:  # its network stack raises many kinds
        raise CheckpointError(f"{spec}: the Hub's snapshot can't be had: {describe(error)}{hint}") from error
    refuse_other_formats(found)
    if not any(any(found.glob(pattern)) for pattern in _TENSOR_FILES):
        _refuse_names(Path(spec), _files_of_repository(name, revision))  # files of other formats were not downloaded
    return found


def _files_of_repository(name: str, revision: str) -> list[str]:
    """Return the file names of a Hub repository, or an empty list if the Hub cannot list them."""
    from huggingface_hub import list_repo_files

    try:
        return sorted(list_repo_files(name, revision=revision or None))
    except Exception:  # its network stack raises many kinds; the reader of the snapshot reports the missing file
        return []


def refuse_other_formats(directory: Path, file: str | None = None) -> None:
    """Raise :class:`CheckpointError` if ``directory`` (or ``file`` in it) has an unsupported format.

    A directory that also has supported tensor files is accepted. An adapter is always refused, because its weights change the
    model's.
    """
    if file in (None, _ADAPTER) and present(directory / _ADAPTER):
        raise CheckpointError(
            f"{directory / _ADAPTER}: is a LoRA adapter, and adapters aren't supported; merge it into its base model with "
            "peft's merge_and_unload and save_pretrained, and give that directory"
        )
    try:
        names = [file] if file is not None else sorted(path.name for path in directory.iterdir())
    except OSError:
        return  # the reader reports the error
    supported = _TENSOR_FILES if file is None else ()
    lower = [name.lower() for name in names]
    if any(fnmatchcase(name, pattern) and not name.startswith("consolidated") for name in lower for pattern in supported):
        return
    _refuse_names(directory, names)


def _refuse_names(directory: Path, names: list[str]) -> None:
    for pattern, (kind, instead) in _OTHER_FORMATS.items():
        for name in names:
            if fnmatchcase(name.lower(), pattern):
                raise CheckpointError(f"{directory / name}: is {kind}, a format that isn't supported; {instead}")
