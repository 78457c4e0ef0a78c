from fnmatch import fnmatchcase
from shutil import copy

import huggingface_hub
import pytest
import torch

from outrider_cpu.backend import CpuBackend


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Files of a repository of the Hub, ``owner/online``, which can be reached: those asked for come into a snapshot."""
    files, snapshot = tmp_path / "online", tmp_path / "snapshot"
    files.mkdir()

    def listed(name, revision=None):
        assert name == "owner/online"
        return [path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file()]

    def download(name, revision, allow_patterns, ignore_patterns=()):
        snapshot.mkdir(exist_ok=True)
        for file in listed(name):
            allowed, ignored = (any(fnmatchcase(file, each) for each in some) for some in (allow_patterns, ignore_patterns))
            if allowed and not ignored:
                (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
                copy(files / file, snapshot / file)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", listed)
    return files


@pytest.fixture(scope="session")
def backend():
    return CpuBackend()
