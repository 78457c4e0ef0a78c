"""Shared by every test: one torch thread per worker, and made-up distributions that offer backends."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_line import child as child  # fixtures, for whoever runs a command
from command_line import outrider as outrider
from drawing import leave_repeats_to_slow
from outrider.registry.probing import Probe, Verdict

# Two workers with two threads each would fight over two cores; child processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Some images forbid compiled files: each of the many child processes would compile all of Outrider anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.pop("OUTRIDER_BACKEND", None)
# Kernels in Triton run by its interpreter, which needs no GPU. It is read when triton is imported, by whoever comes first.
os.environ.setdefault("TRITON_INTERPRET", "1")

GOOD_PLUGIN = """
    from outrider.device.plugin import BackendInfo, hookimpl

    @hookimpl
    def backend_info():
        return BackendInfo(name={name!r}, description="made up", **{info!r})

    @hookimpl
    def create_backend(ordinal, options):
        from outrider_cpu.backend import CpuBackend
        backend = CpuBackend()
        backend.given = (ordinal, dict(options))
        return backend
"""

Install = Callable[..., Path]


LONG_AND_LATE = ("tests/vendors/test_npu_emulated.py", "tests/vendors/test_rocm.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave repeats to `make test-slow`, and put long files first that would otherwise occupy one worker at the end."""
    leave_repeats_to_slow(items)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_AND_LATE))


def pytest_collection_finish() -> None:
    """What collecting has imported stays: no later collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()


def write_distribution(root: Path, distribution: str, module: str, source: str, group: str, name: str, target: str) -> Path:
    """A directory that looks like an installed distribution with one entry point."""
    site = root / distribution
    site.mkdir(parents=True, exist_ok=True)
    (site / f"{module}.py").write_text(textwrap.dedent(source))
    info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    return site


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install("name", source)`` makes a distribution ``outrider-name`` visible to this process; returns its path.

    ``probed``: plugins are tried in a child process, as they are outside of tests.
    """
    modules: list[str] = []
    verdicts = Probe.verdicts
    # Made-up plugins do no harm, so they needn't be tried in a child process: that takes a third of a second each time.
    monkeypatch.setattr(Probe, "verdicts", lambda self, plugins, describe: dict.fromkeys(plugins, Verdict()))

    def add(
        name: str,
        source: str | None = None,
        *,
        distribution: str = "",
        group: str = "outrider.backends",
        probed: bool = False,
        **info: object,
    ) -> Path:
        if probed:
            monkeypatch.setattr(Probe, "verdicts", verdicts)
        distribution = distribution or f"outrider-{name}"
        module = distribution.replace("-", "_") + "_plugin"
        text = GOOD_PLUGIN.format(name=name, info=info) if source is None else source
        site = write_distribution(tmp_path, distribution, module, text, group, name, module)
        monkeypatch.syspath_prepend(str(site))
        modules.append(module)
        return site

    yield add
    for module in modules:
        sys.modules.pop(module, None)
    importlib.invalidate_caches()
