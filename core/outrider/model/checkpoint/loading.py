"""Loading of a decoder's checkpoint onto a device: checks of its tensors, and their transfer.

Nothing is allocated on the device before the whole checkpoint has been checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.device import CACHE_FORMATS, Backend, CapabilityError, ConfigError, KernelSet, Stream
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.bulk import TensorRead, read_parts
from outrider.model.checkpoint.expert_stacks import dequantized_stacks, with_model_stacks
from outrider.model.checkpoint.files import CheckpointFiles, Piece, Target, wrap_read_errors
from outrider.model.checkpoint.mapping import (
    OTHER_MODALITIES,
    check_count,
    decoder_stem,
    decoder_targets,
    decoder_weights,
    head_key,
    is_unused_tensor,
    mtp_tensors,
    unread_keys,
    vision_name,
)
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.config.layer_configs import HYBRID_FAMILIES
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.decoder import Decoder
from outrider.model.layers.ranks import ModelRanks, or_single_rank
from outrider.model.quantization import Quantization, QuantizedMode, read_quantization
from outrider.model.quantization.cache import KEY, cache_format, read_scales, resolve_cache_format, scale_keys
from outrider.model.quantization.storages import SUFFIXES

Progress = Callable[[str, int, int], None]
"""Callback with the name of the tensor just read, the bytes read so far and their total, in the dtype of the model."""

_MODEL_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_MAX_LISTED = 5


def check_tensors(
    files: CheckpointFiles,
    targets: Sequence[Target],
    *,
    optional: set[str],
    quantization: Quantization | None = None,
    backend: Backend | None = None,
) -> None:
    """Raise :class:`CheckpointError` unless the files hold exactly the pieces of ``targets``, each in its shape.

    ``quantization`` adds the stored tensors of quantized weights. With a ``backend``, raises :class:`CapabilityError` if it
    has no products for them.
    """
    if quantization is None:
        wanted = {piece.key: piece.shape for target in targets for piece in target.pieces}
    else:
        wanted = {piece.key: piece.shape for target in targets for piece in quantization.stored_pieces(files, target)}
        optional = optional | quantization.unused_tensors(files, targets)
        if backend is not None:
            quantization.check(files, targets, backend)
    missing = [key for key in wanted if key not in files.tensors]
    extra = sorted(key for key in files.tensors if key not in wanted and key not in optional and not is_unused_tensor(key))
    if missing or extra:
        parts = []
        if missing:
            shapes = [f"{key!r} {list(wanted[key])}" for key in missing[:_MAX_LISTED]]
            parts.append(f"missing: {_list_with_count(shapes, len(missing))}")
        if extra:
            unexpected = [f"{shown(key)} {list(files.shape(key))}" for key in extra[:_MAX_LISTED]]
            parts.append(f"not expected: {_list_with_count(unexpected, len(extra))}")
        parts += _explain_quantized(extra, quantization)
        raise CheckpointError(f"{files.origin}: the tensors aren't those of the config; {'; '.join(parts)}")
    for key, shape in wanted.items():
        if files.shape(key) != shape:
            raise CheckpointError(
                f"{files.tensors[key].path}: tensor {key!r} has shape {list(files.shape(key))}, expected {list(shape)}"
            )


def _explain_quantized(extra: Sequence[str], quantization: Quantization | None) -> list[str]:
    """Return a message for tensors ``extra`` that belong to quantized weights which the config doesn't declare; empty for
    other tensors.
    """
    if not any(key.rpartition(".")[2] in SUFFIXES for key in extra):
        return []
    if quantization is None:
        return [
            "they're of quantised weights, and config.json has no quantization_config: fetch the one that belongs to them"
        ]
    return [f"they're of quantised weights, and {quantization.path} ({quantization.method}) says that these aren't stored so"]


def _list_with_count(names: Sequence[str], count: int) -> str:
    rest = f" and {count - len(names)} more" if count > len(names) else ""
    return ", ".join(names) + rest


@contextmanager
def loading_stream(backend: Backend, dtype: torch.dtype) -> Generator[Stream]:
    """Open the scope of a new stream for loading, and wait for its work at the end.

    Raises :class:`CapabilityError` if the device doesn't compute in ``dtype``.
    """
    usable = backend.capabilities.dtypes & _MODEL_DTYPES
    if dtype not in usable:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in usable))
        raise CapabilityError(f"{backend.label} can't run a model in {dtype}; it declares {names}")
    stream = backend.create_stream("load")
    with backend.on(stream):
        yield stream
    stream.synchronize()


def load_tensors(
    files: CheckpointFiles,
    targets: Sequence[Target],
    *,
    dtype: torch.dtype,
    backend: Backend,
    stream: Stream,
    progress: Progress | None,
    quantization: Quantization | None = None,
) -> dict[str, Any]:
    """Load the weights of ``targets`` onto the device. Return them by the model's names, valid after the work of ``stream``.

    The caller has opened the scope of ``stream``. Weights are tensors, or quantized weights as ``quantization`` declares.
    Tensors that are stored in ``dtype`` are read in bulk; others are converted one by one.
    """
    bytes_by_key = Counter[str]()
    for piece in (piece for target in targets for piece in target.pieces):
        bytes_by_key[piece.key] += math.prod(piece.read_shape) * dtype.itemsize
    total, num_done = bytes_by_key.total(), 0

    def done(key: str) -> None:
        nonlocal num_done
        num_done += bytes_by_key.pop(key, 0)  # pieces of one tensor are read one after the other
        if progress is not None:
            progress(key, num_done, total)

    weights: dict[str, Any] = {}
    parts: list[TensorRead] = []
    cast: list[tuple[Piece, Tensor]] = []
    for target in targets:
        if quantization is not None and quantization.has_quantized_piece(files, target):
            weights[target.name] = quantization.load(files, target, dtype=dtype, device=backend.device, done=done)
            continue
        stored = torch.promote_types(dtype, torch.float32) if target.wide else dtype
        weight = weights[target.name] = torch.empty(target.shape, dtype=stored, device=backend.device)
        row = 0
        for piece in target.pieces:
            rows = weight[row : row + piece.read_shape[0]]
            row += rows.shape[0]
            extent = None if piece.paired else files.extent(piece.key)
            if extent is not None and extent.dtype == stored == dtype:  # bulk reads have one dtype
                parts.append(TensorRead(piece.key, extent.sliced(piece.shape, piece.tensor_slice), rows))
            else:
                cast.append((piece, rows))
        if target.padding:
            weight[row:].zero_()
    read_parts([part for part in parts if part.destination.numel()], backend, stream, done)
    for piece, rows in cast:
        read = piece.in_model_order(files.read_tensor(piece.key, piece.tensor_slice))
        rows.copy_(read.to(rows.dtype).reshape(rows.shape))
        done(piece.key)
    for target in targets:
        if target.offset:
            weights[target.name].add_(target.offset)
    return weights


def load_decoder(
    directory: str | Path,
    *,
    backend: Backend,
    dtype: torch.dtype,
    progress: Progress | None = None,
    ranks: ModelRanks | None = None,
    quantized: QuantizedMode = "kernels",
    kv_dtype: str = "auto",
    kernels: KernelSet | None = None,
    drafts: bool = False,
    positions: int = 0,
) -> Decoder:
    """Load a decoder's checkpoint onto ``backend`` in ``dtype``. Blocks until the weights are on the device.

    ``ranks``: the tensor-parallel ranks; only this rank's slices are read. ``quantized``: how quantized weights are loaded.
    ``kv_dtype``: dtype of the KV cache, as in EngineConfig. ``kernels``: kernels that the decoder calls, by default those of
    ``backend``. ``drafts``: true for a draft model. ``positions``: the least number of positions that the decoder
    must run at, whatever its own context is.

    Raises :class:`CheckpointError` with file and tensor if a tensor is missing, superfluous, of a wrong shape or unreadable.
    Raises :class:`CapabilityError` if the backend doesn't compute in ``dtype``, or has no kernels for the quantized weights
    or the KV cache.
    """
    plan = plan_decoder(
        directory,
        backend=backend,
        dtype=dtype,
        ranks=ranks,
        quantized=quantized,
        kv_dtype=kv_dtype,
        kernels=kernels,
        drafts=drafts,
        positions=positions,
    )
    return plan.load(progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderPlan:
    """A decoder whose checkpoint headers were read and checked. :meth:`load` reads the weights."""

    native: ClassVar[bool] = True
    """True, as for every decoder that the plan loads, see :attr:`LanguageModel.native`."""
    config: ModelConfig
    """Shape of this rank's part of the decoder."""
    backend: Backend
    dtype: torch.dtype
    kernels: KernelSet
    ranks: ModelRanks
    files: CheckpointFiles
    targets: list[Target]
    quantization: Quantization | None
    format: str | None
    """Format of the KV cache; None for the model's dtype."""
    scales: tuple[tuple[Tensor, Tensor], ...]
    """Scales of keys and values of each of ``ModelConfig.cached_layers``; empty without stored scales."""

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values in the KV cache."""
        return self.dtype if self.format is None else CACHE_FORMATS[self.format]

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights on the device. Kernels may lay out quantized weights in a few more."""
        return sum(map(self._target_bytes, self.targets))

    def _target_bytes(self, target: Target) -> int:
        quantization, files = self.quantization, self.files
        if quantization is None or quantization.mode == "dequantize" or not quantization.has_quantized_piece(files, target):
            stored = torch.promote_types(self.dtype, torch.float32) if target.wide else self.dtype
            return math.prod(target.shape) * stored.itemsize
        found = 0
        for piece in target.pieces:
            parts = quantization.stored_pieces(files, replace(target, pieces=(piece,)))
            whole = sum(math.prod(part.shape) * (files.dtype(part.key) or torch.int8).itemsize for part in parts)
            found += whole * math.prod(piece.read_shape) // math.prod(piece.shape)
        return found

    def load(self, progress: Progress | None = None) -> Decoder:
        """Load the weights and return the decoder. Blocks until they are on the device. Raises :class:`CheckpointError` for
        unreadable tensors.
        """
        with loading_stream(self.backend, self.dtype) as stream:
            weights = load_tensors(
                self.files,
                self.targets,
                dtype=self.dtype,
                backend=self.backend,
                stream=stream,
                progress=progress,
                quantization=self.quantization,
            )
            record = decoder_weights(self.config, weights)
            if self.format is not None:
                formats = [
                    cache_format(self.format, scales, self.config, dtype=self.dtype, device=self.backend.device)
                    for scales in self.scales or [None] * len(self.config.cached_layers)
                ]
                by_layer = {index: formats[self.config.cache_index(index)] for index in self.config.attention_layers}
                layers = enumerate(record.layers)
                record = replace(record, layers=tuple(replace(layer, cache=by_layer.get(index)) for index, layer in layers))
            with wrap_read_errors(self.files.origin, "a decoder"):
                return Decoder(self.config, record, self.kernels, self.ranks)


def plan_decoder(
    directory: str | Path,
    *,
    backend: Backend,
    dtype: torch.dtype,
    ranks: ModelRanks | None = None,
    quantized: QuantizedMode = "kernels",
    kv_dtype: str = "auto",
    kernels: KernelSet | None = None,
    drafts: bool = False,
    positions: int = 0,
) -> DecoderPlan:
    """Read and check the headers of a decoder's checkpoint. Arguments and errors are those of :func:`load_decoder`."""
    kernels = backend.kernels_in_use if kernels is None else kernels
    config = read_model_config(Path(directory), drafts=drafts)
    config.check_kernels(kernels)
    quantization = read_quantization(Path(directory), mode=quantized)
    packed = quantization is not None and quantization.packs_stacks(backend)
    files = with_model_stacks(config, open_checkpoint(Path(directory)), packed=packed)
    config = replace(_untie(config, files), max_context=max(config.max_context, positions))
    ranks = or_single_rank(ranks)
    shards = ranks.shards
    if shards.divides_experts and config.experts is None and not drafts:
        raise ConfigError(f"{directory} has no experts to divide among ranks; run it without expert parallelism")
    local = shards.local(config, str(directory))
    check_count(config, files.tensors, files.origin)
    targets = decoder_targets(config, files.tensors, shards)
    stem = decoder_stem(files.tensors)
    optional = mtp_tensors(files.tensors)  # the heads' loader checks them
    if config.sandwich is not None or config.latent is not None:  # they run on text alone
        optional |= {key for key in files.tensors if key.startswith(OTHER_MODALITIES)}
    if config.sandwich is not None:
        optional |= unread_keys(config, files.tensors, stem)
    if config.tie_embeddings:
        optional.add(head_key(files.tensors))
    if config.vision is not None or config.family in HYBRID_FAMILIES:
        optional |= {key for key in files.tensors if vision_name(key) is not None}  # load_vision checks them
    strategy = None if quantization is None or kv_dtype == "plain" else quantization.cache_strategy
    format = resolve_cache_format(kv_dtype, strategy, kernels, backend, str(files.origin))
    prefixes = {index: f"{stem}layers.{index}" for index in config.attention_layers}
    scales: list[tuple[Tensor, Tensor]] = []
    if quantization is not None:
        stored_scales = scale_keys(files, prefixes.values())
        optional |= stored_scales
        if stored_scales and format is not None and strategy is None:
            strategy = "tensor"  # the config doesn't announce them
    if strategy is not None and config.latent is not None:
        raise CheckpointError(
            f"{files.origin}: the KV cache has stored scales ({KEY}), which a cache of latent vectors doesn't take; keep it "
            "in the model's dtype with --kv-dtype plain"
        )
    if strategy is not None:
        scales = [read_scales(files, prefixes[index], strategy, config.num_kv_heads) for index in config.cached_layers]
    check_tensors(
        files, decoder_targets(config, files.tensors), optional=optional, quantization=quantization, backend=backend
    )
    heads = slice(*shards.kv_heads(config))
    return DecoderPlan(
        config=local,
        backend=backend,
        dtype=dtype,
        kernels=kernels,
        ranks=ranks,
        files=files,
        targets=targets,
        quantization=quantization,
        format=format,
        scales=tuple((keys[heads], values[heads]) for keys, values in scales),
    )


def header_bytes(plan: DecoderPlan, draft_dir: Path) -> int:
    """Return the bytes of a draft model's or head's weights, computed from its file headers in the target's dtype unless
    stored in 8 bits.

    If the draft is part of the target's own checkpoint, only its heads of multi-token prediction count. Of experts, the
    part of this rank counts.
    """
    own = draft_dir.resolve() == plan.files.origin.parent.resolve()
    files = plan.files if own else _with_draft_stacks(open_checkpoint(draft_dir), plan, draft_dir)
    found = 0
    for key in mtp_tensors(files.tensors) if own else files.tensors:
        stored = files.dtype(key) or torch.int8
        ranks = plan.ranks.shards.mlp.size if ".experts." in key else 1
        found += math.prod(files.shape(key)) * (1 if stored.itemsize == 1 else plan.dtype.itemsize) // ranks
    return found


def _with_draft_stacks(files: CheckpointFiles, plan: DecoderPlan, draft_dir: Path) -> CheckpointFiles:
    """Return ``files`` with dequantized stacks of experts, unless they stay packed in the mode of the target's weights."""
    dequantized = dequantized_stacks(files)
    if dequantized.tensors.keys() == files.tensors.keys():
        return files
    mode = "kernels" if plan.quantization is None else plan.quantization.mode
    quantization = read_quantization(draft_dir, mode=mode)
    return files if quantization is not None and quantization.packs_stacks(plan.backend) else dequantized


def _untie(config: ModelConfig, files: CheckpointFiles) -> ModelConfig:
    """Return ``config`` with untied embeddings if the files hold an output head that differs from the embedding, as
    transformers does.
    """
    embedding, head = f"{decoder_stem(files.tensors)}embed_tokens.weight", head_key(files.tensors)
    if not config.tie_embeddings or not {head, embedding} <= files.tensors.keys():
        return config
    is_copy = files.shape(head) == files.shape(embedding) and torch.equal(
        files.read_stored(head), files.read_stored(embedding)
    )
    return config if is_copy else replace(config, tie_embeddings=False)
