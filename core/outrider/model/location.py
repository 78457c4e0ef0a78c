"""Where a checkpoint is: a directory, or a name on the Hugging Face Hub; and other formats, refused by name.

Names go through ``huggingface_hub``: what its cache holds is used, also without a network, and what it lacks is fetched.
Its own settings hold (``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

from outrider.errors import CheckpointError, shown
from outrider.model.reading import describe, present

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,200})?")
_READ = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model", "*.tiktoken", "tiktoken.model")
_WORDS = ("merges.txt", "vocab.txt", "spiece.model")
"""What a tokenizer is made of besides, where there's no tokenizer.json."""
_OLDER = ("pytorch_model*.bin",)
_CODE = ("*.py",)
_TENSORS = ("*.safetensors", *_OLDER)
_COPIES = ("consolidated*", "*/*.safetensors", "*/*.bin")
"""Tensor files that are never read: Mistral's own, and those of subfolders."""

_ORIGINAL = "take the repository that has config.json and model.safetensors, as Hugging Face writes them"
_CONVERT = "load it with the library that wrote it and save it with transformers' save_pretrained"
_OTHERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "*.gguf": ("GGUF weights of llama.cpp", _ORIGINAL + "; most GGUF files name the one that they were made from"),
        "*.ggml": ("GGML weights of llama.cpp", _ORIGINAL),
        "consolidated*.pth": ("weights as Meta publishes them", _ORIGINAL),
        "consolidated*.safetensors": ("weights as Mistral publishes them", _ORIGINAL),
        "tf_model.h5": ("TensorFlow weights", _CONVERT),
        "flax_model*.msgpack": ("Flax weights", _CONVERT),
        "*.onnx": ("an ONNX graph", _ORIGINAL),
        "openvino_model.xml": ("an OpenVINO model", _ORIGINAL),
        "*.nemo": ("a NeMo archive", _CONVERT),
        "*.engine": ("a compiled TensorRT engine", _ORIGINAL),
        "*.mlmodel": ("a Core ML model", _ORIGINAL),
        "weights*.npz": ("MLX weights", _ORIGINAL),
        "*.distcp": ("a distributed training checkpoint of torch", "convert it with torch's dcp_to_torch_save first"),
        "mp_rank_*": ("a DeepSpeed or Megatron checkpoint", "convert it with the scripts of the library that wrote it"),
        "*.ckpt": ("a training checkpoint", _CONVERT),
    }
)
_ADAPTER = "adapter_config.json"


def find_checkpoint(given: str | Path, *, code: bool = False) -> Path:
    """The directory of a checkpoint: ``given`` itself where it's there, else the Hub's snapshot of ``owner/name[@revision]``.

    A snapshot comes out of the Hub's cache, and what that lacks is fetched; without a network the cache alone serves.
    ``code``: with the Python code that a repository brings, which is never run here.

    Raises :class:`CheckpointError` for a name that is neither, for a file in place of a directory, for other formats, and
    where the Hub has no such repository or can't be reached.
    """
    path = Path(given)
    if present(path):
        if path.is_file():
            refuse_other_formats(path.parent, path.name)
            raise CheckpointError(f"{path}: is a file; expected a directory with config.json and the tensor files")
        refuse_other_formats(path)
        return path
    name = str(given)
    if not _NAME.fullmatch(name):
        return path  # reading it says what is missing
    return _snapshot(name, code)


def _snapshot(given: str, code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    name, _, revision = given.partition("@")
    wanted = [*_READ, *(_CODE if code else ())]

    def fetch(allowed: list[str]) -> Path:
        ignored = list(_COPIES)
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=allowed, ignore_patterns=ignored))

    end = "; expected a directory that is there, or a repository of the Hugging Face Hub"
    try:
        found = fetch(wanted)
        # No more than is needed: without a network, all that is asked for must be in the cache.
        older = () if any(found.glob("*.safetensors")) else _OLDER
        words = () if present(found / "tokenizer.json") else _WORDS
        if older or words:
            found = fetch([*wanted, *older, *words])
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{given}: there's no such directory, the Hub's cache doesn't hold it, and the Hub can't be reached{end}"
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(f"{given}: its owner asks for consent on the Hub first; give it there, and log in") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{given}: the Hub's repository has no revision {shown(revision)}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{given}: no such directory, and the Hub shows you no such repository{end}") from error
    except Exception as error:  # its network stack raises many kinds
        raise CheckpointError(f"{given}: the Hub's snapshot can't be had: {describe(error)}{end}") from error
    refuse_other_formats(found)
    if not any(any(found.glob(pattern)) for pattern in _TENSORS):
        _refuse_names(Path(given), _listed(name, revision))  # weights of other formats haven't come
    return found


def _listed(name: str, revision: str) -> list[str]:
    """The files of a repository of the Hub; none where that can't be asked."""
    from huggingface_hub import list_repo_files

    try:
        return sorted(list_repo_files(name, revision=revision or None))
    except Exception:  # its network stack raises many kinds; reading the snapshot says what is missing
        return []


def refuse_other_formats(directory: Path, file: str | None = None) -> None:
    """Raise :class:`CheckpointError` where ``directory`` (or the ``file`` in it) is of a format that isn't read.

    A directory that also has what we read is no such thing; an adapter is one in any case, since its weights change the
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
        return  # reading it says what is wrong
    ours = _TENSORS if file is None else ()
    lower = [name.lower() for name in names]
    if any(fnmatchcase(name, pattern) and not name.startswith("consolidated") for name in lower for pattern in ours):
        return
    _refuse_names(directory, names)


def _refuse_names(directory: Path, names: list[str]) -> None:
    for pattern, (kind, instead) in _OTHERS.items():
        for name in names:
            if fnmatchcase(name.lower(), pattern):
                raise CheckpointError(f"{directory / name}: is {kind}, a format that isn't supported; {instead}")
