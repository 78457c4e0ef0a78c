"""Reports made once, from a real run on the reference backend."""

import os
import subprocess
import sys
import textwrap

import pytest

from outrider_conformance import conform
from outrider_conformance.levels import MODULES, SUITE

SICK = """
    import os
    import pytest
    from outrider.device.plugin import BackendInfo, hookimpl

    @hookimpl
    def backend_info():
        return BackendInfo(name="sick", description="made up", priority=-1)

    @hookimpl
    def create_backend(ordinal, options):
        from outrider.device import BackendLoadError, ConfigError
        if ordinal:
            raise BackendLoadError(f"no device {{ordinal}}")
        if options:
            raise ConfigError("no options")
        from outrider_cpu.backend import CpuBackend

        class Sick(CpuBackend):
            {body}

        backend = Sick()
        backend.name = "sick"
        return backend
"""


@pytest.fixture
def sick(install, monkeypatch):
    """``sick("...")``: a distribution whose backend's class has that body; visible to child processes too.

    Beside it lies a plugin of pytest that would end the run, were it loaded because it's installed.
    """

    def make(body):
        body = textwrap.indent(textwrap.dedent(body).strip(), " " * 12).strip()
        for site in (install("sick", SICK.format(body=body)), install("intruder", "raise SystemExit(9)", group="pytest11")):
            monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")

    return make


def suite_modules():
    return sorted(SUITE.glob(MODULES))


@pytest.fixture(scope="session")
def cpu_run(tmp_path_factory):
    """(directory, report) of the reference backend up to L3."""
    directory = tmp_path_factory.mktemp("cpu-report")
    return directory, conform("cpu", level="L3", report=directory)


@pytest.fixture
def run_suite(tmp_path):
    """Run the suite with pytest itself, outside the repository; returns the finished process."""

    def run(*arguments, module="outrider_conformance"):
        command = [sys.executable, "-m", "pytest", "-p", "outrider_conformance.plugin", "--pyargs", module]
        return subprocess.run(
            [*command, "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
