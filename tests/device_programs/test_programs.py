"""Programs that check a real device, each in a child process. They exit with 0 if all is right."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LIMIT_S = 400
cuda = pytest.mark.needs_device("cuda")
hopper = pytest.mark.needs_device("cuda", compute_capability=9)
two = pytest.mark.needs_device("cuda", count=2)
PROGRAMS = [
    pytest.param(("engine/guided_on_device.py", "cuda"), marks=cuda, id="guided"),
    pytest.param(("kernels/experts_on_device.py", "60"), marks=cuda, id="experts"),
    pytest.param(("kernels/narrow_caches_on_device.py",), marks=cuda, id="narrow_caches"),
    pytest.param(("kernels/planes_ring_on_device.py", "120"), marks=hopper, id="planes_ring"),
    pytest.param(("kernels/quantized_on_device.py", "240"), marks=cuda, id="quantized"),
    pytest.param(("sanitizer/torch_gaps_on_device.py", "150"), marks=cuda, id="torch_gaps"),
    pytest.param(("foreign/vllm_on_device.py", "300"), marks=cuda, id="vllm"),
    pytest.param(("kernels/peers_on_devices.py",), marks=two, id="peers"),
    pytest.param(("vendors/ranks_on_devices.py", "cuda", "24", "48"), marks=two, id="ranks"),
]


@pytest.mark.parametrize("command", PROGRAMS)
def test_a_program_finds_nothing_wrong(command: tuple[str, ...]) -> None:
    if "vllm" in command[0] and importlib.util.find_spec("vllm") is None:
        pytest.skip("not run: vLLM isn't installed")
    program, *words = command
    file = TESTS / program
    path = os.pathsep.join([str(file.parent), str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, str(file), *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


def test_each_program_is_listed() -> None:
    """A new program for a device has to be added to ``PROGRAMS``."""
    listed = {param.values[0][0] for param in PROGRAMS}
    found = {
        str(file.relative_to(TESTS)) for pattern in ("*_on_device.py", "*_on_devices.py") for file in TESTS.rglob(pattern)
    }
    helpers = {file for file in found if Path(file).name.startswith("test_")}
    assert found - helpers == listed
