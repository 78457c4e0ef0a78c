"""The plugin ``npu``, its code unchanged, on the emulation: in processes of their own, where torch's slot is called npu."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("on_npu/case_*.py"))


def child(*command, **environment):
    path = os.pathsep.join([str(HERE / "emulated"), str(HERE.parent), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_cases(file):
    done = child("-m", "pytest", "-p", "emulation", "-p", "no:cacheprovider", "-n", "0", "-q", "--tb=short", str(file))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout.strip().splitlines()[-1])
