"""HeadCheckpoint: the checkpoint of a draft head, with the checks and the loading that all kinds of heads share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.device import Backend, Weight
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import CheckpointFiles, Target
from outrider.model.checkpoint.loading import Progress, check_tensors, load_tensors, loading_stream
from outrider.model.checkpoint.mapping import MTP_PREFIXES, SINGLE_RANK, is_mtp_tensor, mtp_format
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.checkpoint.reading import read_json, wrap_read_errors
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.config.config_fields import is_whole
from outrider.model.config.model_config import ModelConfig
from outrider.model.config.rope import RopeConfig
from outrider.model.heads.draft_output import round_products
from outrider.model.layers.decoder import Decoder
from outrider.model.layers.language_model import LanguageModel
from outrider.model.layers.ranks import Shards
from outrider.model.quantization import Quantization, QuantizedMode, read_quantization

ENVELOPE = "transformer_layer_config"
"""Key of a head's layer config in the format of the library speculators."""


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """The open checkpoint of a head, the target that the head drafts for, and how the head is loaded."""

    directory: Path
    files: CheckpointFiles
    raw: dict[str, Any]
    """The content of config.json."""
    target: LanguageModel
    backend: Backend
    dtype: torch.dtype
    progress: Progress | None
    quantization: Quantization | None
    """How the weights are quantized, or None."""
    rounding: str | None
    """Format of DRAFT_FORMATS to which the head's unquantized products are rounded when they are loaded, or None."""

    @property
    def file(self) -> Path:
        """The path of config.json, for error messages."""
        return self.directory / "config.json"

    @property
    def is_envelope(self) -> bool:
        """True for a config of the library speculators, which has the layer's own config inside."""
        return ENVELOPE in self.raw

    # -- the config --------------------------------------------------------------------------------------------------

    def layer_config(self, layer: str) -> ModelConfig:
        """Return the head's config with the values that it takes from its target, and the biases that its ``layer`` has.

        Raises :class:`CheckpointError` if the head's vocabulary or dtype differs from the target's.
        """
        config = read_model_config(self.directory, part=ENVELOPE if self.is_envelope else None, drafts=True)
        self.check_vocabulary_and_dtype(config)
        with wrap_read_errors(self.file, "the config of a head"):
            return replace(
                config,
                experts=None,  # the layer of a draft head is dense even if its target has experts
                attention_bias=f"{layer}.self_attn.q_proj.bias" in self.files.tensors,
                output_bias=f"{layer}.self_attn.o_proj.bias" in self.files.tensors,
                rope=self._rope(config),
            )

    def check_vocabulary_and_dtype(self, config: ModelConfig) -> None:
        """Raise :class:`CheckpointError` unless the head has its target's vocabulary and dtype."""
        self.check_size("vocab_size", config.vocab_size, self.target.config.vocab_size)
        if self.dtype != self.target.dtype:
            raise CheckpointError(
                f"{self.directory}: the head can't be loaded as {self.dtype}, its target is {self.target.dtype}"
            )

    def check_size(self, name: str, found: object, wanted: int) -> None:
        """Raise :class:`CheckpointError` unless the head's size ``name`` is that of the target."""
        if found != wanted:
            raise CheckpointError(
                f"{self.file}: the head's {name} is {shown(found)}, the target's is {wanted}: this head belongs to another "
                "model"
            )

    def check_hidden_size(self, config: ModelConfig) -> None:
        """Raise :class:`CheckpointError` unless the head has its target's hidden size."""
        self.check_size("hidden_size", config.hidden_size, self.target.config.hidden_size)

    def _rope(self, head: ModelConfig) -> RopeConfig:
        """Return the head's rope, with the axes of its target if the head has none and they have as many frequencies: text
        positions are equal on all axes. Another head without axes reads the indices of tokens.
        """
        target, frequencies = self.target.config, head.rope.rotated_size(head.head_size) // 2
        if not head.rope.sections:
            axes = target.rope if sum(target.rope.sections) == frequencies else head.rope
            return replace(head.rope, sections=axes.sections, interleaved=axes.interleaved)
        if not target.rope.sections or sum(head.rope.sections) != frequencies:
            raise CheckpointError(
                f"{self.file}: rope sections of the head {list(head.rope.sections)} (head size {head.head_size}) don't go "
                f"with those of the target {list(target.rope.sections)}"
            )
        return head.rope

    # -- the draft vocabulary ----------------------------------------------------------------------------------------

    def draft_vocab_size(self, config: ModelConfig) -> int:
        """Return the number of tokens that a head drafts from, by default the whole vocabulary. Raises
        :class:`CheckpointError` for an impossible number.
        """
        draft_vocab = self.raw.get("draft_vocab_size")
        draft_vocab = config.vocab_size if draft_vocab is None else draft_vocab
        if not is_whole(draft_vocab, 1, config.vocab_size):
            raise CheckpointError(
                f"{self.file}: draft_vocab_size is {shown(draft_vocab)}, expected a whole number from 1 to the vocab_size "
                f"{config.vocab_size}"
            )
        return draft_vocab

    def target_ids(self, draft_vocab: int, vocab: int) -> Tensor | None:
        """Return the target token of each draft token, int64 [draft_vocab] on the host, from the offsets in the tensor
        ``d2t``; None without that tensor.

        Raises :class:`CheckpointError` if the tensor is missing where it is needed, has another shape, or names tokens
        outside the target's vocabulary.
        """
        files = self.files
        if "d2t" not in files.tensors:
            if draft_vocab != vocab:
                raise CheckpointError(
                    f"{files.origin}: missing: 'd2t' [{draft_vocab}], since draft_vocab_size isn't vocab_size"
                )
            return None
        offsets, where = files.read_ids("d2t"), f"{files.tensors['d2t'].path}: tensor 'd2t'"
        if offsets.shape != (draft_vocab,):
            raise CheckpointError(f"{where} has shape {list(offsets.shape)}, expected [{draft_vocab}]")
        ids = torch.arange(draft_vocab, device="cpu") + offsets
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise CheckpointError(
                f"{where} points to tokens {int(ids.min())} to {int(ids.max())}, outside the target's vocabulary of {vocab}"
            )
        ordered = ids.sort().values
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.numel():  # verification would be given another distribution than that which the draft is sampled from
            raise CheckpointError(
                f"{where} points to token {int(repeated[0])} more than once ({repeated.numel()} repetitions in all), "
                "expected each token of the target at most once"
            )
        return ids

    # -- the weights -------------------------------------------------------------------------------------------------

    def check(self, targets_of: Callable[[Shards], list[Target]], *, optional: Iterable[str] = ()) -> None:
        """Check that the files hold the weights of ``targets_of``, each in its shape, and besides at most the tensors
        ``optional``.

        Raises :class:`CheckpointError`, and :class:`CapabilityError` if the backend lacks kernels for quantized weights.
        """
        targets, quantization = targets_of(SINGLE_RANK), self.quantization
        check_tensors(self.files, targets, optional=set(optional), quantization=quantization, backend=self.backend)

    @contextmanager
    def load(
        self, config: ModelConfig, targets_of: Callable[[Shards], list[Target]]
    ) -> Generator[tuple[ModelConfig, dict[str, Any]]]:
        """Load this rank's part of the weights ``targets_of`` of a head with ``config``. Yield the config of this part and
        the weights by name, in the scope of the loading stream.

        An output head equal to the target's is left out, so that the draft shares the target's. Other products are rounded.
        """
        local = self.target.shards.local(config, str(self.directory))
        with loading_stream(self.backend, self.dtype) as stream:
            weights = load_tensors(
                self.files,
                targets_of(self.target.shards),
                dtype=self.dtype,
                backend=self.backend,
                stream=stream,
                progress=self.progress,
                quantization=self.quantization,
            )
            if "d2t" not in self.files.tensors and self._is_target_head(weights.get("head")):
                del weights["head"]
            if self.rounding is not None:
                round_products(weights, self.rounding)
            yield local, weights

    def _is_target_head(self, head: Weight | None) -> bool:
        other = self.target.weights.head if isinstance(self.target, Decoder) else None
        return isinstance(head, Tensor) and isinstance(other, Tensor) and torch.equal(head, other)


def open_head(
    directory: str | Path,
    *,
    target: LanguageModel,
    backend: Backend,
    dtype: torch.dtype,
    progress: Progress | None = None,
    quantized: QuantizedMode = "kernels",
    rounding: str | None = None,
) -> HeadCheckpoint:
    """Open the checkpoint ``directory`` of a head for ``target``, for the loader of its kind. Arguments and errors follow
    :func:`load_decoder`. ``rounding`` is that of :class:`HeadCheckpoint`.
    """
    directory = Path(directory)
    files, raw = open_checkpoint(directory), read_json(directory / "config.json")
    quantization = read_quantization(directory, mode=quantized)
    return HeadCheckpoint(directory, files, raw, target, backend, dtype, progress, quantization, rounding)


_KIND_BY_TENSOR = (
    ("mask_hidden", "peagle"),
    ("midlayer.hidden_norm.weight", "eagle3"),
    ("layers.0.hidden_norm.weight", "eagle3"),
    ("hidden_norm.weight", "dflash"),
    ("fc.weight", "eagle"),
)
"""Name of the proposer for a checkpoint by the first of these tensors that it has."""


def check_draft_kind(directory: Path, name: str) -> None:
    """Raise :class:`CheckpointError` with the right name if a draft checkpoint is clearly meant for another proposer than
    ``name``.
    """
    files = open_checkpoint(directory)
    if name == "mtp":
        find_mtp_format(files)
        return
    kind = next((kind for tensor, kind in _KIND_BY_TENSOR if tensor in files.tensors), None)
    if kind is None:
        # A hybrid's decoder may be within a vision-language model's names, have experts, and a head of its own.
        decodes = any(key.startswith("model.") and ".layers.0." in key for key in files.tensors if not is_mtp_tensor(key))
        kind = "draft-model" if decodes else "mtp" if mtp_format(files.tensors) is not None else None
    if kind not in (None, name):
        raise CheckpointError(f"{files.origin}: its tensors are those of a draft for speculate {kind!r}, not {name!r}")


def find_mtp_format(files: CheckpointFiles) -> str:
    """Return the format of a checkpoint's heads of multi-token prediction, a value of ``MTP_PREFIXES``.

    Raises :class:`CheckpointError` if the checkpoint has none.
    """
    found = mtp_format(files.tensors)
    if found is None:
        raise CheckpointError(
            f"{files.origin}: has no heads of multi-token prediction; expected tensors {' or '.join(MTP_PREFIXES)}*; name a "
            "checkpoint that has them as the draft (--draft), or choose another name for speculate"
        )
    return found
