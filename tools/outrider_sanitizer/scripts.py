"""Running a user's script under a tool: its file, its arguments, and the backends that it makes."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.report import exit_code
from outrider.device.errors import ConfigError
from outrider.registry import Registry

if TYPE_CHECKING:
    from outrider.device import Backend

Attach = Callable[["Backend", ExitStack], None]
"""Starts watching a backend; what it enters on the stack is left when the script has ended."""


def script_path(script: Sequence[str], command: str) -> Path:
    """The file of ``script``, a path and arguments. Raises :class:`ConfigError` where there is none; ``command``: whose."""
    path = Path(script[0])
    if not path.is_file():
        raise ConfigError(f"script {script[0]!r} doesn't exist; usage: outrider {command} [--backend NAME] -- script.py args")
    return path


def run_script(path: Path, argv: Sequence[str], first: Backend, attach: Attach) -> tuple[int, str | None]:
    """Run a script as ``__main__``, with ``attach`` called for ``first`` and for each backend that the script makes.

    The script may use ``first`` through torch alone. Returns its exit code, and the error that ended it, if one did; its
    errors aren't raised. The scopes that ``attach`` entered are left by then. KeyboardInterrupt passes.
    """
    with with_new_backends(first, attach), as_main(path, argv):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as error:
            return exit_code(error), None if error.code is None or isinstance(error.code, int) else str(error.code)
        except Exception as error:
            return 1, f"{type(error).__name__}: {error}"
    return 0, None


@contextmanager
def with_new_backends(first: Backend, attach: Attach) -> Generator[None]:
    """Call ``attach`` for a backend, and for each that a registry makes while the scope lasts."""
    with ExitStack() as stack:
        attach(first, stack)
        with Registry.observing(lambda made: attach(made, stack)):
            yield


@contextmanager
def as_main(path: Path, argv: Sequence[str]) -> Generator[None]:
    """Let a script find its arguments in ``sys.argv`` and its neighbours on ``sys.path``."""
    before, paths = sys.argv, list(sys.path)
    sys.argv = list(argv)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before, paths
