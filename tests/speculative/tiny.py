"""Tiny decoders in float64, and heads that draft well for them, by construction.

The vocabulary's embeddings are nearly orthogonal and the output head maps each token to its successor (a permutation), so
that the next token mostly is the successor of the last one; random layers disturb that, so a target's tokens depend on
everything before them, and a drafter that knows the successors alone is accepted often and rejected often.
"""

import functools

import torch

from outrider import Engine, EngineConfig, SamplingParams
from outrider.model import Decoder, DecoderWeights, EagleHead, EagleWeights, LayerWeights, ModelConfig, RopeConfig
from outrider.speculative.proposer import PlainProposer
from outrider_cpu.backend import CpuBackend

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER = 24, 32, 4, 2, 8, 48


def random(generator, *shape, scale=1.0):
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def config(layers=3, **overrides):
    fields = {
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


def layer(generator, noise, *, width=HIDDEN, norm=True):
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
def embeddings():
    square = random(torch.Generator().manual_seed(1), HIDDEN, HIDDEN)
    return torch.linalg.qr(square).Q[:VOCABULARY] * HIDDEN**0.5


@functools.cache
def successors():
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))


def decoder(*, layers=3, noise=0.9, seed=3, **overrides):
    generator = torch.Generator().manual_seed(seed)
    head = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.float64)
    head[successors()] = embeddings() / HIDDEN**0.5
    weights = DecoderWeights(
        embedding=embeddings(),
        head=head,
        norm=torch.ones(HIDDEN, dtype=torch.float64),
        layers=tuple(layer(generator, noise) for _ in range(layers)),
    )
    return Decoder(config(layers, **overrides), weights, BACKEND.kernels)


BACKEND = CpuBackend()


@functools.cache
def target():
    return decoder()


@functools.cache
def plain(prompt, max_tokens):
    """Tokens of plain greedy decoding, alone."""
    made = EngineConfig(max_requests=1, max_context=len(prompt) + max_tokens, dtype="float64")
    engine = Engine(target(), BACKEND, proposer=PlainProposer(), config=made)
    return engine.generate([prompt], SamplingParams(max_tokens=max_tokens))[0].token_ids


def engine(proposer, **fields):
    return Engine(
        target(), BACKEND, proposer=proposer, config=EngineConfig(**{"dtype": "float64", "max_context": 64} | fields)
    )


@functools.cache
def eagle_head():
    """Passes the embedding of the next token on as its hidden state, slightly disturbed: it knows the successors."""
    generator = torch.Generator().manual_seed(4)
    eye, zero = torch.eye(HIDDEN, dtype=torch.float64), torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)
    weights = EagleWeights(
        fusion=torch.cat((eye, zero + random(generator, HIDDEN, HIDDEN, scale=0.02)), dim=1),
        fusion_bias=None,
        embedding=embeddings(),
        layers=(layer(generator, 0.3, norm=False),),
    )
    return EagleHead(config(1), weights, target())
