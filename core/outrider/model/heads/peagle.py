"""P-EAGLE: an EAGLE-3 head trained to draft several tokens in one pass (Hui et al. 2026, arXiv 2602.01469).

At positions after the last known token, a mask token replaces the unknown token and one learned state replaces the target's
states. Such a position depends on earlier positions only through their keys and values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from outrider.device import Backend
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import CheckpointFiles
from outrider.model.checkpoint.pieces import Piece, Target
from outrider.model.checkpoint.reading import read_json
from outrider.model.checkpoint.tensor_loading import Progress, loading_stream
from outrider.model.config.config_fields import is_whole
from outrider.model.config.model_config import ModelConfig
from outrider.model.heads.eagle import Eagle3Head, Eagle3Weights, fuse
from outrider.model.heads.head_loading import check_eagle3
from outrider.model.layers.language_model import LanguageModel
from outrider.model.quantization import QuantizedMode

_MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_MASK_STATE = "mask_hidden"


@dataclass(frozen=True, kw_only=True, slots=True)
class PEagleWeights(Eagle3Weights):
    """Device tensors of a P-EAGLE head."""

    mask_state: Tensor
    """State [H] that replaces the fused target states at positions where these are unknown."""


class PEagleHead(Eagle3Head):
    """A head that drafts several tokens in one pass. Positions without target states read ``mask_state`` and
    ``mask_token``.
    """

    weights: PEagleWeights

    def __init__(
        self,
        config: ModelConfig,
        weights: PEagleWeights,
        target: LanguageModel,
        *,
        mask_token: int,
        aux_hidden_state_layers: tuple[int, ...],
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        super().__init__(
            config,
            weights,
            target,
            aux_hidden_state_layers=aux_hidden_state_layers,
            norm_before_residual=norm_before_residual,
            norm_output=norm_output,
        )
        self.mask_token = mask_token


def load_peagle(
    directory: str | Path,
    *,
    target: LanguageModel,
    backend: Backend,
    dtype: torch.dtype,
    progress: Progress | None = None,
    quantized: QuantizedMode = QuantizedMode.KERNELS,
) -> PEagleHead:
    """Load a P-EAGLE head for ``target``.

    The checkpoint is an EAGLE-3 head with the tensor ``mask_hidden`` ([1, 1, 3 Ht], [1, 3 Ht] or [3 Ht]). The config names
    the mask token as ``mask_token_id``, ``pard_token`` or ``ptd_token_id``. Arguments and errors follow :func:`load_eagle3`.
    A mask token that is missing, contradictory or outside the vocabulary raises :class:`CheckpointError`, and so does
    ``parallel_drafting`` false.
    """
    directory = Path(directory)
    file = directory / "config.json"
    found = check_eagle3(directory, target=target, backend=backend, dtype=dtype, quantized=quantized, more=_mask_target)
    mask = _mask_token(file, found.config.vocab_size)
    with loading_stream(backend, dtype) as stream:
        config, weights, extra_weights = found.load_head(target, backend, dtype, stream, progress)
        states = extra_weights[_MASK_STATE].view(1, -1).chunk(len(found.options.layers), dim=-1)
        state = fuse(weights, tuple(each.contiguous() for each in states), config.rms_eps, target.kernels)
        record = PEagleWeights(**{each.name: getattr(weights, each.name) for each in fields(weights)}, mask_state=state[0])
        return PEagleHead(config, record, target, mask_token=mask, **found.head_options)


def _mask_target(files: CheckpointFiles, width: int) -> tuple[Target, ...]:
    """Return the target of the mask state's weight, whichever published shape the file has."""
    shape = files.shape(_MASK_STATE)
    is_published_shape = shape[-1:] == (width,) and math.prod(shape) == width
    return (Target(_MASK_STATE, (Piece(_MASK_STATE, shape if is_published_shape else (1, 1, width)),)),)


def _mask_token(file: Path, vocab: int) -> int:
    raw = read_json(file)
    parallel = raw.get("parallel_drafting")
    if parallel not in (None, True):
        raise CheckpointError(f"{file}: parallel_drafting is {shown(parallel)}, expected true: the head has {_MASK_STATE!r}")
    found = {key: raw[key] for key in _MASK_TOKEN_KEYS if raw.get(key) is not None}
    if not found:
        raise CheckpointError(f"{file}: mask_token_id is missing; add the token that stands for unknown ones in training")
    for key, token in found.items():
        if not is_whole(token, 0, vocab - 1):
            raise CheckpointError(f"{file}: {key} is {shown(token)}, expected a token from 0 to {vocab - 1}")
    if len(set(found.values())) > 1:
        listing = ", ".join(f"{key} {token}" for key, token in found.items())
        raise CheckpointError(f"{file}: the mask token is named in more than one way, and differently ({listing})")
    return int(next(iter(found.values())))
