"""Decoders whose last layers read the pages of earlier ones, with per-layer embeddings, over Triton's kernels."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from model.harness import Driver
from model.test_decoder import PROMPT
from outrider.device import KernelSet
from outrider.model import KeptRows, load_decoder
from outrider.registry import get_backend
from tiny_checkpoints import write_checkpoint


def test_logits_are_those_of_the_references(tmp_path, kernels, device):
    """In float16: the interpreter multiplies bfloat16 wrongly. Of the prompt, sharing layers compute the last row alone; the
    other tokens are decoded.
    """
    sizes = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    write_checkpoint(tmp_path, "gemma4_text-e2b", num_kv_shared_layers=1, initializer_range=0.1, **sizes)
    backend, made = get_backend(device.type), []
    for each in (kernels, KernelSet()):
        model = load_decoder(tmp_path, backend=backend, dtype=torch.float16, kernels=each)
        driver = Driver(model)
        sequence, logits = driver.sequence(), []
        for part in (PROMPT[:9], PROMPT[9:10], PROMPT[10:11]):
            inputs = driver.inputs([(sequence, part)])
            last = torch.tensor([len(part) - 1], device=inputs.tokens.device)
            inputs = replace(inputs, kept=KeptRows.last_of_each(inputs.attention, last))
            with torch.no_grad():
                logits.append(model.logits(model.forward(inputs, driver.cache)))
        made.append(torch.cat(logits).float())
    assert made[0].shape == (3, 96)
    torch.testing.assert_close(*made, rtol=2e-2, atol=2e-2)
