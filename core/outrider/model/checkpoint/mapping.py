"""Mapping from a checkpoint's tensors to the weights of a decoder, with the shape that each tensor must have.

Only this package and ``heads`` know the tensor names in checkpoints. A :class:`Target` is a weight of the model. Its
pieces are the checkpoint's tensors, concatenated along the first dimension.

Hybrid models have recurrent layers and gated attention. Qwen3-Next stores q, k, v and the output gate of a recurrent layer in
one tensor, key head by key head. Qwen3.5 has separate tensors. Both become one product with the rows of all q, then all k, v,
output gates, b and a. A tensor-parallel rank reads its key heads, with the value heads that they serve.

Letters: H hidden size, Hq query heads, Hkv KV heads, D head size, I intermediate size, V vocabulary. Of a recurrent layer: Hk
key heads, Hv value heads, D key size, E value size, C channels of the convolution, K kernel size. Of a mixture of
experts: E experts, I intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from outrider.device import DeltaRuleWeights
from outrider.errors import CheckpointError
from outrider.model.checkpoint.expert_stacks import STACKS
from outrider.model.checkpoint.files import AdjacentPairs, Piece, Target, TensorSlice
from outrider.model.config.layer_configs import SANDWICH_FAMILIES
from outrider.model.config.model_config import ExpertsConfig, LatentConfig, ModelConfig
from outrider.model.layers.decoder import DecoderWeights
from outrider.model.layers.layer_weights import LatentWeights, LayerWeights, PerLayerInputWeights, SandwichExpertVectors
from outrider.model.layers.per_layer_inputs import PerLayerEmbeddingWeights
from outrider.model.layers.ranks import Shards
from outrider.model.quantization.storages import PACKED

MTP_PREFIXES: Mapping[str, str] = MappingProxyType({"model.mtp_layers.": "mimo", "mtp.": "chained"})
"""Format of heads of multi-token prediction by the prefix of their tensors' names."""
_UNREAD_HEAD = tuple(f"model.mtp_{part}." for part in ("block", "emb_norm", "hidden_norm", "linear_proj"))
"""Prefixes of the tensors of ERNIE 4.5's head, which is not read."""
_JOIN = ".eh_proj."
"""What follows the layer in the name of the projection of a head that is stored as one more layer."""
SINGLE_RANK = Shards()
"""A single rank that holds the whole model."""


_QKV, _OUTPUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"
_GATE_UP, _DOWN = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
_WITH_ADJACENT_PAIRS = ("ernie4_5", "ernie4_5_moe")
"""Families that rotate pairs of adjacent dimensions of a head."""
_RECURRENT, _LATENT, _SANDWICH_EXPERTS, _PER_LAYER = "recurrent.", "latent.", "sandwich_experts.", "per_layer_input."
"""Prefixes of the names of weights that a layer has in a record of their own."""
_SANDWICH_NORMS = (
    ("attention_output_norm", "post_attention_layernorm"),
    ("mlp_norm", "pre_feedforward_layernorm"),
    ("mlp_output_norm", "post_feedforward_layernorm"),
)


def _projections(
    config: ModelConfig, shards: Shards, attention_width: int
) -> dict[str, tuple[tuple[int, int], TensorSlice | None]]:
    """Return the shape of each projection of a layer in the checkpoint, and the slice that this rank reads (None: all)."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
    queries, keys = config.num_heads * size, config.num_kv_heads * size

    def rows(first: int, last: int, total: int) -> TensorSlice | None:
        return None if last - first == total else TensorSlice(0, first, last)

    first_key, last_key = shards.kv_heads(config)
    own_queries = _head_rows(config, shards, size)
    own_keys = rows(first_key * size, last_key * size, keys)
    own_inner = rows(*shards.mlp.even(inner), inner)
    query, key, value = _QKV
    return {
        query: ((queries, attention_width), own_queries),
        key: ((keys, attention_width), own_keys),
        value: ((keys, attention_width), own_keys),
        _OUTPUT: ((hidden, queries), as_columns(own_queries)),
        **dict.fromkeys(_GATE_UP, ((inner, hidden), own_inner)),
        _DOWN: ((hidden, inner), as_columns(own_inner)),
    }


def _head_rows(config: ModelConfig, shards: Shards, size: int) -> TensorSlice | None:
    """Return this rank's rows of a tensor that has ``size`` rows per query head; None for all rows."""
    first, last = shards.heads(config)
    return None if last - first == config.num_heads else TensorSlice(0, first * size, last * size)


def layer_targets(
    config: ModelConfig,
    prefix: str,
    name: str,
    *,
    attention_norm: bool = True,
    attention_width: int | None = None,
    attends: bool = True,
    mlp: bool = True,
    shards: Shards = SINGLE_RANK,
) -> list[Target]:
    """Return the weights of one layer, called ``name`` in the model and ``prefix`` in the checkpoint.

    ``config`` is the checkpoint's; ``shards`` are the slices that this rank reads. ``attention_width`` is the width of the
    attention's input, by default the hidden size. ``attention_norm`` is false for a layer without a norm before attention,
    ``attends`` for a layer without attention, ``mlp`` for one without an MLP. A bias of a sum over ranks is read by the first
    of these ranks only.
    """
    projections = _projections(config, shards, attention_width or config.hidden_size)
    pairs = AdjacentPairs(config.head_size, config.head_size)
    paired = dict.fromkeys(_QKV[:2], pairs) if config.family in _WITH_ADJACENT_PAIRS else {}

    def norm(field: str, part: str, size: int) -> Target:
        return Target(f"{name}.{field}", (Piece(f"{prefix}.{part}.weight", (size,)),))

    def weight(field: str, *parts: str) -> Target:
        return Target(
            f"{name}.{field}",
            tuple(Piece(f"{prefix}.{part}.weight", *projections[part], paired=paired.get(part)) for part in parts),
        )

    def bias(field: str, *parts: str) -> Target:
        """Return a bias, which is sliced like the rows of its projections."""
        pieces = []
        for part in parts:
            (rows, _), part_slice = projections[part]
            by_rows = part_slice is not None and part_slice.dim == 0
            own_rows = part_slice if by_rows else None
            pieces.append(Piece(f"{prefix}.{part}.bias", (rows,), own_rows, paired=paired.get(part)))
        return Target(f"{name}.{field}", tuple(pieces))

    targets = [norm("mlp_norm", "post_attention_layernorm", config.hidden_size)]
    if config.sandwich is not None:
        targets = [norm(field, part, config.hidden_size) for field, part in _SANDWICH_NORMS]
        targets.append(Target(f"{name}.output_scale", (Piece(f"{prefix}.layer_scalar", (1,)),)))
        targets += _per_layer_targets(prefix, f"{name}.{_PER_LAYER}", config.hidden_size, config.sandwich.input_size)
    query, key, value = _QKV
    parts = (query,) if config.shares_keys else (query, key, key if config.values_are_keys else value)
    if config.latent is not None:
        targets += latent_targets(config, config.latent, f"{prefix}.self_attn", name, shards)
    elif attends:
        qkv = weight("qkv", *parts)
        targets.append(gated_queries(qkv, config, shards) if config.attention_gate else qkv)
        targets.append(weight("output", _OUTPUT))
    if mlp:
        targets += [weight("gate_up", *_GATE_UP), weight("down", _DOWN)]
    if attention_norm:
        targets.append(norm("attention_norm", "input_layernorm", config.hidden_size))
    if config.attention_bias and attends:
        targets.append(bias("qkv_bias", *parts))
    if config.output_bias and attends and shards.attention.rank == 0:
        targets.append(bias("output_bias", _OUTPUT))
    if config.mlp_bias:
        targets.append(bias("gate_up_bias", *_GATE_UP))
    if config.mlp_bias and shards.mlp.rank == 0:
        targets.append(bias("down_bias", _DOWN))
    if config.qk_norm and attends:
        counts = {"q": config.num_heads} if config.shares_keys else {"q": config.num_heads, "k": config.num_kv_heads}
        for part, count in counts.items():
            heads = count if config.joint_qk_norm else 1
            targets.append(norm(f"{part}_norm", f"self_attn.{part}_norm", heads * config.head_size))
    if config.attention_sinks and attends:
        own = _head_rows(config, shards, 1)
        targets.append(Target(f"{name}.sinks", (Piece(f"{prefix}.self_attn.sinks", (config.num_heads,), own),), wide=True))
    return targets


def _per_layer_targets(prefix: str, name: str, hidden: int, size: int) -> list[Target]:
    """Return the weights of the input of ``size`` that a layer has for each token; none for a size of 0."""
    parts = (
        ("gate", "per_layer_input_gate", (size, hidden)),
        ("projection", "per_layer_projection", (hidden, size)),
        ("norm", "post_per_layer_input_norm", (hidden,)),
    )
    return [Target(f"{name}{field}", (Piece(f"{prefix}.{part}.weight", shape),)) for field, part, shape in parts if size]


def latent_targets(config: ModelConfig, latent: LatentConfig, stem: str, name: str, shards: Shards) -> list[Target]:
    """Return the weights of latent attention of the layer ``name``, whose names begin with ``stem`` in the checkpoint."""
    own = partial(_head_rows, config, shards)
    heads, hidden, up_rows = config.num_heads, config.hidden_size, latent.unrotated_size + latent.value_size
    rows, rotated = latent.rank + latent.rotated_size, latent.rotated_size
    query_pairs, key_pairs = (
        AdjacentPairs(size, rotated) if latent.interleaved else None for size in (latent.head_size, rows)
    )
    queries = Piece(f"{stem}.q_proj.weight", (heads * latent.head_size, hidden), own(latent.head_size), paired=query_pairs)
    targets = [
        Target(f"{name}.{_LATENT}kv_norm", (Piece(f"{stem}.kv_a_layernorm.weight", (latent.rank,)),)),
        Target(f"{name}.{_LATENT}kv_up", (Piece(f"{stem}.kv_b_proj.weight", (heads * up_rows, latent.rank), own(up_rows)),)),
    ]
    if latent.query_rank:
        expanded = replace(queries, key=f"{stem}.q_b_proj.weight", shape=(queries.shape[0], latent.query_rank))
        queries = Piece(f"{stem}.q_a_proj.weight", (latent.query_rank, hidden))
        targets.append(Target(f"{name}.{_LATENT}q_norm", (Piece(f"{stem}.q_a_layernorm.weight", (latent.query_rank,)),)))
        targets.append(Target(f"{name}.{_LATENT}q_up", (expanded,)))
    vectors = Piece(f"{stem}.kv_a_proj_with_mqa.weight", (rows, hidden), paired=key_pairs)
    columns = as_columns(own(latent.value_size))
    output = Piece(f"{stem}.o_proj.weight", (hidden, heads * latent.value_size), columns)
    return [Target(f"{name}.qkv", (queries, vectors)), Target(f"{name}.output", (output,)), *targets]


def layer_weights(weights: Mapping[str, Any], name: str, experts: ExpertsConfig | None = None) -> LayerWeights:
    """Return a layer's weights from the loaded tensors. ``experts`` is the config of a layer that is a mixture."""
    prefix = f"{name}."
    fields = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    return LayerWeights(**nest_records(fields if experts is None else stack_experts(experts, fields)))


def table_target(name: str, key: str, rows: int, width: int, shards: Shards) -> Target:
    """Return the target ``name``: a table [rows, width] with one row per token, read from tensor ``key``.

    Each rank holds a slice of the vocabulary, padded to the size of the first rank's slice.
    """
    start, stop = shards.vocabulary.uneven(rows)
    tensor_slice = None if stop - start == rows else TensorSlice(0, start, stop)
    return Target(name, (Piece(key, (rows, width), tensor_slice),), shards.vocabulary.width(rows) - (stop - start))


OTHER_MODALITIES = (
    *(f"model.{name}." for name in ("vision_tower", "embed_vision", "vision_embedder", "audio_tower", "embed_audio")),
    *("vision_tower.", "mm_projector."),
)
"""Beginnings of the names of the tensors for images and sounds: of Gemma 4, and of Kimi-K2.5."""


def unread_keys(config: ModelConfig, present: Iterable[str], stem: str) -> set[str]:
    """Return the names among ``present`` of the keys and values of layers that read those of other layers. Published
    checkpoints hold such tensors, which no library reads.
    """
    layers = (f"{stem}layers.{index}.self_attn" for index in range(config.num_writing_layers, config.num_layers))
    stems = tuple(f"{layer}.{part}." for layer in layers for part in ("k_proj", "v_proj", "k_norm", "v_norm"))
    return {key for key in present if key.startswith(stems)}


def decoder_stem(present: Container[str]) -> str:
    """Return the prefix of the names of a decoder's tensors, empty for a base model that was saved without its head."""
    stems = ("model.", "model.language_model.", "language_model.model.", "")
    return next((stem for stem in stems if _holds_decoder(stem, present)), stems[0])


def head_key(present: Container[str]) -> str:
    """Return the name of the tensor of a decoder's output head."""
    nested = "language_model.lm_head.weight"
    return nested if nested in present else "lm_head.weight"


def is_model(present: Container[str]) -> bool:
    """Return True if a checkpoint with the tensor names ``present`` holds a decoder, and not only draft heads."""
    return _holds_decoder(decoder_stem(present), present)


def _holds_decoder(stem: str, present: Container[str]) -> bool:
    # A tied table may be stored as the output head alone. Draft heads may have a first norm, too, but without a prefix.
    has_first_norm = bool(stem) and f"{stem}layers.0.input_layernorm.weight" in present
    return has_first_norm or f"{stem}embed_tokens.weight" in present


def decoder_targets(config: ModelConfig, present: Container[str], shards: Shards = SINGLE_RANK) -> list[Target]:
    """Return the targets of a decoder's weights, by transformers' tensor names of a causal language model.

    ``present`` holds the checkpoint's tensor names, because vision-language models have two spellings. ``config`` is the
    checkpoint's; ``shards`` are the slices that this rank reads.
    """
    stem = decoder_stem(present)
    vocabulary, hidden = config.vocab_size, config.hidden_size
    embedding, head = f"{stem}embed_tokens.weight", head_key(present)
    if config.tie_embeddings and embedding not in present and head in present:
        embedding = head  # safetensors.torch.save_model stores a shared tensor once, under the first of its sorted names
    targets = [table_target("embedding", embedding, vocabulary, hidden, shards)]
    for index in range(config.num_layers):
        prefix, mixture = f"{stem}layers.{index}", config.has_experts(index)
        attends = index in config.attention_layers
        own = config.of_layer(index)
        targets += layer_targets(own, prefix, f"layers.{index}", attends=attends, mlp=not mixture, shards=shards)
        if not attends:
            targets += recurrent_targets(config, prefix, f"layers.{index}", present, shards)
        if mixture:
            targets += expert_targets(config, prefix, f"layers.{index}", present, shards)
    targets.append(Target("norm", (Piece(f"{stem}norm.weight", (config.hidden_size,)),)))
    if config.sandwich is not None and config.per_layer_width:
        width, size = config.per_layer_width, config.sandwich.input_size
        table = f"{stem}embed_tokens_per_layer.weight"
        targets += [
            Target("per_layer.table", (Piece(table, (config.sandwich.input_vocabulary, width)),)),
            Target("per_layer.projection", (Piece(f"{stem}per_layer_model_projection.weight", (width, hidden)),)),
            Target("per_layer.norm", (Piece(f"{stem}per_layer_projection_norm.weight", (size,)),)),
        ]
    if not config.tie_embeddings:
        targets.append(table_target("head", head, vocabulary, hidden, shards))
    return list(offset_norms(config, targets))


def decoder_weights(config: ModelConfig, weights: Mapping[str, Any]) -> DecoderWeights:
    """Return the decoder's weights from ``weights``, the loaded tensors by target name."""
    per_layer = {key.removeprefix("per_layer."): each for key, each in weights.items() if key.startswith("per_layer.")}
    return DecoderWeights(
        embedding=weights["embedding"],
        head=weights["embedding"] if config.tie_embeddings else weights["head"],
        norm=weights["norm"],
        layers=tuple(
            layer_weights(weights, f"layers.{index}", config.experts if config.has_experts(index) else None)
            for index in range(config.num_layers)
        ),
        per_layer=PerLayerEmbeddingWeights(**per_layer) if per_layer else None,
    )


def vision_name(key: str) -> str | None:
    """Return a tensor's name within the vision tower, or None for a tensor of the decoder."""
    for stem in ("visual.", "model.visual."):
        if key.startswith(stem):
            return key.removeprefix(stem)
    return None


def mtp_tensors(present: Iterable[str]) -> set[str]:
    """Return the names among ``present`` of the tensors of multi-token prediction heads."""
    names = list(present)
    prefixes = (*MTP_PREFIXES, *_UNREAD_HEAD, *(f"{layer}." for layer in _head_layers(names)))
    return {key for key in names if key.startswith(prefixes)}


def mtp_layer(present: Iterable[str]) -> str | None:
    """Return the first layer that is a head of the format ``layer``, such as ``model.layers.46``, or None."""
    return min(_head_layers(present), key=lambda name: (len(name), name), default=None)  # 9 before 10


def _head_layers(present: Iterable[str]) -> set[str]:
    return {key.partition(_JOIN)[0] for key in present if _JOIN in key}


def mtp_depth(raw: Mapping[str, Any]) -> Any:
    """Return the number of layers of multi-token prediction in the content of config.json, 1 if no field has it."""
    text = raw.get("text_config")
    fields = {**raw, **text} if isinstance(text, dict) else raw
    names = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    return next((fields[name] for name in names if fields.get(name) is not None), 1)


def mtp_format(present: Iterable[str]) -> str | None:
    """Return the format of the heads of multi-token prediction: a value of ``MTP_PREFIXES``, ``layer`` for a head that is
    stored as one more layer (GLM-4.5), or None without such heads.
    """
    names = list(present)
    by_prefix = (MTP_PREFIXES[prefix] for key in names for prefix in MTP_PREFIXES if key.startswith(prefix))
    return next(by_prefix, "layer" if mtp_layer(names) is not None else None)


def is_unused_tensor(key: str) -> bool:
    """Return True if ``key`` names a tensor that loading accepts and ignores: rotary frequencies in old checkpoints."""
    return key.endswith("rotary_emb.inv_freq")


# -- hybrid models -----------------------------------------------------------------------------------------------------


_FUSED_PARTS = ("in_proj_qkvz", "in_proj_ba")
_STORED_WEIGHTS = ("weight", "weight_packed", "qweight")
_RECORDS = MappingProxyType(
    {
        _RECURRENT: DeltaRuleWeights,
        _LATENT: LatentWeights,
        _SANDWICH_EXPERTS: SandwichExpertVectors,
        _PER_LAYER: PerLayerInputWeights,
    }
)
_OFFSET_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "final_norm", "token_norm", "hidden_norm")


def recurrent_targets(config: ModelConfig, prefix: str, name: str, present: Container[str], shards: Shards) -> list[Target]:
    """Return the weights of the recurrent block of one layer, called ``name`` in the model and ``prefix`` in the checkpoint.

    ``present`` holds the checkpoint's tensor names, which determine the layout.
    """
    recurrent = config.recurrent
    assert recurrent is not None  # the caller asks for layers that are recurrent
    stem, hidden = f"{prefix}.linear_attn", config.hidden_size
    first, last = shards.attention.even(recurrent.key_heads)
    is_whole = last - first == recurrent.key_heads
    per_key, channels, width = recurrent.value_heads // recurrent.key_heads, recurrent.channels, recurrent.value_width
    key_rows, value_rows = recurrent.key_size, per_key * recurrent.value_size  # rows per key head

    def own_rows(size: int, start: int = 0) -> TensorSlice | None:
        """Return this rank's rows in a block from row ``start`` on that has ``size`` rows per key head; None for all rows."""
        return None if is_whole else TensorSlice(0, start + first * size, start + last * size)

    def grouped(part: str, *sizes: int) -> tuple[Piece, ...]:
        """Return the pieces of a tensor whose rows are grouped by key head, one block of each of ``sizes`` per group."""
        group, heads = sum(sizes), range(first, last)
        starts = [(head * group + sum(sizes[:index]), size) for index, size in enumerate(sizes) for head in heads]
        slices = (TensorSlice(0, start, start + size) for start, size in starts)
        return tuple(Piece(f"{stem}.{part}.weight", (group * recurrent.key_heads, hidden), rows) for rows in slices)

    # Of q, k and v in a tensor over all channels of the convolution.
    starts = ((key_rows, 0), (key_rows, recurrent.key_width), (value_rows, 2 * recurrent.key_width))
    own_channels = (None,) if is_whole else tuple(own_rows(size, start) for size, start in starts)
    if any(f"{stem}.{part}.{kind}" in present for part in _FUSED_PARTS for kind in _STORED_WEIGHTS):
        projections = grouped(_FUSED_PARTS[0], key_rows, key_rows, value_rows, value_rows)
        projections += grouped(_FUSED_PARTS[1], per_key, per_key)
    else:
        sizes = (("z", width, value_rows), ("b", recurrent.value_heads, per_key), ("a", recurrent.value_heads, per_key))
        projections = (
            *(Piece(f"{stem}.in_proj_qkv.weight", (channels, hidden), rows) for rows in own_channels),
            *(Piece(f"{stem}.in_proj_{part}.weight", (rows, hidden), own_rows(size)) for part, rows, size in sizes),
        )
    output = Piece(f"{stem}.out_proj.weight", (hidden, width), as_columns(own_rows(value_rows)))
    convolution = (Piece(f"{stem}.conv1d.weight", (channels, 1, recurrent.kernel_size), rows, True) for rows in own_channels)
    a_log, dt_bias = (Piece(f"{stem}.{part}", (recurrent.value_heads,), own_rows(per_key)) for part in ("A_log", "dt_bias"))
    return [
        Target(f"{name}.qkv", projections),
        Target(f"{name}.output", (output,)),
        Target(f"{name}.{_RECURRENT}convolution", tuple(convolution)),
        Target(f"{name}.{_RECURRENT}a_log", (a_log,), wide=True),
        Target(f"{name}.{_RECURRENT}dt_bias", (dt_bias,), wide=True),
        Target(f"{name}.{_RECURRENT}norm", (Piece(f"{stem}.norm.weight", (recurrent.value_size,)),)),
    ]


def as_columns(rows: TensorSlice | None) -> TensorSlice | None:
    """Return the slice of the columns that multiply the results of ``rows``; None stays None."""
    return None if rows is None else replace(rows, dim=1)


def gated_queries(qkv: Target, config: ModelConfig, shards: Shards) -> Target:
    """Return the target ``qkv`` with the rows of queries first, and those of the attention's gate after keys and values.

    ``q_proj`` holds the query and then the gate of each head.
    """
    query, size = qkv.pieces[0], config.head_size
    shape = (2 * config.num_heads * size, query.shape[1])
    first, last = shards.heads(config)

    def rows(start: int) -> tuple[Piece, ...]:
        starts = (head * 2 * size + start for head in range(first, last))
        return tuple(Piece(query.key, shape, TensorSlice(0, begin, begin + size)) for begin in starts)

    return replace(qkv, pieces=(*rows(0), *qkv.pieces[1:], *rows(size)))


def offset_norms(config: ModelConfig, targets: Iterable[Target]) -> Iterator[Target]:
    """Yield ``targets``, with the config's offset for norms that have one. These norms are loaded in float32."""
    for target in targets:
        is_norm = target.name == "norm" or target.name.rpartition(".")[2] in _OFFSET_NORMS
        yield replace(target, wide=True, offset=config.norm_offset) if config.norm_offset and is_norm else target


def nest_records(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's weights by field, with those of each prefix of ``_RECORDS`` moved into one record."""
    for prefix, record in _RECORDS.items():
        inner = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
        if inner:
            outer = {key: value for key, value in fields.items() if not key.startswith(prefix)}
            fields = outer | {prefix.rstrip("."): record(**inner)}
    return fields


# -- mixtures of experts -----------------------------------------------------------------------------------------------


_EXPERT_PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_ROUTERS = MappingProxyType({**dict.fromkeys(SANDWICH_FAMILIES, "router.proj"), "gpt_oss": "router", "hy_v3": "router.gate"})
_CORRECTIONS = MappingProxyType(
    {
        "ernie4_5_moe": "moe_statics.e_score_correction_bias",
        "hy_v3": "expert_bias",
        "minimax_m2": "e_score_correction_bias",
    }
)
_SHARED = MappingProxyType({**dict.fromkeys(SANDWICH_FAMILIES, "mlp"), "hy_v3": "shared_mlp"})
"""Names of routers, of their corrections and of shared experts within a layer's block of experts, where these are unusual."""
_MIXTRAL_FAMILIES = ("mixtral", "minimax_m2")
_SANDWICH_VECTORS = (
    ("input_norm", "pre_feedforward_layernorm_2.weight"),
    ("output_norm", "post_feedforward_layernorm_2.weight"),
    ("mlp_output_norm", "post_feedforward_layernorm_1.weight"),
    ("router_norm", "router.scale"),
    ("factors", "router.per_expert_scale"),
)
_MIXTRAL_PARTS = ("w1.weight", "w3.weight", "w2.weight")


def check_count(config: ModelConfig, tensors: Collection[str], origin: object) -> None:
    """Raise :class:`CheckpointError` if the config has far more experts than the files have tensors.

    This bounds the number of tensor names that the mapping generates.
    """
    experts = config.experts
    if experts is None:
        return
    names = (key.removesuffix(f".{PACKED}") for key in tensors)
    stacks = {name.rpartition(".")[0] for name in names if name.endswith(STACKS)}
    layers = config.num_layers - len(experts.dense_layers) - len(stacks)
    if layers * experts.count > len(tensors):
        raise CheckpointError(
            f"{origin}: holds {len(tensors)} tensors, and the config has {experts.count} experts in each of {layers} layers "
            "without stacks of them; expected three tensors for each expert, or two for all of a layer"
        )


def has_router(config: ModelConfig, prefix: str, present: Container[str]) -> bool:
    """Return True if the layer called ``prefix`` in a checkpoint with the tensors ``present`` is a mixture."""
    return f"{_experts_name(config, prefix, present)}.{_ROUTERS.get(config.family, 'gate')}.weight" in present


def _experts_name(config: ModelConfig, prefix: str, present: Container[str]) -> str:
    """Return the name of a layer's block of experts, for a layer called ``prefix`` in the checkpoint."""
    if config.sandwich is not None:
        return prefix
    has_own_name = config.family in _MIXTRAL_FAMILIES and f"{prefix}.mlp.gate.weight" not in present
    return f"{prefix}.block_sparse_moe" if has_own_name else f"{prefix}.mlp"


def expert_targets(config: ModelConfig, prefix: str, name: str, present: Container[str], shards: Shards) -> list[Target]:
    """Return the expert weights of one layer, called ``name`` in the model and ``prefix`` in the checkpoint.

    ``present`` holds the checkpoint's tensor names, which determine the layout. A rank holds the whole router, and either a
    slice of every expert's intermediate size or some of the experts. Stacks are read as their concatenated rows.
    """
    experts = config.experts
    assert experts is not None  # the caller asks for layers that have some
    hidden, family = config.hidden_size, config.family
    block = _experts_name(config, prefix, present)
    router = f"{block}.{_ROUTERS.get(family, 'gate')}"
    as_deepseek, shape = config.has_deepseek_experts, (experts.count, hidden)
    targets = [Target(f"{name}.router", (Piece(f"{router}.weight", shape),), wide=as_deepseek)]
    if config.corrects_scores:
        key = f"{block}.{_CORRECTIONS.get(family, 'gate.e_score_correction_bias')}"
        sizes = (1, experts.count) if family == "ernie4_5_moe" else (experts.count,)
        targets.append(Target(f"{name}.router_correction", (Piece(key, sizes),), wide=True))
    if experts.biases is not None:
        targets.append(Target(f"{name}.router_bias", (Piece(f"{router}.bias", (experts.count,)),)))
    if experts.biases is not None or any(f"{block}.experts.{part}" in present for part in STACKS):
        targets += _stacked_targets(experts, hidden, f"{block}.experts", name, shards)
    else:
        first = f"{block}.experts.0"
        has_usual_names = any(f"{first}.{part}" in present for part in _EXPERT_PARTS)
        parts = _MIXTRAL_PARTS if block.endswith(".block_sparse_moe") and not has_usual_names else _EXPERT_PARTS
        held = shards.held_experts(experts.count)
        each = [f"{block}.experts.{expert}" for expert in range(*(held or (0, experts.count)))]
        span = shards.mlp.even(experts.intermediate_size) if held is None else None
        targets += _expert_targets(each, parts, hidden, experts.intermediate_size, name, "", span)
    if experts.shared_size:
        usual = "shared_experts" if as_deepseek else "shared_expert"
        shared = f"{block}.{_SHARED.get(family, usual)}"
        span = shards.mlp.even(experts.shared_size)
        targets += _expert_targets([shared], _EXPERT_PARTS, hidden, experts.shared_size, name, "shared_", span)
        if not as_deepseek and config.sandwich is None:
            targets.append(Target(f"{name}.shared_gate", (Piece(f"{shared}_gate.weight", (1, hidden)),)))
    if config.sandwich is not None:
        targets += _sandwich_targets(experts, hidden, prefix, f"{name}.{_SANDWICH_EXPERTS}")
    return targets


def _sandwich_targets(experts: ExpertsConfig, hidden: int, prefix: str, name: str) -> list[Target]:
    """Return the vectors of experts next to an MLP; those of the router are at least float32."""
    sizes = {"factors": experts.count}
    return [
        Target(f"{name}{field}", (Piece(f"{prefix}.{part}", (sizes.get(field, hidden),)),), wide=part.startswith("router."))
        for field, part in _SANDWICH_VECTORS
    ]


def _expert_targets(
    stems: list[str],
    parts: tuple[str, str, str],
    hidden: int,
    inner: int,
    name: str,
    field: str,
    span: tuple[int, int] | None,
) -> list[Target]:
    """Return the stacked gate-up and down weights of experts or a shared expert with one tensor per projection.

    ``span``: the part of the intermediate size ``inner`` that is read; None for all of it.
    """
    gate, up, down = parts
    is_unsliced = span is None or span == (0, inner)
    rows, columns = (None, None) if span is None or is_unsliced else (TensorSlice(0, *span), TensorSlice(1, *span))
    gates = [Piece(f"{stem}.{part}", (inner, hidden), rows) for stem in stems for part in (gate, up)]
    return [
        Target(f"{name}.{field}gate_up", tuple(gates)),
        Target(f"{name}.{field}down", tuple(Piece(f"{stem}.{down}", (hidden, inner), columns) for stem in stems)),
    ]


def _stacked_targets(experts: ExpertsConfig, hidden: int, stem: str, name: str, shards: Shards) -> list[Target]:
    """Return the gate-up and down weights of a checkpoint that stores the experts of a layer as two stacked tensors."""
    inner, count = experts.intermediate_size, experts.count
    held = shards.held_experts(count)
    span = shards.mlp.even(inner) if held is None else (0, inner)
    gates: Sequence[TensorSlice | None] = [None]
    downs: Sequence[TensorSlice | None] = [None]
    if held is not None or (experts.biases is not None and span == (0, inner)):  # expert by expert
        each_held = range(*(held or (0, count)))
        gates, downs = ([TensorSlice(0, 0, rows, each) for each in each_held] for rows in (2 * inner, hidden))
    elif span != (0, inner):
        starts = [(half + span[0], half + span[1]) for half in (0, inner)]
        gates, downs = [TensorSlice(0, *rows, each) for each in range(count) for rows in starts], [TensorSlice(1, *span)]
    parts = [("gate_up", "", gates, (count, 2 * inner, hidden)), ("down", "", downs, (count, hidden, inner))]
    if experts.biases is not None:
        parts.append(("gate_up", "_bias", gates, (count, 2 * inner, 1)))
    if experts.biases is not None and (held is not None or shards.mlp.rank == 0):
        parts.append(("down", "_bias", [None] if held is None else downs, (count, hidden, 1)))
    return [
        Target(
            f"{name}.{field}{suffix}",
            tuple(Piece(f"{stem}.{field}_proj{suffix}", shape, each, stack=True) for each in slices),
        )
        for field, suffix, slices, shape in parts
    ]


def stack_experts(experts: ExpertsConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's weights by field, with the expert weights as stacks [E, ...].

    Quantized expert weights keep their concatenated rows. Biases become [E, 2 I] and [E, H].
    """
    stacks = {key: fields[key] for key in ("gate_up", "down")}
    biases = {key: fields[key] for key in ("gate_up_bias", "down_bias") if key in fields}
    if biases and not isinstance(stacks["down"], Tensor):  # zeros on a rank that doesn't add the bias
        biases.setdefault("down_bias", biases["gate_up_bias"].new_zeros(stacks["down"].shape[0]))
    return (
        fields
        | {
            key: value.view(experts.held, -1, value.shape[-1]) if isinstance(value, Tensor) else value
            for key, value in stacks.items()
        }
        | {key: value.view(experts.held, -1) for key, value in biases.items()}
    )
