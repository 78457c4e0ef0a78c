"""ModelConfig: the shape and constants of a decoder that its tensors don't determine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from outrider.device import AttentionShape, ClampedActivation, ConfigError, ExpertActivation, KernelSet
from outrider.model.config.rope import RopeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """Placeholder tokens and position parameters of images and videos in a vision-language model."""

    image_token: int
    """Placeholder token of one image feature."""
    video_token: int
    """Placeholder token of one video feature."""
    merge: int
    """``merge`` x ``merge`` patches are merged into one feature."""
    tokens_per_second: int = 0
    """Spacing of video frames on the time axis. 0 if each frame advances the time by one position."""
    frame_marks: tuple[int, int] | None = None
    """Tokens before and after the placeholders of each temporal patch of a video, in a model whose prompts state the time
    of each one as text. None if the placeholders of a video are consecutive.
    """
    deepstack: int = 0
    """Number of first layers to whose output the vision tower adds features of its own (Meng et al. 2024)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandwichConfig:
    """Constants of a model with norms before and after each half of a layer, whose full layers have other heads (Gemma 4)."""

    full_layers: tuple[int, ...]
    """Indices of the layers without a window."""
    kv_heads: int
    head_size: int
    """Number of key heads and size of each head in the full layers."""
    rope: RopeConfig
    """The rope of the full layers."""
    values_are_keys: bool = False
    """True if the full layers have no projection of values: values are the keys before their norm."""
    logit_cap: float = 0.0
    """The largest magnitude that logits approach, by a hyperbolic tangent; 0 for uncapped logits."""
    sharing_layers: int = 0
    """Number of last layers without keys and values. Each reads those of the last earlier layer of its kind."""
    has_wide_mlps: bool = False
    """True if the MLPs of the sharing layers have twice the model's intermediate size."""
    input_size: int = 0
    """Size of the input that each layer has for each token (per-layer embeddings); 0 without them."""
    input_vocabulary: int = 0
    """Number of tokens that the table of per-layer embeddings has, at least those of the vocabulary."""


EXPANDED_TOKENS = 4
"""Number of cached tokens for each new one, up to which a prompt's latent vectors are expanded to keys and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig:
    """Sizes of attention whose queries, keys and values are expanded from latent vectors (DeepSeek-V2). Raises
    :class:`ConfigError` for values that are larger than keys.
    """

    query_rank: int
    """Size of the latent vector of queries; 0 if they are computed from the hidden state."""
    rank: int
    """Size of the latent vector of keys and values."""
    rotated_size: int
    """Number of rotated dimensions of a query, and of the key that all heads share."""
    unrotated_size: int
    """Number of the other dimensions of a head's query and key."""
    value_size: int
    """Number of dimensions of a head's value, at most ``head_size``."""
    interleaved: bool
    """True if neighbouring dimensions rotate together, False if each rotates with the one half of them further on."""

    def __post_init__(self) -> None:
        if self.value_size > self.head_size:
            raise ConfigError(
                f"model config: values have {self.value_size} dimensions (v_head_dim), expected at most those of a key, "
                f"{self.head_size}"
            )

    @property
    def head_size(self) -> int:
        """Number of dimensions of a head's query and key."""
        return self.rotated_size + self.unrotated_size

    def prompt_values(self, heads: int) -> int:
        """Return the number of values, in the model's dtype, that attention with ``heads`` heads holds for each prompt token:
        the queries and the result, and keys and values thrice: expanded, joined, and copied in their order.
        """
        expanded = 4 * self.head_size + self.unrotated_size + self.value_size
        return heads * (2 * self.head_size + EXPANDED_TOKENS * expanded)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectedRouterConfig:
    """A router that corrects scores for the choice of experts: the fields of :class:`~outrider.device.CorrectedRouting`."""

    groups: int = 1
    chosen_groups: int = 1
    factor: float = 1.0
    epsilon: float = 1e-20
    minimum: float = 0.0
    softmax: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """A mixture of experts that replaces a layer's MLP. Raises :class:`ConfigError` for impossible values."""

    count: int
    """Number of routed experts."""
    per_token: int
    """Number of experts that each token is routed to."""
    intermediate_size: int
    """Intermediate size of each routed expert."""
    renormalize: bool
    """True if the routing weights of a token's experts are normalized to sum to 1."""
    shared_size: int = 0
    """Intermediate size of the shared expert, which processes every token. 0 if there is none. In a sandwich
    (:class:`SandwichConfig`) it is the MLP next to the experts.
    """
    dense_layers: tuple[int, ...] = ()
    """Indices of the layers that have a dense MLP of the model's intermediate size."""
    parts: int = 1
    """Number of ranks that divide the routed experts; each holds ``count / parts`` of them."""
    biases: ClampedActivation | None = None
    """The activation of experts with biases, whose router has a bias, too. None for experts without biases."""
    activation: ExpertActivation = "silu"
    """The activation of experts without biases."""
    routing: CorrectedRouterConfig | None = None
    """A router with a correction, next to a shared expert without a gate. None for a router with a softmax alone."""

    def __post_init__(self) -> None:
        if min(self.count, self.per_token, self.intermediate_size) < 1 or self.shared_size < 0:
            raise ConfigError(f"model config: experts are {self}, expected positive numbers")
        if self.per_token > self.count:
            raise ConfigError(
                f"model config: a token goes to {self.per_token} experts, expected at most the {self.count} there are"
            )
        groups = self.routing or CorrectedRouterConfig()
        if self.count % groups.groups or self.per_token * groups.groups > groups.chosen_groups * self.count:
            raise ConfigError(
                f"model config: {self.per_token} of {self.count} experts are in {groups.chosen_groups} of {groups.groups} "
                "groups (topk_group, n_group), expected groups of one size, and so many experts in those that are chosen"
            )

    @property
    def held(self) -> int:
        """Number of routed experts that one rank holds."""
        return self.count // self.parts

    def shard(self, ranks: int, *, divided: bool = False) -> ExpertsConfig:
        """Return the config of one of ``ranks`` ranks, which holds a slice of every expert's intermediate size.

        ``divided``: the rank holds some of the routed experts instead, and a slice of the shared expert. Raises
        :class:`ConfigError` if ``ranks`` does not divide an intermediate size or the number of experts.
        """
        if divided and self.count % ranks:
            raise ConfigError(
                f"{self.count} experts can't be divided among {ranks} ranks; expected a number that divides them, or "
                "no expert parallelism"
            )
        for size in (self.shared_size,) if divided else (self.intermediate_size, self.shared_size):
            if size % ranks:
                raise ConfigError(
                    f"experts of an inner size of {size} can't be shared out among {ranks} ranks; expected a number that "
                    "divides it"
                )
        if divided:
            return replace(self, parts=ranks, shared_size=self.shared_size // ranks)
        return replace(self, intermediate_size=self.intermediate_size // ranks, shared_size=self.shared_size // ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentConfig:
    """The sizes of layers with a gated delta rule in place of attention. Raises :class:`ConfigError` for
    impossible values.
    """

    layers: tuple[int, ...]
    """Indices of the recurrent layers, ascending."""
    key_heads: int
    value_heads: int
    """Number of value heads, a multiple of ``key_heads``."""
    key_size: int
    value_size: int
    kernel_size: int
    """Number of tokens that the short convolution reads, the current one included."""
    state_dtype: torch.dtype = torch.float32
    """Dtype of the delta rule's state. A model in a wider dtype keeps its states in that dtype."""

    def __post_init__(self) -> None:
        sizes = (self.key_heads, self.value_heads, self.key_size, self.value_size)
        if min(sizes) < 1 or self.kernel_size < 2 or not self.layers:
            raise ConfigError(
                f"model config: recurrent layers are {self}, expected positive numbers and a kernel of 2 or more"
            )
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"model config: linear_num_value_heads {self.value_heads} isn't a multiple of linear_num_key_heads "
                f"{self.key_heads}"
            )

    @property
    def key_width(self) -> int:
        """Number of elements of a token's keys in all heads; the queries have as many."""
        return self.key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """Number of elements of a token's values in all heads; the output gate has as many."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the short convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def prompt_values(self) -> int:
        """Number of values, in the model's dtype, that a recurrent layer's forward pass holds for each prompt token.

        They are the projections, the convolution, the operands of chunks of 64 tokens and the state before each chunk.
        """
        heads, keys = self.value_heads, self.key_size
        chunks = self.key_width + heads * keys + heads * keys * self.value_size // 64
        return 2 * self.channels + 3 * self.value_width + chunks

    def state_shapes(self) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Shapes of one request's states in one layer: [K - 1, channels] inputs of the convolution, and the delta rule's
        [value heads, key size, value size].
        """
        return (self.kernel_size - 1, self.channels), (self.value_heads, self.key_size, self.value_size)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one request's states in all layers of a model in ``dtype``."""
        inputs, state = self.state_shapes()
        wide = torch.promote_types(dtype, self.state_dtype)
        return len(self.layers) * (math.prod(inputs) * dtype.itemsize + math.prod(state) * wide.itemsize)

    @property
    def update_width(self) -> int:
        """Number of elements that describe how a token changes the delta rule's state: keys, their factors, and the
        state's factors.
        """
        return self.key_width + self.value_width + self.value_heads

    def window_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one verified token in the windows of all layers: the input of the convolution, and two halves
        of updates.
        """
        wide = torch.promote_types(dtype, torch.float32)
        return len(self.layers) * (self.channels * dtype.itemsize + 2 * self.update_width * wide.itemsize)

    def shard(self, ranks: int) -> RecurrentConfig:
        """Return the config of one of ``ranks`` tensor-parallel ranks, which holds key heads with their value heads.

        Raises :class:`ConfigError` if ``ranks`` does not divide the key heads.
        """
        if self.key_heads % ranks:
            raise ConfigError(
                f"recurrent layers with {self.key_heads} key heads can't be shared out among {ranks} ranks; expected a "
                "number that divides them"
            )
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and constants of a Llama-style decoder. Raises :class:`ConfigError` for impossible values."""

    family: str
    """Model type in the checkpoint's config.json, such as ``llama``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_eps: float
    max_context: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    attention_bias: bool = False
    """True if the q, k and v projections have biases."""
    output_bias: bool = False
    """True if the attention output projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """True if each head of q and k is normalized before the rotary embedding."""
    joint_qk_norm: bool = False
    """True if that norm is one of all heads of q, and of all heads of k."""
    attention_gate: bool = False
    """True if the attention output is multiplied by the sigmoid of a gate, whose rows follow each head's in ``q_proj``."""
    attention_sinks: bool = False
    """True if the softmax of each attention head has one more column, with a stored logit and without a value."""
    norm_offset: float = 0.0
    """Number that is added to the stored weights of all norms but those of recurrent layers."""
    windows: tuple[int, ...] = ()
    """Attention window of each layer in positions, the token's own included. 0 means full attention."""
    experts: ExpertsConfig | None = None
    """The mixture of experts that replaces MLPs, or None."""
    recurrent: RecurrentConfig | None = None
    """The layers with a recurrent state instead of attention, or None."""
    values_are_keys: bool = False
    """True for the config of a layer whose values are its keys before their norm: it has no projection of values."""
    shares_keys: bool = False
    """True for the config of a layer that reads the keys and values of an earlier one: it projects queries alone."""
    latent: LatentConfig | None = None
    """The latent vectors of attention; None for other attention."""
    sandwich: SandwichConfig | None = None
    """The full layers of a model whose layers norm their results, too; None for other models."""
    vision: VisionConfig | None = None
    """None for a text-only model."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a generation."""
    bos_token_id: int | None = None
    """The token that a prompt starts with, or None if it needs none."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "max_context",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"model config: {name} is {value!r}, expected a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model config: num_heads {self.num_heads} isn't a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ConfigError(f"model config: head_size is {self.head_size}, expected an even number")
        if not (math.isfinite(self.rms_eps) and self.rms_eps >= 0):
            raise ConfigError(f"model config: rms_eps is {self.rms_eps}, expected a number of at least 0")
        if self.rope.kind == "dynamic" and self.head_size < 4:
            raise ConfigError(f"model config: head_size is {self.head_size}, expected at least 4 for dynamic rope scaling")
        rotated = self.rope.rotated_size(self.head_size)
        for factors in (self.rope.short_factors, self.rope.long_factors):
            if self.rope.kind == "longrope" and len(factors) != rotated // 2:
                raise ConfigError(
                    f"model config: longrope has {len(factors)} factors in a list, expected half the rotated size of a head, "
                    f"{rotated // 2}, in each of short_factor and long_factor"
                )
        if self.rope.sections and sum(self.rope.sections) != rotated // 2:
            raise ConfigError(
                f"model config: rope sections {self.rope.sections} sum to {sum(self.rope.sections)}, expected half the "
                f"rotated size of a head, {rotated // 2}"
            )
        if rotated % 2 or not rotated:
            raise ConfigError(
                f"model config: partial_rotary_factor {self.rope.rotated_share:g} rotates {rotated} of {self.head_size} "
                "dimensions of a head, expected an even number of at least 2"
            )
        if self.recurrent is not None and not self.attention_layers:
            raise ConfigError("model config: all layers are recurrent; expected at least one with attention")
        if self.vision is not None and self.vision.deepstack >= self.num_layers:
            raise ConfigError(
                f"model config: {self.vision.deepstack} layers receive features of the vision tower (deepstack), expected "
                f"fewer than the {self.num_layers} layers"
            )
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_layers)
        if len(self.windows) != self.num_layers or min(self.windows) < 0:
            raise ConfigError(f"model config: windows are {self.windows}, expected {self.num_layers} numbers of at least 0")
        if set(self.windows[: max(self.num_writing_layers, 0)]) != set(self.windows):
            raise ConfigError(
                f"model config: the last {self.num_layers - self.num_writing_layers} of {self.num_layers} layers share keys "
                "and values (num_kv_shared_layers), expected an earlier layer of each kind, whose keys and values they read"
            )

    @property
    def feature_size(self) -> int:
        """Width of a media feature: the embedding, and then what each deepstack layer adds to its output."""
        return self.hidden_size * (1 if self.vision is None else 1 + self.vision.deepstack)

    @property
    def inner_width(self) -> int:
        """The largest number of intermediate values that an MLP, or all experts of a token together, compute per token."""
        experts = self.experts
        if experts is None:
            return self.intermediate_size * (2 if self.sandwich is not None and self.sandwich.has_wide_mlps else 1)
        mixed = experts.per_token * experts.intermediate_size + experts.shared_size
        return max(mixed, self.intermediate_size if experts.dense_layers else 0)

    def check_kernels(self, kernels: KernelSet) -> None:
        """Raise :class:`ConfigError` if ``kernels`` don't take an operand that the model has."""
        experts = self.experts
        needed = {
            "attention_sinks": self.attention_sinks,
            "expert_biases": experts is not None and experts.biases is not None,
            "expert_gelu": experts is not None and experts.activation == "gelu_tanh",
            "joint_head_norms": self.joint_qk_norm,
            "corrected_routing": self.corrects_scores,
        }
        missing = [name for name, is_needed in needed.items() if is_needed and name not in kernels.optional_operands]
        if missing:
            raise ConfigError(
                f"a {self.family} model needs {' and '.join(missing)}, which the kernels {kernels.name!r} don't take; "
                "expected kernels whose optional_operands list them, such as the references (BACKEND:kernels=torch)"
            )

    @property
    def corrects_scores(self) -> bool:
        """True if the router of each mixture has sigmoids instead of a softmax."""
        return self.experts is not None and self.experts.routing is not None

    @property
    def has_deepseek_experts(self) -> bool:
        """True if routers are in float32 and the shared expert of each mixture has no gate, as in DeepSeek's models."""
        return self.corrects_scores or self.latent is not None

    @property
    def attention_scale(self) -> float:
        """Factor by which attention multiplies the dot products of queries and keys."""
        if self.sandwich is not None:
            return 1.0
        scale = float(self.head_size**-0.5)
        return scale if self.latent is None else scale * self.rope.score_factor

    def of_layer(self, index: int) -> ModelConfig:
        """Return the config with the heads, the rope and the MLP of layer ``index``, if layers differ in them."""
        if self.sandwich is None:
            return self
        own, full = self, self.sandwich
        if index in full.full_layers:
            own = replace(
                own,
                num_kv_heads=full.kv_heads,
                head_size=full.head_size,
                values_are_keys=full.values_are_keys,
                rope=full.rope,
            )
        if index < self.num_writing_layers:
            return own
        return replace(own, shares_keys=True, intermediate_size=self.intermediate_size * (2 if full.has_wide_mlps else 1))

    def attention_shapes(self, dtype: torch.dtype, *, page_size: int) -> tuple[AttentionShape, ...]:
        """Return the attention shapes of the layers, without duplicates, for queries of ``dtype``; none of latent attention,
        which isn't planned.
        """
        if self.latent is not None:
            return ()
        found = {
            AttentionShape(
                heads=self.num_heads,
                kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                page_size=page_size,
                dtype=dtype,
                scale=self.attention_scale,
                window=window,
            ): None
            for layer, window in ((self.of_layer(index), window) for index, window in enumerate(self.windows))
        }
        return tuple(found)

    @property
    def cached_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Number of heads and their size, of the keys and of the values that the cache holds for each token of a layer.

        Latent attention caches the rotated part of the key, and the latent vector, for all heads.
        """
        if self.latent is not None:
            return (1, self.latent.rotated_size), (1, self.latent.rank)
        return (self.num_kv_heads, self.head_size), (self.num_kv_heads, self.head_size)

    @property
    def attended_size(self) -> int:
        """Number of products of a query head with each cached token: with its key, and of the weight with its value."""
        if self.latent is not None:
            return self.latent.rotated_size + 2 * self.latent.rank
        return 2 * self.head_size

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with attention, which read keys and values in the KV cache."""
        recurrent = () if self.recurrent is None else self.recurrent.layers
        return tuple(index for index in range(self.num_layers) if index not in recurrent)

    @property
    def num_writing_layers(self) -> int:
        """Number of first layers that write keys and values, or states. The layers after them only read those of others."""
        return self.num_layers - (0 if self.sandwich is None else self.sandwich.sharing_layers)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have pages of their own in the KV cache, in the order of ``KVCache.layers``."""
        return tuple(index for index in self.attention_layers if index < self.num_writing_layers)

    def cache_index(self, layer: int) -> int:
        """Return the index in ``KVCache.layers`` of the keys and values that ``layer``, which has attention, reads."""
        if layer in self.cached_layers:
            return self.cached_layers.index(layer)
        return max(index for index, own in enumerate(self.cached_layers) if self.windows[own] == self.windows[layer])

    @property
    def per_layer_width(self) -> int:
        """Number of values of a token's per-layer inputs in all layers; 0 without per-layer embeddings."""
        return 0 if self.sandwich is None else self.num_layers * self.sandwich.input_size

    def has_experts(self, layer: int) -> bool:
        """Return True if ``layer`` has a mixture of experts instead of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers
