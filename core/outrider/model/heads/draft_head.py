"""The parts that all draft heads share: their weights, BaseDraftHead, and HeadCheckpoint, with the checks and the loading.

Letters: H hidden size of the head, Ht of the target, A number of captured target states, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.device import Backend, ResidualStream
from outrider.device.kernels.weights import Weight, linear, prepare
from outrider.errors import CheckpointError, shown
from outrider.model.checkpoint.files import CheckpointFiles, Target, read_json, wrap_read_errors
from outrider.model.checkpoint.loading import Progress, check_tensors, load_tensors, loading_stream
from outrider.model.checkpoint.mapping import MTP_PREFIXES, SINGLE_RANK, layer_weights, mtp_format, mtp_tensors
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.config.checkpoint_config import read_model_config
from outrider.model.config.config_fields import is_whole
from outrider.model.config.model_config import ExpertsConfig, ModelConfig
from outrider.model.config.rope import RopeConfig
from outrider.model.heads.draft_output import round_products
from outrider.model.layers.cache import KVCache
from outrider.model.layers.decoder import Decoder
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.language_model import LanguageModel
from outrider.model.layers.layer import create_layers
from outrider.model.layers.layer_weights import LayerWeights
from outrider.model.layers.ranks import Shards
from outrider.model.layers.rotary import make_rotary
from outrider.model.quantization import Quantization, QuantizedMode, read_quantization


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadWeights:
    """Device tensors of a draft head, in the model's dtype. A kind of head has some of the fields; the others are None."""

    layers: tuple[LayerWeights, ...]
    """The layers. In EAGLE-3 the first one's attention reads the normed embedding and hidden state side by side: ``qkv`` is
    [(Hq + 2 Hkv) D, 2 H], and its ``attention_norm`` normalizes the embedding.
    """
    fusion: Weight | None = None
    """Projection [H, ...] of the head's inputs side by side. EAGLE: embedding and hidden state, [H, 2 H]. Multi-token
    prediction: both after their norms, in either order. EAGLE-3 and DFlash: the A captured states, [H, A Ht]; None in an
    EAGLE-3 head that reads the target's final state.
    """
    fusion_bias: Tensor | None = None
    """Bias [H] of the projection."""
    embedding: Tensor | None = None
    """Embedding table [V, H] of the head's own, or of the target."""
    head: Weight | None = None
    """The output head [Vd, H]; None for the target's."""
    target_ids: Tensor | None = None
    """Target token of each row of ``head``, int64 [Vd]; None if the rows cover the vocabulary."""
    final_norm: Tensor | None = None
    """Weight [H] of the final norm."""
    token_norm: Tensor | None = None
    """Weight [H] of the norm of the embedding, before the projection."""
    hidden_norm: Tensor | None = None
    """Weight [H] of the norm of the hidden state; DFlash: of the projected states."""
    input_norm: Tensor | None = None
    """Weight [A Ht] of a norm over the joined states."""
    state_norms: tuple[Tensor, ...] = ()
    """A weight [Ht] of a norm for each state, or empty."""
    mask_state: Tensor | None = None
    """State [H] that a P-EAGLE head reads where the fused target states are unknown."""


def head_weights(
    loaded: Mapping[str, Any], num_layers: int, *, experts: ExpertsConfig | None = None, **others: Any
) -> HeadWeights:
    """Return a head's weights from the ``loaded`` tensors, which have the names of the fields.

    ``experts`` is the config of layers that are mixtures. ``others`` are values of fields without a loaded tensor.
    """
    own = {each.name: loaded[each.name] for each in fields(HeadWeights) if each.name in loaded}
    return HeadWeights(
        layers=tuple(layer_weights(loaded, f"layers.{index}", experts) for index in range(num_layers)),
        state_norms=tuple(loaded[name] for name in sorted(loaded) if name.startswith("state_norms.")),
        **(others | own),
    )


class BaseDraftHead:
    """A head that drafts for ``target``, with its kernels, dtype and device, and with rotary angles for its
    context.

    Without an output head of its own, it uses that of :attr:`output`. ``aux_hidden_state_layers`` are the target's layers
    whose inputs the head reads.
    ``reads_hidden`` is true if the head reads the target's final hidden states.
    """

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_hidden = False

    def __init__(self, config: ModelConfig, weights: HeadWeights, target: LanguageModel) -> None:
        self.config = config
        self.weights = weights
        self.target = target
        self.output: LanguageModel = target
        """The model whose output head drafts are sampled with: the target, or a copy of the target with a smaller head."""
        self.kernels = target.kernels
        self._layers = create_layers(config, weights.layers, self.kernels, target.ranks)
        prepare(self.kernels, weights.head)
        prepare(self.kernels, weights.fusion)
        context = max(config.max_context, target.config.max_context)
        self._rotary = make_rotary(
            config.rope, config.head_size, context, kernels=target.kernels, dtype=target.dtype, device=target.device
        )

    @property
    def draft_vocab_size(self) -> int:
        """Vd, the number of tokens that the output head covers."""
        if self.weights.head is None:
            return self.output.output_size
        return self.config.vocab_size if self.weights.target_ids is None else self.weights.target_ids.shape[0]

    @property
    def target_ids(self) -> Tensor | None:
        """Target token of each draft token, int64 [Vd]; None if both vocabularies are the same."""
        return self.output.output_ids if self.weights.head is None else self.weights.target_ids

    def to_target_tokens(self, drafted: Tensor) -> Tensor:
        """Return the target's token number for each draft token number in ``drafted``, int64 of any shape, in the same
        shape.
        """
        ids = self.target_ids
        return drafted if ids is None else self.kernels.gather_rows(ids, drafted.flatten()).view(drafted.shape)

    def expand_to_target(self, probs: Tensor) -> Tensor:
        """Expand distributions [B, K, Vd] over the draft vocabulary to the target's vocabulary [B, K, V]."""
        ids = self.target_ids
        if ids is None:
            return probs
        full = probs.new_zeros((*probs.shape[:-1], self.target.config.vocab_size))
        return full.index_copy_(-1, ids, probs)

    @property
    def has_own_output_head(self) -> bool:
        """True if the draft's checkpoint has an output head that isn't the target's."""
        return self.weights.head is not None

    def condition(self, final: Tensor | None, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return the states that the head reads: by default the target's final hidden states [T, H]."""
        del aux_hidden_states
        assert final is not None  # required by reads_hidden
        return final

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, Vd] of the draft vocabulary for hidden states ``hidden`` [N, H]."""
        if self.weights.head is None:
            return self.output.logits(hidden)
        return self.target.ranks.logits(linear(self.kernels, hidden, self.weights.head), self.draft_vocab_size)

    def _forward_layers(
        self, x: ResidualStream, inputs: ForwardInput, cos_sin: tuple[Tensor, Tensor], cache: KVCache
    ) -> ResidualStream:
        """Return the residual stream after all layers, with all rows or only those that ``inputs`` keeps."""
        self.target.begin_pass(inputs)
        whole = inputs.whole
        for layer, pages in zip(self._layers, cache.layers, strict=True):
            x = layer.forward(x, inputs if layer is self._layers[-1] else whole, cos_sin, pages)
        return x


# -- checkpoints of heads ------------------------------------------------------------------------------------------------


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
        others = files.tensors.keys() - mtp_tensors(files.tensors)
        decodes = any(key.startswith("model.") and ".layers.0." in key for key in others)
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
            f"{files.origin}: has no heads of multi-token prediction; expected tensors {' or '.join(MTP_PREFIXES)}* or a "
            "last layer with eh_proj; name a checkpoint that has them as the draft (--draft), or choose another name for "
            "speculate"
        )
    return found
