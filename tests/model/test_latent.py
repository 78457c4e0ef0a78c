"""Latent attention (GLM-4.7-Flash, DeepSeek-V2-Lite and V3, Kimi-K2): logits and tokens of transformers, engines, formats."""

import pytest

from model.test_decoder import agree, engines_agree
from tiny_checkpoints import LATENT, write_checkpoint


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", LATENT)
def test_tokens_and_logits_of_transformers(tmp_path, backend, name, chunk):
    agree(tmp_path, backend, write_checkpoint(tmp_path, name), chunk=chunk)
