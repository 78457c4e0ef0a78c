"""Loading of a decoder's checkpoint onto a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.device import Backend, KernelSet
from outrider.model.checkpoint.expert_mapping import check_count
from outrider.model.checkpoint.files import CheckpointFiles
from outrider.model.checkpoint.mapping import decoder_stem, decoder_targets, decoder_weights, is_mtp_tensor, vision_name
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.checkpoint.reading import wrap_read_errors
from outrider.model.checkpoint.tensor_loading import Progress, check_tensors, load_tensors, loading_stream
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.config.layer_configs import HYBRID_FAMILIES
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.decoder import Decoder
from outrider.model.layers.ranks import ModelRanks, or_single_rank
from outrider.model.quantization import QuantizedMode, read_quantization
from outrider.model.quantization.cache import CacheScheme, cache_format, read_scales, resolve_cache_format, scale_keys

_HEAD = "lm_head.weight"


def load_decoder(
    directory: str | Path,
    *,
    backend: Backend,
    dtype: torch.dtype,
    progress: Progress | None = None,
    ranks: ModelRanks | None = None,
    quantized: QuantizedMode = QuantizedMode.KERNELS,
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
    kernels = backend.kernels_in_use if kernels is None else kernels
    config = read_model_config(Path(directory), drafts=drafts)
    files = open_checkpoint(Path(directory))
    config = replace(_untie(config, files), max_context=max(config.max_context, positions))
    shards = or_single_rank(ranks).shards
    local = shards.local(config, str(directory))
    check_count(config, files.tensors, files.origin)
    targets = decoder_targets(config, files.tensors, shards)
    optional = {key for key in files.tensors if is_mtp_tensor(key)}  # the heads' loader checks them
    if config.tie_embeddings:
        optional.add(_HEAD)
    if config.vision is not None or config.family in HYBRID_FAMILIES:
        optional |= {key for key in files.tensors if vision_name(key) is not None}  # load_vision checks them
    quantization = read_quantization(Path(directory), mode=quantized)
    scheme = None if quantization is None or kv_dtype == "plain" else quantization.cache_scheme
    format = resolve_cache_format(kv_dtype, scheme, kernels, backend, str(files.origin))
    stem = decoder_stem(files.tensors)
    prefixes = [f"{stem}layers.{index}" for index in config.attention_layers]
    scales: list[tuple[Tensor, Tensor]] = []
    if quantization is not None:
        stored_scales = scale_keys(files, prefixes)
        optional |= stored_scales
        if stored_scales and format is not None and scheme is None:
            scheme = CacheScheme()  # the config doesn't announce them
    if scheme is not None:
        scales = [read_scales(files, prefix, scheme, config.num_kv_heads) for prefix in prefixes]
    check_tensors(
        files, decoder_targets(config, files.tensors), optional=optional, quantization=quantization, backend=backend
    )
    with loading_stream(backend, dtype) as stream:
        weights = load_tensors(
            files, targets, dtype=dtype, backend=backend, stream=stream, progress=progress, quantization=quantization
        )
        record = decoder_weights(local, weights)
        if format is not None:
            heads_of_rank = slice(*shards.kv_heads(config))
            formats = [
                cache_format(
                    format,
                    (scales[index][0][heads_of_rank], scales[index][1][heads_of_rank]) if scales else None,
                    local,
                    dtype=dtype,
                    device=backend.device,
                )
                for index in range(len(config.attention_layers))
            ]
            by_layer = dict(zip(config.attention_layers, formats, strict=True))
            layers = enumerate(record.layers)
            record = replace(record, layers=tuple(replace(layer, cache=by_layer.get(index)) for index, layer in layers))
        with wrap_read_errors(files.origin, "a decoder"):
            return Decoder(local, record, kernels, ranks)


def _untie(config: ModelConfig, files: CheckpointFiles) -> ModelConfig:
    """Return ``config`` without the tie if the files hold an output head that differs from the embedding, as transformers
    does.
    """
    embedding = f"{decoder_stem(files.tensors)}embed_tokens.weight"
    if not config.tie_embeddings or not {_HEAD, embedding} <= files.tensors.keys():
        return config
    is_copy = files.shape(_HEAD) == files.shape(embedding) and torch.equal(
        files.read_stored(_HEAD), files.read_stored(embedding)
    )
    return config if is_copy else replace(config, tie_embeddings=False)
