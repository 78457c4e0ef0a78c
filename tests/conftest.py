"""Fixtures and the environment of every test."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import PathDistribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from command_line import child as child  # fixtures, for whoever runs a command
from command_line import outrider as outrider
from drawing import leave_repeats_to_slow
from known_environment import normalize_environment
from outrider.registry.probing import PluginProbe, ProbeVerdict
from triton_interpreter import spare_repeated_work

normalize_environment()
# Two cores are shared, so a time limit would be a matter of luck.
settings.register_profile("outrider", deadline=None, max_examples=50)
settings.load_profile("outrider")
# Collecting tests imports much that stays: looking for garbage meanwhile takes a fifth of the time.
gc.disable()

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
_INSTALLED = sysconfig.get_path("purelib")
_READ_TEXT = PathDistribution.read_text


@functools.cache
def _text_of_installed(distribution: Path, filename: str) -> str | None:
    return _READ_TEXT(PathDistribution(distribution), filename)


def _read_text_once(self: PathDistribution, filename: str) -> str | None:
    """Read files of installed distributions once: each command and each backend looks for plugins in all of them."""
    path = self._path
    return _text_of_installed(path, filename) if str(path).startswith(_INSTALLED) else _READ_TEXT(self, filename)


PathDistribution.read_text = _read_text_once


PINNING_BY_FACTORIES = ("tests/docs/", "tests/foreign/", "tests/races/", "tests/sanitizer/", "tests/sim/")
"""Tests that may call torch's factories with `pin_memory=True` on the simulated device, which slows all host operators."""
LONG_AND_LATE = ("tests/vendors/test_npu_emulated.py", "tests/vendors/test_rocm.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave repeats to `make test-slow`, and put long files first that would otherwise occupy one worker at the end."""
    leave_repeats_to_slow(items)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_AND_LATE))


def missing_device(kind: str, count: int = 1, compute_capability: int | None = None) -> str | None:
    """Return why a test that needs ``count`` devices of ``kind`` can't run, or None if it can."""
    if kind != "cuda":
        raise ValueError(f"needs_device knows only the kind 'cuda', not {kind!r}")
    if os.environ["TRITON_INTERPRET"] != "0":
        return "Triton's interpreter is on; `make test-device` runs this test"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.device_count() < count:
        return f"it needs {count} CUDA devices, and this machine has {torch.cuda.device_count()}"
    major = torch.cuda.get_device_capability(0)[0]
    if compute_capability is not None and major != compute_capability:
        return f"it needs compute capability {compute_capability}, and this device has {major}"
    return None


def missing_nixl() -> str | None:
    """Return why a test that needs NIXL can't run, or None if it can."""
    from outrider.transports.nixl_transport import PACKAGES

    return None if any(find_spec(name) for name in PACKAGES) else "NIXL isn't installed (extra nixl)"


@functools.cache
def missing_namespaces() -> str | None:
    """Return why a test that needs network namespaces can't run, or None if it can."""
    absent = [command for command in ("unshare", "nsenter", "ip") if shutil.which(command) is None]
    if absent:
        return f"this machine lacks the command {absent[0]}"
    command = ["unshare", "--net", "--mount", "mount", "-t", "sysfs", "sysfs", "/sys"]
    made = subprocess.run(command, capture_output=True, text=True)
    return f"no network namespace can be made: {made.stderr.strip()}" if made.returncode else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose device, package or privilege is missing, with the reason."""
    sim = sys.modules.get("outrider_sim.torch_device.torch_slot")
    if sim is not None and sim.registered() is not None:
        sim.registered().pins_in_factories = item.nodeid.startswith(PINNING_BY_FACTORIES)
    for kind, missing in (
        ("needs_device", missing_device),
        ("needs_nixl", missing_nixl),
        ("needs_namespaces", missing_namespaces),
    ):
        for marker in item.iter_markers(kind):
            reason = missing(*marker.args, **marker.kwargs)
            if reason is not None:
                pytest.skip(f"not run: {reason}")


def pytest_collection_finish() -> None:
    """What collecting has imported stays: no later collection of garbage looks through it again.

    Tests make millions of objects that live as long as their module: fewer collections spare a twentieth of the time.
    """
    spare_repeated_work()
    # pytest adds a handler to each logger that does not propagate, six times per test; torch has about 50 of these.
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.startswith("torch"):
            logger.propagate = True
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture
def collects_little() -> None:
    """Garbage collections of the test look at what the test makes, and not at all modules and what other tests have left.

    That takes a second for each collection late in a run.
    """
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
    verdicts = PluginProbe.verdicts
    # Made-up plugins do no harm, so they needn't be tried in a child process: that takes a third of a second each time.
    monkeypatch.setattr(PluginProbe, "verdicts", lambda self, plugins, describe: dict.fromkeys(plugins, ProbeVerdict()))

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
            monkeypatch.setattr(PluginProbe, "verdicts", verdicts)
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
