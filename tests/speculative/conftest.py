import pytest
import torch

from outrider_proof.checkpoints import write_eagle
from tiny_checkpoints import byte_level_tokenizer, write_checkpoint, write_dflash, write_eagle3, write_mtp, write_peagle


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A target, and a draft of each kind under its name."""
    root = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(root / "target", "llama", num_hidden_layers=4, vocab_size=96)
    byte_level_tokenizer().save(str(root / "target" / "tokenizer.json"))
    write_checkpoint(root / "draft-model", "llama", num_hidden_layers=1, vocab_size=96, seed=9)
    write_eagle(root / "eagle")
    write_eagle3(root / "eagle3")
    write_mtp(root / "mtp")
    write_dflash(root / "dflash")
    write_peagle(root / "peagle")
    return root
