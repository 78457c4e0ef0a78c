"""Decoders with latent attention over Triton's kernels: heads whose size is no power of two, of which a part is rotated."""

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from kernels.devices import DEVICES
from model.harness import Driver
from model.test_decoder import PROMPT
from outrider.device import KernelSet
from outrider.model import load_decoder
from outrider.registry import get_backend
from outrider_triton.tiles.derive.attention import (
    AttentionHeads,
    derive_latent_launch,
    exact_latent_launch,
    fits_latents,
)
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


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("width", [2, 4])
def test_tiles_fit_into_shared_memory(name, width):
    """A tile has a queries' row, a weight for each cached token, and all loads of vectors but one."""
    facts, heads = DEVICES[name], AttentionHeads(group=20, kv_heads=1, size=512, bytes=width)
    batches = [{"batch": batch, "max_query": query, "max_kv": 4096} for batch in (1, 32) for query in (1, 4, 512)]
    launches = [derive_latent_launch(facts, heads, 64, **batch) for batch in batches]
    if not fits_latents(facts, heads, 64):
        assert width == 4  # of float32 the references compute attention then
        assert facts.shared_bytes < 110 << 10
        return
    for rows, block, split, _, stages, _ in (*launches, exact_latent_launch(facts, heads, 64)):
        assert width * (((stages - 1) * block + rows) * (512 + 64) + rows * block) <= facts.shared_bytes
        assert split * block <= 4096
    largest = max(launch.block_rows for launch in launches)
    assert largest == (64 if width == 2 and facts.shared_bytes >= 160 << 10 else 16)
