"""Tiny decoders in float64, and draft heads for them that are accurate by construction.

The embeddings are nearly orthogonal, and the output head maps each token to its successor (a permutation). The next token is
therefore mostly the successor of the last one. Random layers disturb this, so a target's tokens depend on all earlier tokens.
A drafter that knows only the successors has many drafts accepted and many rejected.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from outrider import Engine, EngineConfig, SamplingParams
from outrider.device import DeltaRuleWeights
from outrider.device.kernels.weights import plain as plain_weight
from outrider.model import (
    Decoder,
    DecoderWeights,
    DFlashHead,
    Eagle3Head,
    EagleHead,
    ExpertsConfig,
    HeadWeights,
    LayerWeights,
    ModelConfig,
    MtpHead,
    RecurrentConfig,
    RopeConfig,
)
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider_cpu.backend import CpuBackend

if TYPE_CHECKING:
    from outrider.device.kernels.kernelset import KernelSet
    from outrider.speculative.proposer import Proposer

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER = 24, 32, 4, 2, 8, 48


def random(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return a tensor of ``shape`` with normally distributed float64 values, times ``scale``."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def config(layers: int = 3, **overrides: Any) -> ModelConfig:
    """Return the config of a tiny model; ``overrides`` replaces fields of :class:`ModelConfig`."""
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_layers": layers,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "rms_eps": 1e-6,
        "max_context": 128,
        "rope": RopeConfig(theta=100.0),
        "eos_token_ids": (5,),
    }
    return ModelConfig(**fields | overrides)


def layer(generator: torch.Generator, noise: float, *, width: int = HIDDEN, norm: bool = True) -> LayerWeights:
    """Return a random decoder layer.

    ``noise`` scales its output, ``width`` is the input width of its projections, and ``norm`` adds a norm before attention.
    """
    ones = torch.ones(HIDDEN, dtype=torch.float64)
    scale = noise / HIDDEN**0.5
    return LayerWeights(
        qkv=random(generator, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, width, scale=1 / width**0.5),
        output=random(generator, HIDDEN, HEADS * HEAD_SIZE, scale=scale),
        gate_up=random(generator, 2 * INNER, HIDDEN, scale=1 / HIDDEN**0.5),
        down=random(generator, HIDDEN, INNER, scale=scale),
        mlp_norm=ones,
        attention_norm=ones if norm else None,
    )


@functools.cache
def embeddings() -> torch.Tensor:
    """Return nearly orthogonal embeddings, [VOCABULARY, HIDDEN]."""
    square = random(torch.Generator().manual_seed(1), HIDDEN, HIDDEN)
    rows: torch.Tensor = torch.linalg.qr(square).Q[:VOCABULARY] * HIDDEN**0.5
    return rows


@functools.cache
def successors() -> torch.Tensor:
    """Return the successor of each token, [VOCABULARY] int64: a permutation of the vocabulary."""
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))


def decoder(
    *, layers: int = 3, noise: float = 1.0, seed: int = 3, kernels: KernelSet | None = None, **overrides: Any
) -> Decoder:
    """Return a decoder on the host whose next token mostly is the successor of the last token."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.float64)
    head[successors()] = embeddings() / HIDDEN**0.5
    weights = DecoderWeights(
        embedding=embeddings(),
        head=head,
        norm=torch.ones(HIDDEN, dtype=torch.float64),
        layers=tuple(layer(generator, noise) for _ in range(layers)),
    )
    return Decoder(config(layers, **overrides), weights, kernels or BACKEND.kernels)


EXPERTS = ExpertsConfig(count=8, per_token=2, intermediate_size=16, renormalize=True, shared_size=12, dense_layers=(1,))


def _experts_layer(generator: torch.Generator, dense: LayerWeights) -> LayerWeights:
    """Return the layer ``dense`` with random experts and a shared expert instead of its MLP."""
    scale, each = 1 / HIDDEN**0.5, (EXPERTS.count, EXPERTS.intermediate_size)
    return replace(
        dense,
        router=random(generator, EXPERTS.count, HIDDEN, scale=1 / HIDDEN**0.5),
        gate_up=random(generator, each[0], 2 * each[1], HIDDEN, scale=1 / HIDDEN**0.5),
        down=random(generator, each[0], HIDDEN, each[1], scale=2 * scale),
        shared_gate_up=random(generator, 2 * EXPERTS.shared_size, HIDDEN, scale=1 / HIDDEN**0.5),
        shared_down=random(generator, HIDDEN, EXPERTS.shared_size, scale=scale),
        shared_gate=random(generator, 1, HIDDEN, scale=1 / HIDDEN**0.5),
    )


@functools.cache
def mixture() -> Decoder:
    """Return a target with experts in its first and last layer and the same successors; the heads here draft for it, too."""
    generator = torch.Generator().manual_seed(13)
    weights = target().weights
    layers = tuple(
        dense if index in EXPERTS.dense_layers else _experts_layer(generator, dense)
        for index, dense in enumerate(weights.layers)
    )
    return Decoder(config(len(layers), experts=EXPERTS), replace(weights, layers=layers), BACKEND.kernels)


RECURRENT = RecurrentConfig(layers=(0, 2), key_heads=2, value_heads=4, key_size=6, value_size=4, kernel_size=4)
WIDE_RECURRENT = replace(RECURRENT, key_heads=4, value_heads=8)
"""Recurrent layers whose heads four tensor-parallel ranks share."""


def _recurrent_layer(generator: torch.Generator, dense: LayerWeights, shape: RecurrentConfig) -> LayerWeights:
    """Return the layer ``dense`` with a random recurrent block of the given shape instead of its attention."""
    heads, width = shape.value_heads, shape.channels + shape.value_width
    projections = random(generator, width, HIDDEN, scale=1 / HIDDEN**0.5)
    output = random(generator, HIDDEN, shape.value_width, scale=2 / HIDDEN**0.5)
    gates = random(generator, 2 * heads, HIDDEN, scale=1 / HIDDEN**0.5)
    return replace(
        dense,
        qkv=torch.cat((projections, gates)),
        output=output,
        recurrent=DeltaRuleWeights(
            convolution=random(generator, shape.channels, shape.kernel_size, scale=0.7),
            a_log=random(generator, heads),
            dt_bias=random(generator, heads),
            norm=1 + random(generator, shape.value_size, scale=0.2),
        ),
    )


def _gated_layer(generator: torch.Generator, dense: LayerWeights) -> LayerWeights:
    """Return the layer ``dense`` with norms of its query and key heads, and with a gate of its attention output."""
    norm = 1 + random(generator, HEAD_SIZE, scale=0.2)
    gate = random(generator, HEADS * HEAD_SIZE, HIDDEN, scale=1 / HIDDEN**0.5)
    return replace(dense, q_norm=norm, k_norm=norm.flip(0), qkv=torch.cat((plain_weight(dense.qkv), gate)))


@functools.cache
def hybrid(recurrent: RecurrentConfig = RECURRENT) -> Decoder:
    """Return a target with recurrent layers and the same successors; the heads here draft for it, too."""
    generator = torch.Generator().manual_seed(17)
    weights = target().weights
    layers = tuple(
        _recurrent_layer(generator, dense, recurrent) if index in recurrent.layers else _gated_layer(generator, dense)
        for index, dense in enumerate(weights.layers)
    )
    shape = config(
        len(layers), recurrent=recurrent, attention_gate=True, qk_norm=True, rope=RopeConfig(theta=100.0, rotated_share=0.5)
    )
    return Decoder(shape, replace(weights, layers=layers), BACKEND.kernels)


BACKEND = CpuBackend()


@functools.cache
def target() -> Decoder:
    """Return the target of every head and draft model in this module."""
    return decoder()


@functools.cache
def plain(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Return the tokens that non-speculative greedy decoding generates for one request."""
    own_config = plain_config(max_requests=1, max_context=len(prompt) + max_tokens, dtype="float64")
    engine = Engine(target(), BACKEND, proposer=NonSpeculativeProposer(), config=own_config)
    return engine.generate([prompt], SamplingParams(max_tokens=max_tokens))[0].token_ids


def plain_config(**fields: Any) -> EngineConfig:
    """Return an engine config that does not depend on the device; ``fields`` override it.

    Defaults: staged, no graphs, no overlap, float32, 8 requests, 16 tokens per page, prefill chunks of 256 tokens and a fixed
    draft length. The context length and the number of pages stay unset.
    """
    named: dict[str, Any] = {"mode": "staged", "graphs": False, "overlap": False, "dtype": "float32", "draft_length": "fixed"}
    sizes: dict[str, Any] = {"page_size": 16, "prefill_chunk": 256}
    if fields.get("buckets") is None:
        sizes["max_requests"] = 8
    return EngineConfig(**named | sizes | fields)


def engine(proposer: Proposer, **fields: Any) -> Engine:
    """Return an engine of the target on the host; ``fields`` are passed to :func:`plain_config`."""
    own_config = plain_config(**{"dtype": "float64", "max_context": 64} | fields)
    return Engine(target(), BACKEND, proposer=proposer, config=own_config)


@functools.cache
def eagle_head() -> EagleHead:
    """Return an EAGLE head whose output is the embedding of its token with some noise, so that it drafts the successor."""
    generator = torch.Generator().manual_seed(4)
    eye, zero = torch.eye(HIDDEN, dtype=torch.float64), torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)
    weights = HeadWeights(
        fusion=torch.cat((eye, zero + random(generator, HIDDEN, HIDDEN, scale=0.02)), dim=1),
        embedding=embeddings(),
        layers=(layer(generator, 0.3, norm=False),),
    )
    return EagleHead(config(1), weights, target())


@functools.cache
def draft_model() -> Decoder:
    """Return a one-layer decoder with the same successors and different noise."""
    return decoder(layers=1, noise=0.5, seed=9)


def _self_attention(generator: torch.Generator, heads: int, constant: torch.Tensor | None = None) -> LayerWeights:
    """Return a layer whose attention reads its own position alone: it adds the embedding and subtracts the old state.

    Queries and keys are one constant direction in all heads, so the rotation lowers the score of distant positions. Half of
    the heads carry the embedding (the first half of the layer's input), the others the normed hidden state (the second half).
    ``constant`` is a vector whose product with each embedding is 1.
    """
    if constant is None:
        constant = torch.linalg.lstsq(embeddings(), torch.ones(VOCABULARY, 1, dtype=torch.float64)).solution.squeeze(1)
    queries = torch.zeros(2 * heads * HEAD_SIZE, 2 * HIDDEN, dtype=torch.float64)
    queries[:, :HIDDEN] = constant * 8
    eye = torch.eye(2 * HIDDEN, dtype=torch.float64)
    output = torch.cat((2 * eye[:HIDDEN, :HIDDEN], -2 * eye[:HIDDEN, :HIDDEN]), dim=1)
    return replace(layer(generator, 0.1), qkv=torch.cat((queries, eye)), output=output)


@functools.cache
def eagle3_head() -> Eagle3Head:
    """Return an EAGLE-3 head that reads the token by attention and fuses three target states; drafts 23 of 24 tokens."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.randperm(VOCABULARY, generator=generator)[: VOCABULARY - 1].sort().values
    ones, heads = torch.ones(HIDDEN, dtype=torch.float64), 2 * HIDDEN // HEAD_SIZE
    weights = HeadWeights(
        fusion=random(generator, HIDDEN, 3 * HIDDEN, scale=0.15),
        embedding=embeddings(),
        head=plain_weight(target().weights.head)[ids],
        final_norm=ones,
        hidden_norm=ones,
        layers=(_self_attention(generator, heads),),
        target_ids=ids,
    )
    return Eagle3Head(config(1, num_heads=heads, num_kv_heads=heads), weights, target(), aux_hidden_state_layers=(2, 1, 0))


MASK = 0
"""The mask token of the P-EAGLE head, which stands for unknown tokens; its embedding predicts no token."""


def _successor_layer(generator: torch.Generator, constant: torch.Tensor) -> LayerWeights:
    """Return a layer that adds the successor of an earlier token.

    Half of the heads read the token one position back and add its successor. The other heads read the token two positions
    back and add the successor's successor. Queries and keys of all heads have one direction, scaled by the product of the
    input with ``constant``; the rotation of the queries selects the distance.
    """
    angles = torch.tensor([100.0 ** (-index / (HEAD_SIZE // 2)) for index in range(HEAD_SIZE // 2)], dtype=torch.float64)
    keys = torch.full((HEAD_SIZE,), 8.0, dtype=torch.float64)
    queries = []
    for distance in (1, 2):
        cos, sin = (angles * -distance).cos() * 8, (angles * -distance).sin() * 8
        queries += [torch.cat((cos - sin, cos + sin))] * HEADS
    eye = torch.eye(HIDDEN, dtype=torch.float64)
    read = [torch.outer(torch.cat(queries), constant), torch.outer(keys.repeat(2 * HEADS), constant), eye, eye]
    step = embeddings()[successors()].t() @ embeddings() / HIDDEN  # from a token to its successor
    return replace(layer(generator, 0.05), qkv=torch.cat(read), output=torch.cat((step, step @ step / 3), dim=1))


@functools.cache
def peagle_head() -> Eagle3Head:
    """Return the EAGLE-3 head with a second layer that predicts two mask positions from the last real token.

    The embedding and state of the mask are orthogonal to those of all tokens, so they predict no token.
    """
    head, generator = eagle3_head(), torch.Generator().manual_seed(10)
    mask_embedding, state = torch.linalg.qr(embeddings().t(), mode="complete").Q[:, -2:].t() * HIDDEN**0.5
    constant = torch.linalg.lstsq(embeddings(), torch.ones(VOCABULARY, 1, dtype=torch.float64)).solution.squeeze(1)
    constant = constant + mask_embedding / HIDDEN  # 1 for the mask as well
    first = _self_attention(generator, 2 * HIDDEN // HEAD_SIZE, constant)
    weights = replace(
        head.weights,
        embedding=embeddings().index_copy(0, torch.tensor([MASK]), mask_embedding.unsqueeze(0)),
        layers=(first, _successor_layer(generator, constant)),
        mask_state=state,
    )
    own_config = replace(head.config, num_layers=2, windows=head.config.windows * 2)
    return Eagle3Head(own_config, weights, target(), mask_token=MASK, aux_hidden_state_layers=head.aux_hidden_state_layers)


@functools.cache
def dflash_head() -> DFlashHead:
    """Return a DFlash head of two random layers; it does not know the successors, so most drafts are rejected."""
    generator = torch.Generator().manual_seed(8)
    ones, each = torch.ones(HIDDEN, dtype=torch.float64), torch.ones(HEAD_SIZE, dtype=torch.float64)
    weights = HeadWeights(
        fusion=random(generator, HIDDEN, 2 * HIDDEN, scale=0.15),
        hidden_norm=ones,
        final_norm=ones,
        layers=tuple(replace(layer(generator, 1.0), q_norm=each, k_norm=each) for _ in range(2)),
    )
    own_config = config(2, qk_norm=True)
    return DFlashHead(own_config, weights, target(), block_size=4, mask_token=0, aux_hidden_state_layers=(1, 2))


@functools.cache
def mtp_heads(count: int = 3) -> tuple[MtpHead, ...]:
    """Return MTP heads whose output is the embedding of their token with some noise."""
    generator = torch.Generator().manual_seed(7)
    ones, eye = torch.ones(HIDDEN, dtype=torch.float64), torch.eye(HIDDEN, dtype=torch.float64)
    return tuple(
        MtpHead(
            config(1),
            HeadWeights(
                token_norm=ones,
                hidden_norm=ones,
                fusion=torch.cat((random(generator, HIDDEN, HIDDEN, scale=0.05), eye), dim=1),
                layers=(layer(generator, 0.4),),
                final_norm=ones,
            ),
            target(),
            ahead=index + 1,
        )
        for index in range(count)
    )
