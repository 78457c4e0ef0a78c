"""Processes of their own, since torch's slot for outside devices can't be given back."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def child(*command, **environment):
    path = os.pathsep.join([str(HERE / "emulated"), str(HERE.parent), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def conform(backend, level, directory, plugin, only="", programs=None):
    """The report of the conformance suite, with the emulation loaded as a plugin of pytest; of some tests ``only``, with so
    many random ``programs``.
    """
    script = (
        "import pathlib, sys; from outrider_conformance.run import conform; "
        "extra = ('-p', sys.argv[4], '-q', '-k', *sys.argv[5:]); "
        "conform(sys.argv[1], level=sys.argv[2], report=pathlib.Path(sys.argv[3]), extra=extra)"
    )
    few = [] if programs is None else ["--programs", str(programs)]
    done = child("-c", script, backend, level, str(directory), plugin, only, *few)
    assert (directory / "report.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((directory / "report.json").read_text())
    print({level: found["counts"] for level, found in report["levels"].items()})
    return report
