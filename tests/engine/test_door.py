"""A decoder that only transformers has, through the whole engine: plain, speculative, chunked, in a batch."""

import pytest
import torch
import transformers

from outrider import Engine, SamplingParams
from outrider.errors import CheckpointError
from outrider.model.quantization.writing import quantize_checkpoint
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config
from tiny_checkpoints import byte_level_tokenizer, write_checkpoint

PROMPTS = [[5, 9, 9, 3, 40, 7], [11, 3, 2 + 1], list(range(30, 52))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("olmo2")
    write_checkpoint(directory, "olmo2")
    byte_level_tokenizer(96).save(str(directory / "tokenizer.json"))
    return directory


def test_without_being_asked_it_stays_shut(checkpoint):
    with pytest.raises(CheckpointError, match="--through-transformers"):
        Engine.from_checkpoint(checkpoint, CpuBackend())


def test_nobody_is_sent_to_the_door_in_vain(checkpoint, tmp_path):
    """It's for the target alone, and for plain weights: errors about anything else name another way out."""
    target = write_checkpoint(tmp_path / "target", "llama") and tmp_path / "target"
    supported = "supported are deepseek_v2, deepseek_v3, dots1, .*glm4_moe, glm4_moe_lite, .*kimi_k2, kimi_k25, llama"
    unknown = f"model_type is 'olmo2'.*{supported}.*take another draft"
    for speculate, told in (("draft-model", unknown), ("eagle", "those of a draft for speculate 'draft-model', not 'eagle'")):
        with pytest.raises(CheckpointError, match=told):
            Engine.from_checkpoint(target, CpuBackend(), draft_dir=checkpoint, speculate=speculate)
    quantize_checkpoint(checkpoint, tmp_path / "quantised", format="fp8")
    with pytest.raises(CheckpointError, match=r"runs plain checkpoints alone here \(--through-"):
        Engine.from_checkpoint(tmp_path / "quantised", CpuBackend())
    with pytest.raises(CheckpointError, match=r"how weights are quantised \('compressed-tensors'\).*take the plain"):
        Engine.from_checkpoint(tmp_path / "quantised", CpuBackend(), through_transformers=True)


@pytest.mark.parametrize("speculate", ["none", "ngram"])
def test_tokens_equal_generate(checkpoint, speculate):
    config = plain_config(dtype="float32", max_context=64, page_size=4, prefill_chunk=9, max_requests=2)
    engine = Engine.from_checkpoint(checkpoint, CpuBackend(), speculate=speculate, config=config, through_transformers=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, SamplingParams(max_tokens=16)), strict=True):
        with torch.no_grad():
            expected = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
        assert list(result.token_ids) == expected[0, len(prompt) :].tolist()
