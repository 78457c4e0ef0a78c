"""The environment of the tests: what a shell, a terminal or a CI system passes on must not decide a test."""

from __future__ import annotations

import os
import signal
import sys
import time

_REMOVED = (
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PY_COLORS"),
    *("LANG", "LANGUAGE", "LC_CTYPE", "LC_NUMERIC", "LC_TIME", "LC_COLLATE", "LC_MONETARY", "LC_MESSAGES"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
    *("PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONUTF8"),
    # Some images forbid compiled files: each of the many child processes would compile all of Outrider again.
    "PYTHONDONTWRITEBYTECODE",
    *("OUTRIDER_BACKEND", "OUTRIDER_API_KEY", "OUTRIDER_RANK_PIPE", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),  # torchrun sets them
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"),
    "GITHUB_ACTIONS",  # typer then colors its messages
)
_SET = {
    "TERM": "dumb",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    # Two workers with two threads each would compete for two cores.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_UMASK = 0o022
_SIGNALS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}


def normalize_environment() -> None:
    """Set variables, umask and signal actions of this process, which child processes inherit.

    A shell starts a background job with SIGINT ignored, and ``nohup`` starts a command with SIGHUP ignored. A signal that is
    ignored at the start stays ignored in every child process.
    """
    for name in _REMOVED:
        os.environ.pop(name, None)
    os.environ.update(_SET)
    time.tzset()
    sys.dont_write_bytecode = False
    # Triton's interpreter needs no GPU. Triton reads the variable when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.umask(_UMASK)
    for number, action in _SIGNALS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, action)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
