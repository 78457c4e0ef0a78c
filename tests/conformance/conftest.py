"""Reports made once, from a real run on the reference backend."""

import os
import subprocess
import sys

import pytest

from outrider_conformance import conform
from outrider_conformance.levels import MODULES, SUITE


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
