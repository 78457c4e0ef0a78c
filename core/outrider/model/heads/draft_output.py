"""Smaller weights for drafting: rounded products of a draft head, and an output head in fewer bits or with fewer rows.

:func:`with_vocabulary_size` adjusts a draft model's vocabulary to the target's.

Verification always uses the target's own weights, so the generated tokens don't change; only the acceptance rate does. Each
draft token reads the draft's layers and the whole output head. For an 8B model, a draft of three tokens reads as many head
bytes as seven layers have. Weights in 8 bits halve these bytes. Nearly all text uses a quarter of a vocabulary of 128,000
tokens, and a head with only the rows of that quarter has a quarter of the bytes (Zhao et al. 2025, FR-Spec, 2502.14856).
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.device import Backend, CapabilityError, ConfigError, QuantizedWeight
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS, weight_format
from outrider.device.kernels.weights import Weight, label
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import JSON_LIMIT, present, read_bytes, wrap_read_errors
from outrider.model.checkpoint.loading import loading_stream
from outrider.model.config.config_fields import is_whole
from outrider.model.layers.decoder import Decoder
from outrider.model.layers.language_model import LanguageModel
from outrider.model.layers.ranks import Shard
from outrider.model.media.tokenizer import Tokenizer, has_tokenizer
from outrider.model.quantization.loading import map_scales

DraftFormat = Literal["fp8", "fp8-tensor", "fp8-block", "int8", "int4", "int4-zeros", "int4-32", "mxfp4"]
DRAFT_FORMATS = tuple(WEIGHT_FORMATS)
"""Formats to which a draft's weights are rounded."""
_PRODUCTS = frozenset({"qkv", "output", "gate_up", "down", "fusion", "head"})
"""Last parts of the names of a head's weights that are multiplied with activations."""
_FILE_SUFFIXES = (".json", ".pt")
_EXPECTED_FILE = "expected a list of numbers in JSON, or one that torch saved, without code of its own"
_MAX_TOKENS = 1 << 24
"""Upper limit of a vocabulary's number of tokens, against absurd files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftVocabulary:
    """The tokens that drafts are sampled from."""

    ids: Tensor
    """Token ids, int64 [Vd] on the host, ascending."""
    origin: str
    """Description of the list for error messages."""

    @classmethod
    def load(cls, source: Path | str | int) -> DraftVocabulary:
        """Return the first ``source`` tokens of a vocabulary, or the tokens that file ``source`` lists in any order.

        A ``.json`` file holds a list of numbers. A ``.pt`` file holds a list or a tensor of them, as FR-Spec publishes its
        lists. Raises :class:`ConfigError` for an impossible number of tokens and for a missing file or one without such a
        list, and :class:`CheckpointError` for an unreadable file.
        """
        if isinstance(source, int):
            if not is_whole(source, 1, _MAX_TOKENS):
                raise ConfigError(
                    f"draft_vocabulary is {source}; expected 1 to {_MAX_TOKENS} tokens of the target, or a file of tokens"
                )
            return cls(ids=torch.arange(source, device="cpu"), origin=f"the first {source} tokens")
        path = Path(source)
        ids = torch.tensor(_read_token_list(path), dtype=torch.int64, device="cpu").sort().values
        duplicates = ids[1:][ids[1:] == ids[:-1]]
        if duplicates.numel():
            raise ConfigError(f"draft_vocabulary: {path} lists token {int(duplicates[0])} twice; expected each token once")
        return cls(ids=ids, origin=f"the {ids.numel()} tokens of {path}")

    def check(self, vocabulary: int) -> None:
        """Raise :class:`ConfigError` if a token is outside the target's ``vocabulary``, a number of tokens."""
        if int(self.ids[-1]) >= vocabulary:
            raise ConfigError(
                f"draft_vocabulary is {self.origin}, up to {int(self.ids[-1])}, and the target has tokens 0 to "
                f"{vocabulary - 1}; expected tokens of the target"
            )


def _read_token_list(path: Path) -> list[int]:
    """Return the token ids that ``path`` lists, at least one and none negative. Raises the errors of
    :meth:`DraftVocabulary.load`.
    """
    if path.suffix not in _FILE_SUFFIXES:
        raise ConfigError(f"draft_vocabulary is {path}; expected a number of tokens, or a file {' or '.join(_FILE_SUFFIXES)}")
    if not present(path):
        raise ConfigError(f"draft_vocabulary is {path}, and there is no such file; expected a list of tokens")
    content = read_bytes(path, JSON_LIMIT)
    with wrap_read_errors(path, "a list of tokens", _EXPECTED_FILE):
        if path.suffix == ".json":
            found = json.loads(content)
        else:
            found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    description = shown(found)
    if isinstance(found, Tensor):
        description = f"a tensor of shape {list(found.shape)}"
        found = found.tolist() if found.ndim == 1 else None
    if not isinstance(found, list) or not found:
        raise ConfigError(f"draft_vocabulary: {path} holds {description}; expected a list of tokens, at least one")
    invalid = [each for each in found if not is_whole(each, 0, _MAX_TOKENS - 1)]
    if invalid:
        raise ConfigError(f"draft_vocabulary: {path} lists {shown(invalid[0])}; expected tokens, whole numbers from 0")
    return found


def with_output_head(
    target: LanguageModel, *, backend: Backend, format: str | None = None, vocabulary: DraftVocabulary | None = None
) -> Decoder:
    """Return a decoder for drafting that shares everything with ``target`` except for the output head.

    The new head has the rows of ``vocabulary``, or all rows, in ``format`` (one of DRAFT_FORMATS) or unchanged; a quantized
    head stays in its own format. All
    tensor-parallel ranks hold the same number of rows: a rank with fewer tokens of ``vocabulary`` adds other tokens of its
    own slice, which drafts may then use too.

    Raises :class:`ConfigError` for a target whose head is unknown or cannot be copied this way, and :class:`CapabilityError`
    if the backend has no kernels for ``format``.
    """
    if not isinstance(target, Decoder):
        raise ConfigError(
            "draft_vocabulary is given, and the target runs by transformers' own code, whose output head stays as it is; "
            "leave one of them out"
        )
    if format is not None:
        check_draft_format(format, backend)
    head, ids = target.weights.head, None
    if vocabulary is not None:
        vocabulary.check(target.config.vocab_size)
    with loading_stream(backend, target.dtype):
        if vocabulary is not None:
            rows, ids, width = _rows_of_rank(vocabulary.ids, target.shards.vocabulary, target.config.vocab_size)
            head, ids = _select_rows(head, rows.to(target.device), width), ids.to(target.device)
        if format is not None:
            head = _rounded(head, format)
        return target.with_head(head, ids)


def check_draft_format(format: str, backend: Backend) -> None:
    """Raise :class:`ConfigError` for an unknown format of a draft's weights, and :class:`CapabilityError` if the backend has
    no kernels for the format.
    """
    if format not in DRAFT_FORMATS:
        raise ConfigError(
            f"draft_weights is {shown(format)}; expected one of {', '.join(DRAFT_FORMATS)}, 'stored', or None for the "
            "engine's choice"
        )
    if weight_format(format).elements.name not in backend.capabilities.quantized_formats:
        has = ", ".join(sorted(backend.capabilities.quantized_formats)) or "none"
        raise CapabilityError(
            f"draft_weights is {format}, and {backend.label} has no kernels for that (it declares {has}); leave it out"
        )


def round_products(weights: dict[str, Any], format: str) -> None:
    """Round the unquantized matrices of a head's ``weights`` that multiply activations to ``format``, in place.

    Experts of a mixture stay unquantized, since a drafted token reads few of them.
    """
    for name, weight in weights.items():
        if name.rpartition(".")[2] in _PRODUCTS and len(weight.shape) == 2:
            weights[name] = _rounded(weight, format)


def _rounded(weight: Weight, format: str) -> Weight:
    """Return ``weight`` in ``format``; a weight that is quantised already stays unchanged."""
    return weight_format(format).fitted(weight.shape[1]).quantize(weight) if isinstance(weight, Tensor) else weight


def _rows_of_rank(ids: Tensor, shard: Shard, vocabulary: int) -> tuple[Tensor, Tensor, int]:
    """Return this rank's rows of the head, the tokens of all ranks' rows, and the number of rows per rank.

    ``ids`` are the wanted tokens. A rank that runs out of tokens pads its rows past the end of the vocabulary, and so do all
    later ranks.
    """
    bounds = [Shard(rank, shard.size).uneven(vocabulary) for rank in range(shard.size)]
    wanted = torch.zeros(vocabulary, dtype=torch.bool, device="cpu")
    wanted[ids] = True
    width = max(int(wanted[first:last].sum()) for first, last in bounds)
    for first, last in bounds:
        part = wanted[first:last]
        others = (~part).nonzero().squeeze(1)
        part[others[: width - int(part.sum())]] = True
    first, last = bounds[shard.rank]
    return wanted[first:last].nonzero().squeeze(1), wanted.nonzero().squeeze(1), width


def _select_rows(head: Weight, rows: Tensor, width: int) -> Weight:
    """Return ``rows`` of an output head, padded with zero rows up to ``width``."""
    padding = width - rows.shape[0]
    if isinstance(head, Tensor):
        return torch.nn.functional.pad(head.index_select(0, rows), (0, 0, 0, padding))
    if not isinstance(head, QuantizedWeight) or head.block[0] != 1 or padding:
        raise ConfigError(
            f"draft_vocabulary is given, and the target's output head is {label(head)}"
            + (", shared out among ranks" if padding else "")
            + ": its rows can't be taken one by one; leave draft_vocabulary out"
        )
    # index_select does not support every quantized dtype, so it works on bytes.
    data = head.data.view(torch.uint8).index_select(0, rows).view(head.data.dtype)
    return map_scales(head, lambda grid: grid.index_select(0, rows), data=data, shape=(width, head.shape[1]))


def with_vocabulary_size(model: Decoder, size: int, *, directory: Path, backend: Backend) -> Decoder:
    """Return ``model``, loaded from ``directory``, with ``size`` rows of embeddings and of its output head.

    Checkpoints of one family may have different numbers of unused rows after the tokenizer's tokens. Missing embedding rows
    repeat the last row. Missing rows of the head get logits of -inf, so their tokens are never sampled.

    Raises :class:`CheckpointError` if the tokenizer uses one of these rows or is missing, or if the head is quantized or
    split over ranks.
    """
    rows, weights = model.config.vocab_size, model.weights
    if rows == size:
        return model
    mismatch = f"{directory / 'config.json'}: the draft model's vocab_size is {rows}, the target's is {size}"
    if not has_tokenizer(directory):
        raise CheckpointError(f"{mismatch}: drafts must be tokens of the target, and no tokenizer says which are used")
    used = 1 + max(Tokenizer.from_checkpoint(directory).spellings(), default=-1)
    if used > min(rows, size):
        raise CheckpointError(f"{mismatch}: drafts must be tokens of the target, and the draft's tokenizer has {used}")
    if not model.ranks.is_single or not isinstance(weights.head, Tensor):
        state = "is shared out among ranks" if not model.ranks.is_single else "is quantised"
        raise CheckpointError(
            f"{mismatch}, which is alike but for rows that no token uses; the draft's head {state}, so they can't be made as "
            "many; expected a draft with as many rows, or one with a plain head on one rank"
        )
    with loading_stream(backend, model.dtype):
        embedding = _resize_table(weights.embedding, size)
        head = weights.head[:size]
    adjusted = replace(weights, embedding=embedding, head=head)
    kind = _PaddedLogitsDecoder if rows < size else Decoder
    return kind(replace(model.config, vocab_size=size), adjusted, backend.kernels_in_use)


class _PaddedLogitsDecoder(Decoder):
    """A decoder whose head has fewer rows than its vocabulary.

    Padding the head's rows instead could change results: a library may sum the last rows of a product in another order.
    """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V], with -inf for the tokens that the head lacks."""
        known = super().logits(hidden)
        return torch.nn.functional.pad(known, (0, self.config.vocab_size - known.shape[-1]), value=-torch.inf)


def _resize_table(table: Tensor, size: int) -> Tensor:
    missing = size - table.shape[0]
    return table[:size] if missing <= 0 else torch.cat((table, table[-1:].expand(missing, -1)))
