"""The output head that drafts are drawn with: the target's, a copy of it in few bits, or some of its rows.

What is verified takes the target's own head, so tokens are the same; what changes is which drafts are accepted. A draft of
three tokens reads the head three times: as many bytes as seven layers of an 8B model have. A copy in 8 bits has half of them.
Of 128,000 tokens a quarter makes nearly all text: a head of the rows of those alone has a quarter of the bytes (Zhao et al.
2025, FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.device import Backend, CapabilityError, ConfigError, QuantizedWeight
from outrider.errors import shown
from outrider.model.config_fields import is_whole
from outrider.model.decoder import Decoder
from outrider.model.language_model import LanguageModel
from outrider.model.products import Weight, label
from outrider.model.quantization.rounding import ROUND, rounded
from outrider.model.reading import JSON_LIMIT, present, read_bytes, reading
from outrider.model.shards import Shard
from outrider.model.tensors import placed

OUTPUT_FORMATS = tuple(ROUND)
"""What the copy can be kept in."""
_SUFFIXES = (".json", ".pt")
_EXPECTED = "expected a list of numbers in JSON, or one that torch saved, without code of its own"
_MOST_TOKENS = 1 << 24
"""Of any vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftVocabulary:
    """The tokens that drafts are drawn from: ``ids`` int64 [Vd] on the host, ascending. ``origin`` says whose list it is."""

    ids: Tensor
    origin: str

    @classmethod
    def read(cls, given: Path | str | int) -> DraftVocabulary:
        """The first so many tokens of a vocabulary, or those that a file lists in any order: ``.json``, a list of numbers;
        ``.pt``, a list or a tensor of them, as FR-Spec publishes its lists.

        Raises :class:`ConfigError` for a number that no vocabulary has and for a file that isn't there or has no such list,
        and :class:`CheckpointError` for one that can't be read.
        """
        if isinstance(given, int):
            if not is_whole(given, 1, _MOST_TOKENS):
                raise ConfigError(
                    f"draft_vocabulary is {given}; expected 1 to {_MOST_TOKENS} tokens of the target, or a file of tokens"
                )
            return cls(ids=torch.arange(given, device="cpu"), origin=f"the first {given} tokens")
        path = Path(given)
        ids = torch.tensor(_listed(path), dtype=torch.int64, device="cpu").sort().values
        twice = ids[1:][ids[1:] == ids[:-1]]
        if twice.numel():
            raise ConfigError(f"draft_vocabulary: {path} lists token {int(twice[0])} twice; expected each token once")
        return cls(ids=ids, origin=f"the {ids.numel()} tokens of {path}")

    def check(self, vocabulary: int) -> None:
        """Raise :class:`ConfigError` where it has tokens that a target of so many hasn't."""
        if int(self.ids[-1]) >= vocabulary:
            raise ConfigError(
                f"draft_vocabulary is {self.origin}, up to {int(self.ids[-1])}, and the target has tokens 0 to "
                f"{vocabulary - 1}; expected tokens of the target"
            )


def _listed(path: Path) -> list[int]:
    """The numbers that a file lists, at least one, none below 0."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"draft_vocabulary is {path}; expected a number of tokens, or a file {' or '.join(_SUFFIXES)}")
    if not present(path):
        raise ConfigError(f"draft_vocabulary is {path}, and there is no such file; expected a list of tokens")
    content = read_bytes(path, JSON_LIMIT)
    with reading(path, "a list of tokens", _EXPECTED):
        if path.suffix == ".json":
            found = json.loads(content)
        else:
            found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    holds = shown(found)
    if isinstance(found, Tensor):
        holds = f"a tensor of shape {list(found.shape)}"
        found = found.tolist() if found.ndim == 1 else None
    if not isinstance(found, list) or not found:
        raise ConfigError(f"draft_vocabulary: {path} holds {holds}; expected a list of tokens, at least one")
    wrong = [each for each in found if not is_whole(each, 0, _MOST_TOKENS - 1)]
    if wrong:
        raise ConfigError(f"draft_vocabulary: {path} lists {shown(wrong[0])}; expected tokens, whole numbers from 0")
    return found


def with_output_head(
    target: LanguageModel, *, backend: Backend, format: str | None = None, vocabulary: DraftVocabulary | None = None
) -> Decoder:
    """``target`` for drafting, all of it shared but its output head: the rows of ``vocabulary``, or all; in ``format``, one
    of OUTPUT_FORMATS, or as it is.

    Ranks that share the head out have as many rows each: where a rank has fewer tokens of ``vocabulary``, it adds others of
    its own, which are drawn from as well.

    Raises :class:`ConfigError` for a target whose head isn't known or can't be copied so, and :class:`CapabilityError`
    where the backend has no kernels for that format.
    """
    asked = f"draft_output_head is {format}" if format is not None else "draft_vocabulary is given"
    if not isinstance(target, Decoder):
        raise ConfigError(
            f"{asked}, and the target runs by transformers' own code, whose output head stays as it is; leave one of them out"
        )
    head, ids = target.weights.head, None
    if format is not None and not isinstance(head, Tensor):
        raise ConfigError(f"{asked}, and the target's output head is {label(head)} already; leave draft_output_head out")
    if format is not None and format not in backend.capabilities.quantized_formats:
        has = ", ".join(sorted(backend.capabilities.quantized_formats)) or "none"
        raise CapabilityError(f"{asked}, and {backend.label} has no kernels for that (it declares {has}); leave it out")
    if vocabulary is not None:
        vocabulary.check(target.config.vocab_size)
    with placed(backend, target.dtype):
        if vocabulary is not None:
            rows, ids, width = _shared_out(vocabulary.ids, target.shards.vocabulary, target.config.vocab_size)
            head, ids = _rows(head, rows.to(target.device), width), ids.to(target.device)
        if format is not None:
            assert isinstance(head, Tensor)  # else it was refused above
            head = rounded(head, format)
        return target.with_head(head, ids)


def _shared_out(ids: Tensor, shard: Shard, vocabulary: int) -> tuple[Tensor, Tensor, int]:
    """Of ``ids``: the rows of this rank's part of a head, the tokens that all ranks' rows are, and how many rows each has.

    A rank that has no more tokens of its own is behind the vocabulary with the rows that it lacks, and so are all behind it.
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


def _rows(head: Weight, rows: Tensor, width: int) -> Weight:
    """``rows`` of an output head, and zeros behind them up to ``width``."""
    lacking = width - rows.shape[0]
    if isinstance(head, Tensor):
        return torch.nn.functional.pad(head.index_select(0, rows), (0, 0, 0, lacking))
    if not isinstance(head, QuantizedWeight) or head.block[0] != 1 or lacking:
        raise ConfigError(
            f"draft_vocabulary is given, and the target's output head is {label(head)}"
            + (", shared out among ranks" if lacking else "")
            + ": its rows can't be taken one by one; leave draft_vocabulary out"
        )
    # Bytes, since not every index knows the formats.
    data = head.data.view(torch.uint8).index_select(0, rows).view(head.data.dtype)
    zero_points = None if head.zero_points is None else head.zero_points.index_select(0, rows)
    scales = head.scales.index_select(0, rows)
    return replace(head, data=data, scales=scales, zero_points=zero_points, shape=(width, head.shape[1]))
