"""A plugin package that was written for the version before passes the kit, and is told what has a new name."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from conftest import write_distribution
from outrider import Engine, SamplingParams
from outrider.cli.models import bundled
from outrider.device import RotaryArgs
from outrider.errors import CheckpointError
from outrider.registry import get_backend
from outrider_conformance.run import conform, passed
from outrider_proof.tiny import plain_config

PACKAGE = Path(__file__).parent / "version1"
TOLD = {
    "outrider.device.CheckpointError is now outrider.errors.CheckpointError": "kernels.py",
    "outrider.device.RequestError is now outrider.errors.RequestError": "kernels.py",
    "outrider.device.errors.CheckpointError is now outrider.errors.CheckpointError": "kernels.py",
    "outrider.device.Turn is now outrider.device.RotaryArgs": "kernels.py",
    "outrider.device.kernels.metadata.Turn is now outrider.device.kernels.metadata.RotaryArgs": "kernels.py",
    "Backend.mark_over, which ToyBackend overrides, is now mark_stale": "backend.py",
}
TOLD_AT_WORK = {
    "AttentionMetadata.kv_lens is now seq_lens": "kernels.py",
    "AttentionMetadata.host_kv_lens is now seq_lens_host": "kernels.py",
    "AttentionMetadata(kv_lens=…) is now seq_lens": "",
    "AttentionMetadata(host_kv_lens=…) is now seq_lens_host": "",
    "Backend.mark_over is now mark_stale": "backend.py",
}
"""By the file of the plugin whose line is named; a copy by ``dataclasses.replace`` is made in Python's own."""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Child processes find the plugin; returns where it lies."""
    entry = ("outrider.backends", "version1", "outrider_version1.plugin")
    site = write_distribution(tmp_path, "outrider-version1", "nothing_more", "", *entry)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), str(site), os.environ.get("PYTHONPATH", "")]))
    return PACKAGE, site


def missing(told, text):
    """What isn't said, or isn't said of the plugin's own line."""
    plain = " ".join(text.split())
    return {
        words
        for words, file in told.items()
        if not re.search((rf"version1/{file}:\d+: \w+: " if file else "") + re.escape(words), plain)
    }


def test_passes_as_far_as_graphs_and_is_told_what_has_a_new_name(installed, tmp_path):
    with (tmp_path / "out").open("w+") as output:
        report = conform("version1", level="L2", programs=30, output=output)  # all of them: its own test, below
        output.seek(0)
        said = output.read()
    assert passed(report), said
    assert missing(TOLD, said) == set()


def test_serves_the_same_tokens_by_its_old_names(installed, monkeypatch):
    for site in installed:
        monkeypatch.syspath_prepend(site)
    prompt, params = [5, 6, 7, 5, 6, 7, 5, 6], SamplingParams(max_tokens=6)
    plain = Engine.from_checkpoint(bundled("target"), get_backend("cpu"), config=plain_config()).generate([prompt], params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = get_backend("version1")
        made = Engine.from_checkpoint(bundled("target"), backend, config=plain_config()).generate([prompt], params)
        backend.mark_stale(torch.zeros(1), "as the engine says where somebody observes")
    assert [one.token_ids for one in made] == [one.token_ids for one in plain]
    assert backend.marks == 1, "called by the new name, it's the plugin's old one"
    text = " ".join(f"{one.filename}:{one.lineno}: {one.category.__name__}: {one.message}" for one in caught)
    assert missing(TOLD | TOLD_AT_WORK, text) == set()
    # The very names that it asked for are those of today.
    kernels = sys.modules["outrider_version1.kernels"]
    assert (kernels.Turn, kernels.CheckpointError) == (RotaryArgs, CheckpointError)
    for name in [name for name in sys.modules if name.split(".")[0] in ("outrider_version1", "toy_driver")]:
        del sys.modules[name]


@pytest.mark.slow
def test_its_own_test_still_passes(installed):
    """One line, by the kit's old name, of all levels."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", PACKAGE, PACKAGE / "tests"]
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stdout
    assert "outrider.conformance is now outrider_conformance" in " ".join(done.stdout.split())
