"""A vendor's workbench: a directory with a virtual environment in which `pip`, `python` and `outrider` are commands."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

_COMMANDS = {"pip": "pip", "outrider": "outrider.cli.main", "pytest": "pytest"}


class Workbench:
    """What is installed for this process can be imported there; what is installed there stays there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "work"
        self.home.mkdir(parents=True)
        venv.create(root / "venv", with_pip=False)
        self._bin = root / "venv" / "bin"
        for command, module in _COMMANDS.items():
            path = self._bin / command
            path.write_text(f'#!/bin/sh\nexec "{self._bin}/python" -m {module} "$@"\n')
            path.chmod(0o755)
        # A .pth of the outer environment isn't read there, so its import path goes along.
        search = [path for path in sys.path if path and Path(path).name != "tests"]
        search = [*dict.fromkeys([*search, sysconfig.get_path("purelib")])]
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(self._bin), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(search),
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it the other way round: no isolation
            "PIP_NO_DEPS": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_QUIET": "1",
        }

    def shell(self, command: str, timeout: float = 1200) -> str:
        """Run a line of shell in the working directory; returns its output, and fails with it.

        A command that hangs fails after ``timeout`` seconds. The kit takes about a minute on two idle cores, and many
        times as long next to other work.
        """
        done = subprocess.run(
            ["sh", "-ec", command],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout
