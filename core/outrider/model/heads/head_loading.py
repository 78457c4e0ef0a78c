"""Loading of EAGLE and EAGLE-3 heads in their published formats, and the checks that all draft heads share."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from outrider.device import Backend, Stream
from outrider.device.kernels.weights import Weight
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import CheckpointFiles
from outrider.model.checkpoint.mapping import (
    MTP_PREFIXES,
    SINGLE_RANK,
    layer_targets,
    layer_weights,
    mtp_format,
    table_target,
)
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.checkpoint.pieces import Piece, Target
from outrider.model.checkpoint.reading import read_json, wrap_read_errors
from outrider.model.checkpoint.tensor_loading import Progress, check_tensors, load_tensors, loading_stream
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.config.config_fields import is_whole
from outrider.model.config.model_config import ModelConfig
from outrider.model.config.rope import RopeConfig
from outrider.model.heads.draft_output import DraftVocabulary, with_output_head
from outrider.model.heads.eagle import Eagle3Head, Eagle3Weights, EagleHead, EagleWeights
from outrider.model.heads.eagle3_config import ENVELOPE, Eagle3Options, read_eagle3_options
from outrider.model.layers.decoder import Decoder
from outrider.model.layers.language_model import LanguageModel
from outrider.model.layers.ranks import Shards
from outrider.model.quantization import Quantization, QuantizedMode, read_quantization


def eagle_targets(config: ModelConfig, present: Container[str], shards: Shards = SINGLE_RANK) -> list[Target]:
    """Return the targets of an EAGLE head's weights. ``present`` holds the checkpoint's tensor names, for optional tensors.

    Published heads have no ``layers.0.input_layernorm`` and no final norm. They may have ``fc.bias`` and their own copies of
    the embedding and of the output head.
    """
    hidden = config.hidden_size
    targets = [Target("fusion", (Piece("fc.weight", (hidden, 2 * hidden)),))]
    if "fc.bias" in present:
        targets.append(Target("fusion_bias", (Piece("fc.bias", (hidden,)),)))
    if "embed_tokens.weight" in present:
        targets.append(table_target("embedding", "embed_tokens.weight", config.vocab_size, hidden, shards))
    if "lm_head.weight" in present:
        targets.append(table_target("head", "lm_head.weight", config.vocab_size, hidden, shards))
    for index in range(config.num_layers):
        norm = index > 0 or "layers.0.input_layernorm.weight" in present
        targets += layer_targets(config, f"layers.{index}", f"layers.{index}", attention_norm=norm, shards=shards)
    return targets


def eagle_weights(config: ModelConfig, weights: Mapping[str, Any], *, embedding: Tensor) -> EagleWeights:
    """Return the head's weights from the loaded tensors. ``embedding`` is the target's, for a head without its own."""
    return EagleWeights(
        fusion=weights["fusion"],
        fusion_bias=weights.get("fusion_bias"),
        embedding=weights.get("embedding", embedding),
        layers=tuple(layer_weights(weights, f"layers.{index}") for index in range(config.num_layers)),
    )


def eagle3_targets(
    config: ModelConfig,
    target: ModelConfig,
    options: Eagle3Options,
    draft_vocab: int,
    present: Container[str],
    shards: Shards = SINGLE_RANK,
) -> list[Target]:
    """Return the targets of an EAGLE-3 head's weights: the tensors to load and their shapes. ``present`` holds the
    checkpoint's tensor names, for optional tensors.
    """
    hidden, states = config.hidden_size, len(options.layers)
    targets = [
        Target("norm", (Piece("norm.weight", (hidden,)),)),
        Target("hidden_norm", (Piece(f"{options.prefix}.hidden_norm.weight", (hidden,)),)),
    ]
    if states:
        targets.append(Target("fusion", (Piece("fc.weight", (hidden, states * target.hidden_size)),)))
    if "lm_head.weight" in present or hidden != target.hidden_size:
        targets.append(table_target("head", "lm_head.weight", draft_vocab, hidden, shards))
    if "embed_tokens.weight" in present or hidden != target.hidden_size:
        targets.append(table_target("embedding", "embed_tokens.weight", config.vocab_size, hidden, shards))
    if options.norm_before_fc:
        targets.append(Target("input_norm", (Piece("input_norm.weight", (states * target.hidden_size,)),)))
    if options.fc_norm:
        targets += [
            Target(f"state_norms.{index}", (Piece(f"fc_norm.{index}.weight", (target.hidden_size,)),))
            for index in range(states)
        ]
    targets += layer_targets(config, options.prefix, "layer", attention_width=2 * hidden, shards=shards)
    for index in range(1, config.num_layers):
        targets += layer_targets(config, f"layers.{index}", f"later.{index}", shards=shards)
    return targets


def eagle3_weights(
    weights: Mapping[str, Any], *, num_layers: int, embedding: Tensor, target_ids: Tensor | None
) -> Eagle3Weights:
    """Return the head's weights from the loaded tensors. ``embedding`` is the target's, for a head without its own."""
    return Eagle3Weights(
        fusion=weights.get("fusion"),
        embedding=weights.get("embedding", embedding),
        head=weights.get("head"),
        norm=weights["norm"],
        hidden_norm=weights["hidden_norm"],
        layer=layer_weights(weights, "layer"),
        target_ids=target_ids,
        input_norm=weights.get("input_norm"),
        state_norms=tuple(weights[name] for name in sorted(weights) if name.startswith("state_norms.")),
        later=tuple(layer_weights(weights, f"later.{index}") for index in range(1, num_layers)),
    )


def load_eagle(
    directory: str | Path,
    *,
    target: LanguageModel,
    backend: Backend,
    dtype: torch.dtype,
    progress: Progress | None = None,
    quantized: QuantizedMode = QuantizedMode.KERNELS,
) -> EagleHead:
    """Load an EAGLE head in its published format for ``target``.

    Arguments and errors follow :func:`load_decoder`. A head with another hidden size, vocabulary or dtype than the target's
    raises :class:`CheckpointError`.
    """
    directory = Path(directory)
    files = open_checkpoint(directory)
    config = head_config(directory, target, dtype, files.tensors, "layers.0")
    check_hidden_size(directory, config, target)
    targets = eagle_targets(config, files.tensors, target.shards)
    quantization = read_quantization(directory, mode=quantized)
    check_tensors(files, eagle_targets(config, files.tensors), optional=set(), quantization=quantization, backend=backend)
    config = target.shards.local(config, str(directory))
    with loading_stream(backend, dtype) as stream:
        weights = load_tensors(
            files, targets, dtype=dtype, backend=backend, stream=stream, progress=progress, quantization=quantization
        )
        record = eagle_weights(config, weights, embedding=target.embedding)
        return EagleHead(config, record, target, head=weights.get("head"))


def load_eagle3(
    directory: str | Path,
    *,
    target: LanguageModel,
    backend: Backend,
    dtype: torch.dtype,
    progress: Progress | None = None,
    quantized: QuantizedMode = QuantizedMode.KERNELS,
) -> Eagle3Head:
    """Load an EAGLE-3 or EAGLE-3.1 head in its published formats for ``target``.

    The head reads the target layers that its config lists; the default is the published choice, the inputs of layers 2, n / 2
    and n - 3. :func:`read_eagle3_options` documents the other options. Arguments and errors follow :func:`load_eagle`; a
    draft vocabulary with tokens outside the target's also raises :class:`CheckpointError`.
    """
    directory = Path(directory)
    found = check_eagle3(directory, target=target, backend=backend, dtype=dtype, quantized=quantized)
    with loading_stream(backend, dtype) as stream:
        config, record, _ = found.load_head(target, backend, dtype, stream, progress)
        return Eagle3Head(config, record, target, **found.head_options)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedEagle3Checkpoint:
    """An EAGLE-3 checkpoint whose config and tensor shapes are checked, but not loaded."""

    directory: Path
    config: ModelConfig
    options: Eagle3Options
    """Options of the config that do not follow from the layers' shape, such as the states that the head reads."""
    files: CheckpointFiles
    quantization: Quantization | None
    draft_vocab: int
    """Number of tokens in the draft vocabulary."""
    target_ids: Tensor | None
    more: tuple[Target, ...]
    """Targets that a P-EAGLE head has in addition to those of :class:`Eagle3Weights`."""

    @property
    def head_options(self) -> Eagle3HeadOptions:
        """Return the keyword arguments of :class:`Eagle3Head` besides the weights."""
        options = self.options
        return {
            "aux_hidden_state_layers": options.layers,
            "norm_before_residual": options.norm_before_residual,
            "norm_output": options.norm_output,
        }

    def load_head(
        self, target: LanguageModel, backend: Backend, dtype: torch.dtype, stream: Stream, progress: Progress | None
    ) -> tuple[ModelConfig, Eagle3Weights, dict[str, Any]]:
        """Load this rank's weights in the scope of ``stream``.

        Returns the rank's config, its weights, and the weights of ``more`` by name.
        """
        targets = eagle3_targets(
            self.config, target.config, self.options, self.draft_vocab, self.files.tensors, target.shards
        )
        config = target.shards.local(self.config, str(self.directory))
        weights = load_tensors(
            self.files,
            [*targets, *self.more],
            dtype=dtype,
            backend=backend,
            stream=stream,
            progress=progress,
            quantization=self.quantization,
        )
        ids = None if self.target_ids is None else self.target_ids.to(backend.device)
        if ids is not None and "head" not in weights:
            weights["head"], ids = self._rows_of_target(target, backend)
        record = eagle3_weights(weights, num_layers=config.num_layers, embedding=target.embedding, target_ids=ids)
        return config, record, {each.name: weights[each.name] for each in self.more}

    def _rows_of_target(self, target: LanguageModel, backend: Backend) -> tuple[Weight, Tensor | None]:
        """Return the rows of the target's output head from which a head without its own drafts, and the tokens int64 of these
        rows (None: all).
        """
        assert self.target_ids is not None  # the caller has checked
        if not isinstance(target, Decoder):
            raise CheckpointError(
                f"{self.files.origin}: has 'd2t' and no 'lm_head.weight', so it drafts with rows of the target's output "
                "head, which a target that runs by transformers' own code doesn't give; run the target natively"
            )
        vocabulary = DraftVocabulary(ids=self.target_ids.sort().values, origin=f"'d2t' of {self.files.origin}")
        drafting = with_output_head(target, backend=backend, vocabulary=vocabulary)
        return drafting.weights.head, drafting.output_ids


class Eagle3HeadOptions(TypedDict):
    """Keyword arguments of :class:`Eagle3Head`."""

    aux_hidden_state_layers: tuple[int, ...]
    norm_before_residual: bool
    norm_output: bool


def check_eagle3(
    directory: Path,
    *,
    target: LanguageModel,
    backend: Backend,
    dtype: torch.dtype,
    quantized: QuantizedMode,
    more: Callable[[CheckpointFiles, int], tuple[Target, ...]] | None = None,
) -> CheckedEagle3Checkpoint:
    """Check the config and the tensor shapes of an EAGLE-3 checkpoint without loading anything onto the device.

    ``more`` is given for a P-EAGLE head. It returns the head's additional weights from the files and the width of the joined
    states. Raises the errors of :func:`load_eagle3`.
    """
    file = directory / "config.json"
    files = open_checkpoint(directory)
    raw = read_json(file)
    options = read_eagle3_options(file, raw, target.config.num_layers, files.tensors, parallel=more is not None)
    config = head_config(directory, target, dtype, files.tensors, options.prefix, part=ENVELOPE if ENVELOPE in raw else None)
    if target.config.num_layers in options.layers and not target.native:
        raise CheckpointError(
            f"{file}: the head reads the output of the target's last layer, which a target that runs by transformers' own "
            "code doesn't pass on; run the target natively"
        )
    if not options.layers:
        check_hidden_size(directory, config, target)
    width = raw.get("target_hidden_size")
    if width is not None and width != target.config.hidden_size:
        raise _wrong_target(directory, "target_hidden_size", width, target.config.hidden_size)
    draft_vocab = read_draft_vocab_size(file, raw, config)
    extra_targets = () if more is None else more(files, len(options.layers) * target.config.hidden_size)
    unsharded_targets = [*eagle3_targets(config, target.config, options, draft_vocab, files.tensors), *extra_targets]
    quantization = read_quantization(directory, mode=quantized)
    # t2d is the inverse mapping of d2t
    check_tensors(files, unsharded_targets, optional={"d2t", "t2d"}, quantization=quantization, backend=backend)
    return CheckedEagle3Checkpoint(
        directory=directory,
        config=config,
        options=options,
        files=files,
        quantization=quantization,
        draft_vocab=draft_vocab,
        target_ids=read_target_ids(files, draft_vocab, config.vocab_size),
        more=extra_targets,
    )


_KIND_BY_TENSOR = (
    ("mask_hidden", "peagle"),
    ("midlayer.hidden_norm.weight", "eagle3"),
    ("layers.0.hidden_norm.weight", "eagle3"),
    ("hidden_norm.weight", "dflash"),
    ("fc.weight", "eagle"),
    ("model.layers.0.mlp.down_proj.weight", "draft-model"),
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
    if kind is None and mtp_format(files.tensors) is not None:
        kind = "mtp"
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


def head_config(
    directory: Path,
    target: LanguageModel,
    dtype: torch.dtype,
    present: Container[str],
    layer: str,
    *,
    part: str | None = None,
) -> ModelConfig:
    """Return the head's config with the values that it takes from its target, and the biases that its ``layer`` has.

    ``part`` is the key of the object in config.json that holds the config; None means the whole file. Raises
    :class:`CheckpointError` if the head's vocabulary or dtype differs from the target's.
    """
    config = read_model_config(directory, part=part, drafts=True)
    check_vocabulary_and_dtype(directory, config, target, dtype)
    with wrap_read_errors(directory / "config.json", "the config of a head"):
        return replace(
            config,
            experts=None,  # the layer of a draft head is dense even if its target has experts
            attention_bias=f"{layer}.self_attn.q_proj.bias" in present,
            output_bias=f"{layer}.self_attn.o_proj.bias" in present,
            rope=_head_rope(directory, config, target.config),
        )


def check_vocabulary_and_dtype(directory: Path, config: ModelConfig, target: LanguageModel, dtype: torch.dtype) -> None:
    """Raise :class:`CheckpointError` unless the head in ``directory`` has its target's vocabulary and dtype."""
    if config.vocab_size != target.config.vocab_size:
        raise _wrong_target(directory, "vocab_size", config.vocab_size, target.config.vocab_size)
    if dtype != target.dtype:
        raise CheckpointError(f"{directory}: the head can't be loaded as {dtype}, its target is {target.dtype}")


def check_hidden_size(directory: Path, config: ModelConfig, target: LanguageModel) -> None:
    """Raise :class:`CheckpointError` unless the head in ``directory`` has its target's hidden size."""
    if config.hidden_size != target.config.hidden_size:
        raise _wrong_target(directory, "hidden_size", config.hidden_size, target.config.hidden_size)


def _wrong_target(directory: Path, name: str, found: object, wanted: int) -> CheckpointError:
    return CheckpointError(
        f"{directory / 'config.json'}: the head's {name} is {shown(found)}, the target's is {wanted}: this head belongs to "
        "another model"
    )


def _head_rope(directory: Path, head: ModelConfig, target: ModelConfig) -> RopeConfig:
    """Return the head's rope, with the axes of its target if the head has none and they have as many frequencies: text
    positions are equal on all axes. Another head without axes reads the indices of tokens.
    """
    frequencies = head.rope.rotated_size(head.head_size) // 2
    if not head.rope.sections:
        axes = target.rope if sum(target.rope.sections) == frequencies else head.rope
        return replace(head.rope, sections=axes.sections, interleaved=axes.interleaved)
    if not target.rope.sections or sum(head.rope.sections) != frequencies:
        raise CheckpointError(
            f"{directory / 'config.json'}: rope sections of the head {list(head.rope.sections)} (head size "
            f"{head.head_size}) don't go with those of the target {list(target.rope.sections)}"
        )
    return head.rope


def read_draft_vocab_size(file: Path, raw: Mapping[str, object], config: ModelConfig) -> int:
    """Return the number of tokens that a head drafts from, by default the whole vocabulary. Raises :class:`CheckpointError`
    for an impossible number.
    """
    draft_vocab = raw.get("draft_vocab_size")
    draft_vocab = config.vocab_size if draft_vocab is None else draft_vocab
    if not is_whole(draft_vocab, 1, config.vocab_size):
        raise CheckpointError(
            f"{file}: draft_vocab_size is {shown(draft_vocab)}, expected a whole number from 1 to the vocab_size "
            f"{config.vocab_size}"
        )
    return draft_vocab


def read_target_ids(files: CheckpointFiles, draft_vocab: int, vocab: int) -> Tensor | None:
    """Return the target token of each draft token, int64 [draft_vocab] on the host, from the offsets in the tensor ``d2t``;
    None without that tensor.

    Raises :class:`CheckpointError` if the tensor is missing where it is needed, has another shape, or names tokens outside
    the target's vocabulary.
    """
    if "d2t" not in files.tensors:
        if draft_vocab != vocab:
            raise CheckpointError(f"{files.origin}: missing: 'd2t' [{draft_vocab}], since draft_vocab_size isn't vocab_size")
        return None
    offsets = files.read_ids("d2t")
    if offsets.shape != (draft_vocab,):
        raise CheckpointError(
            f"{files.tensors['d2t'].path}: tensor 'd2t' has shape {list(offsets.shape)}, expected [{draft_vocab}]"
        )
    ids = torch.arange(draft_vocab, device="cpu") + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise CheckpointError(
            f"{files.tensors['d2t'].path}: tensor 'd2t' points to tokens {int(ids.min())} to {int(ids.max())}, outside the "
            f"target's vocabulary of {vocab}"
        )
    ordered = ids.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeated.numel():  # the distribution that a draft is sampled from would not be the one that verification is told
        raise CheckpointError(
            f"{files.tensors['d2t'].path}: tensor 'd2t' points to token {int(repeated[0])} more than once "
            f"({repeated.numel()} repetitions in all), expected each token of the target at most once"
        )
    return ids
