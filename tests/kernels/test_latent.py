"""Decoders with latent attention over Triton's kernels: heads whose size is no power of two, of which a part is rotated."""

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from model.harness import Driver
from model.test_decoder import PROMPT
from outrider.device import KernelSet
from outrider.model import load_decoder
from outrider.registry import get_backend
from tiny_checkpoints import write_checkpoint


@pytest.mark.parametrize("sizes", [{}, {"qk_rope_head_dim": 16, "head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}])
def test_logits_are_those_of_the_references(tmp_path, kernels, device, sizes):
    """In float16: the interpreter multiplies bfloat16 wrongly. The first half is a prompt, the other tokens are decoded."""
    write_checkpoint(tmp_path, "deepseek_v3-dense", num_hidden_layers=1, initializer_range=0.1, **sizes)
    backend, made = get_backend(device.type), []
    for each in (kernels, KernelSet()):
        model = load_decoder(tmp_path, backend=backend, dtype=torch.float16, kernels=each)
        driver = Driver(model)
        sequence = driver.sequence()
        parts = (PROMPT[:9], PROMPT[9:10], PROMPT[10:11])
        made.append(torch.cat([driver.logits([(sequence, part)]) for part in parts]).float())
    assert model.implementations()["blocks"][0]["attention_block"] == "composed"
    torch.testing.assert_close(*made, rtol=2e-2, atol=2e-2)
