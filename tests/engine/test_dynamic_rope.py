"""Dynamic rope scaling past the original context: generate's tokens, in any batch, and what prompts share."""

import copy

import pytest
import torch

from outrider import Engine, SamplingParams
from outrider.model import load_decoder
from outrider.speculative.draft_model import DraftModelProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config
from tiny_checkpoints import ROPES, write_checkpoint

START = [1, 7, 23, 5, 40, 41, 9, 9, 17, 60, 33, 2, 8, 90, 14, 3]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("original", [12, 18, 24])
def test_tokens_are_those_of_generate(tmp_path, original, speculate):
    """Prompts on either side of the length where the base grows, with a common prefix, in chunks, twice."""
    reference = write_checkpoint(
        tmp_path, "llama", rope_parameters=ROPES["dynamic"] | {"factor": 4.0}, max_position_embeddings=original
    )
    reference.generation_config.eos_token_id = None
    backend = CpuBackend()
    model = load_decoder(tmp_path, backend=backend, dtype=torch.float32)
    proposer = DraftModelProposer(model, target=model, draft_tokens=3) if speculate else None
    config = plain_config(page_size=2, max_context=40, prefill_chunk=7, overlap=True)
    engine = Engine(model, backend, proposer=proposer, config=config)
    prompts = [START[:8], START, [*START, 5, 6, 7], [*START, 5, 6, 7, 11]]
    expected = []
    for prompt in prompts:
        inputs = torch.tensor([prompt])
        fresh = copy.deepcopy(reference)  # transformers keeps the base from one request to the next
        out = fresh.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        expected.append(tuple(out[0, len(prompt) :].tolist()))
    for _ in range(2):
        assert [result.token_ids for result in engine.generate(prompts, GREEDY)] == expected
    if speculate:
        assert engine.stats.acceptance_length > 3
