"""The command that trains draft heads, for two steps: its checkpoints load, and it reports each kind of text."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from outrider import Engine, SamplingParams
from outrider.bundled import bundled

TRAINING = Path(__file__).parents[2] / "training"
PARTS = ("json", "email", "concurrent", "shutil.py", "textwrap.py", "argparse.py")
SIZES = (
    "--batch 8 --pool 1 --measured 5 --prompt 320 --length 352 --rows 2 --block-rows 2 --blocks 4 --vocabulary 500 --layers 1"
)
PROMPTS = [[5, 6, 7], list(range(40, 60))]


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Both heads after two steps, on a part of the standard library, and the log."""
    folder = tmp_path_factory.mktemp("heads")
    (folder / "lib").mkdir()
    for part in PARTS:
        path = Path(sysconfig.get_paths()["stdlib"]) / part
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / "lib" / part)
    command = [sys.executable, str(TRAINING / "train_heads.py"), "--model", str(bundled("target")), "--out", str(folder)]
    command += ["--stdlib", str(folder / "lib"), "--device", "cpu", "--steps", "2", "--taps", "0", "2", "3", *SIZES.split()]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=500)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_head_loads_and_changes_no_token(heads, kind):
    engines = [
        Engine.from_checkpoint(bundled("target"), "cpu", draft_dir=heads / kind, speculate=kind),
        Engine.from_checkpoint(bundled("target"), "cpu"),
    ]
    made = [[each.token_ids for each in engine.generate(PROMPTS, SamplingParams(max_tokens=12))] for engine in engines]
    assert made[0] == made[1]
    measured = json.loads((heads / kind / "acceptance.json").read_text())
    assert measured.keys() == {"3", "7"}
    for length, shares in measured.items():
        assert list(shares) == ["chat", "code", "maths", "summary"]
        assert all(len(each) == int(length) for each in shares.values())
