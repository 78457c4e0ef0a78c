"""What is looked at of a draft before the target is read, which may take minutes."""

import pytest

from outrider import Engine, EngineConfig
from outrider.errors import CheckpointError
from outrider_cpu.backend import CpuBackend
from outrider_proof.checkpoints import write_eagle
from tiny_checkpoints import word_tokenizer, write_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    write_checkpoint(directory, "llama")
    spell(directory, "t")
    return directory


def spell(directory, letter, *, first=0):
    words = [f"{letter if token >= first else 't'}{token}" for token in range(96)]
    word_tokenizer(words).save(str(directory / "tokenizer.json"))


def read_before_it_failed(target, draft, speculate, match):
    """The tensors of the target that were read."""
    read = []
    with pytest.raises(CheckpointError, match=match):
        Engine.from_checkpoint(
            target,
            CpuBackend(),
            draft_dir=draft,
            speculate=speculate,
            config=EngineConfig(max_requests=1),
            progress=lambda *told: read.append(told),
        )
    return read


@pytest.mark.parametrize("speculate", ["eagle", "suffix+eagle"])
def test_a_truncated_draft(target, tmp_path, speculate):
    write_eagle(tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert read_before_it_failed(target, tmp_path / "draft", speculate, "model.safetensors") == []


def test_a_draft_without_weights(target, tmp_path):
    write_eagle(tmp_path / "draft")
    (tmp_path / "draft" / "model.safetensors").unlink()
    assert read_before_it_failed(target, tmp_path / "draft", "eagle", "no tensor files") == []


def test_a_draft_of_another_tokenizer(target, tmp_path):
    write_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1)
    spell(tmp_path / "draft", "u")
    match = "96 of 96 tokens aren't the target's: token 0 is 'u0', and 't0' there"
    assert read_before_it_failed(target, tmp_path / "draft", "draft-model", match) == []


def test_a_few_other_tokens_are_no_other_tokenizer(target, tmp_path):
    write_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1)
    spell(tmp_path / "draft", "u", first=90)
    made = Engine.from_checkpoint(
        target, CpuBackend(), draft_dir=tmp_path / "draft", speculate="draft-model", config=EngineConfig(max_requests=1)
    )
    assert len(made.generate([(1, 2, 3)])[0].token_ids) > 0
