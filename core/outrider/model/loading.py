"""Loading: check every tensor of a checkpoint against what the model needs, then move it to the device, fused.

Nothing is allocated on the device before the whole checkpoint was found to be right.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.device import Backend, CapabilityError, CheckpointError
from outrider.model.config import ModelConfig
from outrider.model.decoder import Decoder
from outrider.model.eagle import EagleHead
from outrider.model.files import CheckpointFiles, open_checkpoint
from outrider.model.mapping import (
    Target,
    decoder_targets,
    decoder_weights,
    eagle_targets,
    eagle_weights,
    ignored,
    vision_name,
)
from outrider.model.rope import RopeConfig

Progress = Callable[[str, int, int], None]
"""Called with the name of the tensor just read, how many are done, and how many there are."""

_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_SHOWN = 5


def load_decoder(directory: str | Path, *, backend: Backend, dtype: torch.dtype, progress: Progress | None = None) -> Decoder:
    """Load a decoder's checkpoint onto ``backend`` in ``dtype``.

    Blocks until the weights are on the device, so that any stream may read them. Raises :class:`CheckpointError` that
    names file and tensor when anything is missing, superfluous, of the wrong shape or unreadable, and
    :class:`CapabilityError` when the backend doesn't compute in ``dtype``.
    """
    config = ModelConfig.from_checkpoint(directory)
    files = open_checkpoint(Path(directory))
    targets = decoder_targets(config, files.tensors)
    optional = {"lm_head.weight"} if config.tie_embeddings else set()
    if config.vision is not None:
        optional |= {key for key in files.tensors if vision_name(key) is not None}  # load_vision checks them
    check_tensors(files, targets, optional=optional)
    if config.tie_embeddings and "lm_head.weight" in files.tensors:
        _check_tied(files, "lm_head.weight", targets[0].pieces[0].key)
    with placed(backend, dtype):
        weights = load_tensors(files, targets, dtype=dtype, device=backend.device, progress=progress)
        return Decoder(config, decoder_weights(config, weights), backend.kernels)


def load_eagle(
    directory: str | Path, *, target: Decoder, backend: Backend, dtype: torch.dtype, progress: Progress | None = None
) -> EagleHead:
    """Load an EAGLE head for ``target``: its published format, safetensors or ``pytorch_model.bin``.

    As :func:`load_decoder`; also a head whose width, vocabulary or dtype isn't the target's is an error.
    """
    directory = Path(directory)
    config = ModelConfig.from_checkpoint(directory)
    files = open_checkpoint(directory)
    for name, wanted in (("hidden_size", target.config.hidden_size), ("vocab_size", target.config.vocab_size)):
        found = getattr(config, name)
        if found != wanted:
            raise CheckpointError(
                f"{directory / 'config.json'}: the head's {name} is {found}, the target's is {wanted}: this head belongs "
                "to another model"
            )
    if dtype != target.dtype:
        raise CheckpointError(f"{directory}: the head can't be loaded as {dtype}, its target is {target.dtype}")
    present = frozenset(files.tensors)
    config = replace(
        config,
        attention_bias="layers.0.self_attn.q_proj.bias" in present,
        output_bias="layers.0.self_attn.o_proj.bias" in present,
    )
    config = replace(config, rope=_head_rope(directory, config, target.config))
    targets = eagle_targets(config, present)
    check_tensors(files, targets, optional=set())
    with placed(backend, dtype):
        weights = load_tensors(files, targets, dtype=dtype, device=backend.device, progress=progress)
        return EagleHead(config, eagle_weights(config, weights, embedding=target.weights.embedding), target)


def _head_rope(directory: Path, head: ModelConfig, target: ModelConfig) -> RopeConfig:
    """A head takes the target's positions, so one without mrope gets its target's axes: on text they're equal."""
    sections = head.rope.sections or target.rope.sections
    if sections and (not target.rope.sections or sum(sections) != head.head_size // 2):
        raise CheckpointError(
            f"{directory / 'config.json'}: rope sections of the head {list(head.rope.sections)} (head size "
            f"{head.head_size}) don't go with those of the target {list(target.rope.sections)}"
        )
    return replace(head.rope, sections=sections)


def check_tensors(files: CheckpointFiles, targets: Sequence[Target], *, optional: set[str]) -> None:
    """Raise unless the files hold exactly the pieces of ``targets``, each in its shape."""
    wanted = {piece.key: piece.shape for target in targets for piece in target.pieces}
    missing = [key for key in wanted if key not in files.tensors]
    extra = sorted(key for key in files.tensors if key not in wanted and key not in optional and not ignored(key))
    if missing or extra:
        parts = []
        if missing:
            shapes = [f"{key!r} {list(wanted[key])}" for key in missing]
            parts.append(f"missing: {_some(shapes)}")
        if extra:
            parts.append(f"not expected: {_some([f'{key!r} {list(files.shape(key))}' for key in extra])}")
        raise CheckpointError(f"{files.origin}: the tensors aren't those of the config; {'; '.join(parts)}")
    for key, shape in wanted.items():
        if files.shape(key) != shape:
            raise CheckpointError(
                f"{files.tensors[key].path}: tensor {key!r} has shape {list(files.shape(key))}, expected {list(shape)}"
            )


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _check_tied(files: CheckpointFiles, head: str, embedding: str) -> None:
    """A config that ties the embeddings may come with a copy of them, but not with another head."""
    if files.shape(head) != files.shape(embedding) or not torch.equal(files.read(head), files.read(embedding)):
        raise CheckpointError(
            f"{files.tensors[head].path}: tensor {head!r} differs from {embedding!r}, but the config ties them"
        )


@contextmanager
def placed(backend: Backend, dtype: torch.dtype) -> Generator[None]:
    """A scope of a stream of its own for the work of loading; its end waits for that work."""
    usable = backend.capabilities.dtypes & _DTYPES
    if dtype not in usable:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in usable))
        raise CapabilityError(f"{backend.label} can't run a model in {dtype}; it declares {names}")
    stream = backend.create_stream("load")
    with backend.on(stream):
        yield
    stream.synchronize()


def load_tensors(
    files: CheckpointFiles,
    targets: Sequence[Target],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> dict[str, Tensor]:
    """Weights by the model's name for them, on the device."""
    total = sum(len(target.pieces) for target in targets)
    done = 0
    weights = {}
    for target in targets:
        weight = torch.empty(target.shape, dtype=dtype, device=device)
        row = 0
        for piece in target.pieces:
            weight[row : row + piece.shape[0]].copy_(files.read(piece.key).to(dtype))
            row += piece.shape[0]
            done += 1
            if progress is not None:
                progress(piece.key, done, total)
        weights[target.name] = weight
    return weights
