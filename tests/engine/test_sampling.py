"""Sampling with options through the whole engine is lossless. Without options: ``tests/speculative/test_proposers.py``."""

import math

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider import Engine, SamplingParams
from outrider.device import KernelSet
from outrider.model import load_decoder, load_eagle, open_head
from outrider.speculative.eagle import EagleProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config

VOCABULARY, DRAWS, TEMPERATURE = 5, 4_000, 0.8
PROMPT = (1, 3, 2, 4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A target over five tokens and an unrelated EAGLE head, both random and opinionated."""
    root = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.25)
        model.model.embed_tokens.weight.normal_(std=1.0)
    model.save_pretrained(root / "target")
    layer = {
        f"layers.0.{name}": tensor.detach().clone()
        for name, tensor in model.model.layers[0].state_dict().items()
        if name != "input_layernorm.weight"
    }
    head = {**layer, "fc.weight": torch.randn(16, 32) * 0.2}
    (root / "eagle").mkdir()
    save_file(head, root / "eagle" / "model.safetensors")
    config.architectures = ["LlamaForCausalLMEagle"]
    config.bias = False
    config.save_pretrained(root / "eagle")
    return root


def draw(tiny, kernels=None, **options):
    """Joint counts of the first three tokens over many seeds."""
    backend = CpuBackend()
    if kernels is not None:
        backend.use_kernels(kernels)
    target = load_decoder(tiny / "target", backend=backend, dtype=torch.float32)
    head = load_eagle(open_head(tiny / "eagle", target=target, backend=backend, dtype=torch.float32))
    config = plain_config(max_requests=512, page_size=4, max_context=16, prefill_chunk=512 * len(PROMPT))
    engine = Engine(target, backend, proposer=EagleProposer(head, draft_tokens=2), config=config)
    each = [SamplingParams(max_tokens=3, temperature=TEMPERATURE, seed=seed, **options) for seed in range(DRAWS)]
    counts = torch.zeros((VOCABULARY,) * 3, dtype=torch.float64)
    for result in engine.generate([PROMPT] * DRAWS, each):
        counts[result.token_ids] += 1
    return counts, engine.stats.acceptance_length


def expected(tiny, reshape=lambda tokens, logits: logits):
    """The target's exact joint distribution, from transformers; ``reshape`` changes logits."""
    model = LlamaForCausalLM.from_pretrained(tiny / "target").eval()

    def probs(tokens):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].double()
            return torch.softmax(reshape(tokens, logits) / TEMPERATURE, -1)

    joint = torch.zeros((VOCABULARY,) * 3, dtype=torch.float64)
    first = probs(PROMPT)
    for a in range(VOCABULARY):
        second = probs((*PROMPT, a))
        for b in range(VOCABULARY):
            joint[a, b] = first[a] * second[b] * probs((*PROMPT, a, b))
    return joint


def chi_square_excess(counts, probs):
    """Chi-square over its critical value at 1e-4; cells that expect fewer than five draws are pooled."""
    wanted = (probs * counts.sum()).flatten()
    got = counts.flatten()
    small = wanted < 5
    wanted = torch.cat((wanted[~small], wanted[small].sum().view(1)))
    got = torch.cat((got[~small], got[small].sum().view(1)))
    statistic = float(((got - wanted) ** 2 / wanted.clamp(min=1e-9)).sum())
    freedom = wanted.numel() - 1
    critical = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic / critical


def reshape(tokens, logits):
    """Frequency and repetition penalties by transformers and by hand, then its warpers for top-k, top-p and min-p."""
    scores = RepetitionPenaltyLogitsProcessor(OPTIONS["repetition_penalty"])(
        torch.tensor([tokens]), logits.view(1, -1).clone()
    )
    for token in set(tokens[len(PROMPT) :]):
        scores[0, token] -= OPTIONS["frequency_penalty"] * tokens[len(PROMPT) :].count(token)
    scores = scores / TEMPERATURE
    for warper in (
        TopKLogitsWarper(OPTIONS["top_k"]),
        TopPLogitsWarper(OPTIONS["top_p"]),
        MinPLogitsWarper(OPTIONS["min_p"]),
    ):
        scores = warper(None, scores)
    return scores[0] * TEMPERATURE


OPTIONS = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.12}


def test_speculative_samples_with_options_follow_the_reshaped_target(tiny):
    counts, acceptance = draw(tiny, **OPTIONS)
    probs = expected(tiny, reshape)
    assert acceptance > 1.2
    assert 0 < int((probs == 0).sum()) < probs.numel(), "something must be cut, and something left"
    assert counts[probs == 0].sum() == 0
    assert chi_square_excess(counts, probs) < 1
    assert chi_square_excess(counts, expected(tiny)) > 1


def test_penalties_without_the_drafted_prefix_fail_the_same_test(tiny):
    class Forgetful(KernelSet):
        """Penalises by what is committed alone."""

        def penalize_logits(self, logits, tokens, _, rows, counts, penalties):
            nothing = torch.zeros(tokens.numel(), tokens.shape[1], dtype=torch.bool)
            return super().penalize_logits(logits, tokens, nothing, rows, counts, penalties)

    counts, _ = draw(tiny, Forgetful(), **OPTIONS)
    assert chi_square_excess(counts, expected(tiny, reshape)) > 1
