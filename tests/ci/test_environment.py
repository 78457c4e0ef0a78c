"""The environment of the caller decides no test: shells, terminals and CI systems pass on different ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOSTILE = {
    "COLUMNS": "40",
    "FORCE_COLOR": "1",
    "NO_COLOR": "1",
    "TERM": "xterm-256color",
    "LC_ALL": "C",
    "LANG": "tr_TR.UTF-8",
    "TZ": "Pacific/Kiritimati",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
    "OUTRIDER_BACKEND": "none-such",
    "OUTRIDER_API_KEY": "secret",
    "RANK": "3",
    "HF_HUB_OFFLINE": "1",
    "GITHUB_ACTIONS": "true",
    "OMP_NUM_THREADS": "16",
}
STATE = """
import os, signal, sys, time
from known_environment import normalize_environment
normalize_environment()
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(signal.getsignal(signal.SIGHUP) is signal.SIG_DFL)
print(oct(os.umask(0)))
print(time.strftime("%z"))
print(sorted(set(sys.argv[1:]) & set(os.environ)))
"""


def hostile(*command: str, umask: str = "077") -> subprocess.CompletedProcess[str]:
    """Run ``command`` with hostile variables and umask, and with SIGINT and SIGHUP ignored."""
    script = f'umask {umask}; trap "" INT HUP; exec "$@"'
    environment = {**os.environ, **HOSTILE, "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("umask", ["077", "000"])
def test_tests_start_from_a_known_environment(umask):
    done = hostile("-c", STATE, *HOSTILE, umask=umask)
    kept = [name for name in HOSTILE if name in {"TERM", "LC_ALL", "TZ", "OMP_NUM_THREADS"}]
    assert done.stdout.splitlines() == ["True", "True", "0o22", "+0000", str(sorted(kept))], done.stderr


@pytest.mark.slow
def test_a_suite_in_the_background_passes():
    """Ctrl-C tests need SIGINT, which a shell without job control ignores for a background job."""
    done = hostile("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/registry/test_interruptions.py")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
