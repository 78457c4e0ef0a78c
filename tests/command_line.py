"""Ways to run the command line: in this process, or as a child with its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from subprocess import PIPE
from typing import Any

import pytest


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on standard output."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    from outrider.cli.main import main

    def run(*arguments: str) -> Outcome:
        code = main(arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err or "--debug" in arguments
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def child() -> Callable[..., Outcome]:
    """Run in a child process; ``path`` are directories that come first in its import path."""

    def run(
        *arguments: str, path: tuple[object, ...] = (), stdout: Any = PIPE, stderr: Any = PIPE, **environment: str
    ) -> Outcome:
        before = os.environ.get("PYTHONPATH", "")
        search = os.pathsep.join([*map(str, path), *([before] if before else [])])
        result = subprocess.run(
            [sys.executable, "-m", "outrider.cli.main", *arguments],
            env={**os.environ, "PYTHONPATH": search, **environment},
            stdout=stdout,
            stderr=stderr,
            text=True,
            timeout=300,
            check=False,
        )
        outcome = Outcome(result.returncode, result.stdout or "", result.stderr or "")
        assert "Traceback" not in outcome.err, outcome.err
        return outcome

    return run
