"""Runs a user's script under a tool: its file, its arguments, and the backends that it creates."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.options.option_values import BACKEND, UsageError, option
from outrider.cli.terminal.environment import backend_from_environment
from outrider.cli.terminal.report import exit_code
from outrider.device.errors import CapabilityError
from outrider.registry import BackendSpec, Registry

if TYPE_CHECKING:
    from outrider.device import Backend

Attach = Callable[["Backend", ExitStack], None]
"""The function that starts to watch a backend. The scopes that it enters on the stack are left when the script has ended."""

ScriptBackendOption = Annotated[
    str | None,
    option(
        "--backend",
        value=BACKEND,
        help="Backend: a name such as sim, NAME:1 for a device, NAME:key=value for options, or auto. "
        "Without it OUTRIDER_BACKEND decides, then it is sim.",
    ),
]
SIMULATED = "sim"
"""The backend of a script or a program if nothing names one: it needs no hardware, and runs programs that say ``cuda``."""


@dataclass(frozen=True, slots=True)
class ScriptEnd:
    """Exit code of a script that has ended, and the error and line of a failed one."""

    exit_code: int
    error: str | None = None
    """The error that ended the script, or the text that it passed to ``sys.exit``."""
    location: str = ""
    """File and line of the script at which it ended early; empty if it ran to its end."""
    traceback: str = ""
    """Traceback of the error, from the script on."""

    @property
    def failure(self) -> str:
        """The script's error and source line as text, or an empty string if the script succeeded."""
        if not self.exit_code and self.error is None:
            return ""
        return ": ".join(filter(None, (self.location, self.error or f"exit code {self.exit_code}")))


def select_for_script(registry: Registry, backend: str | None) -> BackendSpec:
    """Return the spec of the backend that ``--backend`` names, else OUTRIDER_BACKEND, else of the simulated device."""
    environment = backend_from_environment()
    return registry.select(backend if backend or environment else SIMULATED, environment)


def script_path(script: Sequence[str], command: str) -> Path:
    """Return the file of ``script``, a path and arguments of ``command``. Raises :class:`UsageError` if it doesn't exist."""
    path = Path(script[0])
    if not path.is_file():
        problem = "isn't a file" if path.exists() else "doesn't exist"
        raise UsageError(f"script {script[0]!r} {problem}; usage: outrider {command} [--backend NAME] -- script.py args")
    return path


def run_script(path: Path, argv: Sequence[str], first: Backend, attach: Attach) -> ScriptEnd:
    """Run a script as ``__main__``, with ``attach`` called for ``first`` and for each backend that the script creates.

    The script may use ``first`` through torch alone, on a simulated device also by CUDA's names. Returns how the script
    ended; an error of the script isn't raised. The scopes that ``attach`` entered are closed on return. KeyboardInterrupt
    passes.
    """
    from outrider_sanitizer.cuda_names import map_cuda_names  # it imports torch, which a command's help does without

    with map_cuda_names(first), with_new_backends(first, attach), as_main(path, argv):
        return _run_to_end(path, lambda: runpy.run_path(str(path), run_name="__main__"))


def run_rank_scripts(path: Path, argv: Sequence[str], backends: Sequence[Backend], attach: Attach) -> list[ScriptEnd]:
    """Run a script once for each of ``backends``, like that many rank processes: in host threads of which one runs at a time.

    Each rank has its own ``__main__``, arguments, environment (``RANK``, ``WORLD_SIZE`` and so on, as torchrun sets them),
    current device and torch.distributed.

    Returns how each rank ended. A rank that waits for an ended rank reports that. Raises :class:`CapabilityError` for other
    devices than simulated ones.
    """
    control = backends[0].control
    if control is None:
        raise CapabilityError(f"{backends[0].label} decides its schedules itself; ranks are threads of a simulated device")
    results = [ScriptEnd(1, "it never ended")] * len(backends)
    environment = RankEnvironment()

    def body(rank: int) -> None:
        environment.begin(rank, len(backends), argv)
        # Not runpy: it puts sys.argv[0] back at the end, and fails where a script has emptied its arguments.
        script = _Script("__main__", str(path))
        main = module_from_spec(ModuleSpec("__main__", script, origin=str(path)))
        main.__file__ = str(path)
        sys.modules["__main__"] = main
        results[rank] = _run_to_end(path, partial(script.exec_module, main))

    with ExitStack() as stack:
        for backend in backends:
            attach(backend, stack)
        stack.enter_context(as_main(path, argv))
        control.run_ranks([partial(body, rank) for rank in range(len(backends))], (environment,))
    return results


def _run_to_end(path: Path, run: Callable[[], object]) -> ScriptEnd:
    try:
        run()
    except SystemExit as error:
        code = exit_code(error)
        said = None if error.code is None or isinstance(error.code, int) else str(error.code)
        return ScriptEnd(code, said, _traceback_of(path, error)[0]) if code or said else ScriptEnd(0)
    except Exception as error:
        return ScriptEnd(1, f"{type(error).__name__}: {error}", *_traceback_of(path, error))
    return ScriptEnd(0)


def _traceback_of(path: Path, error: BaseException) -> tuple[str, str]:
    """Return the innermost line of the script in the traceback, or its faulty line, and the traceback from the script on."""
    frames, line = (
        error.__traceback__,
        error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else None,
    )
    own = None
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == str(path):
            own, line = own or frames, frames.tb_lineno
        frames = frames.tb_next
    return f"{path}:{line}" if line else "", "".join(traceback.format_exception(type(error), error, own))


class _Script(SourceFileLoader):
    """Runs a script's file without writing bytecode."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        """Discard the bytecode instead of writing it."""


@contextmanager
def with_new_backends(first: Backend, attach: Attach) -> Generator[None]:
    """Call ``attach`` for a backend, and for each backend that a registry creates in this scope."""
    with ExitStack() as stack:
        attach(first, stack)
        with Registry.observing(lambda made: attach(made, stack)):
            yield


@contextmanager
def as_main(path: Path, argv: Sequence[str]) -> Generator[None]:
    """Set ``sys.argv`` to the script's arguments and add its directory to ``sys.path`` in this scope."""
    before, paths = sys.argv, list(sys.path)
    sys.argv = list(argv)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before, paths


class RankEnvironment:
    """The process's environment, arguments and ``__main__``, with separate values for each rank that is a thread
    (a ``ProcessView``).
    """

    def save(self) -> tuple[Any, list[str], ModuleType]:
        """Return the environment, arguments and ``__main__`` module of the running rank."""
        return os.environ, sys.argv, sys.modules["__main__"]

    def restore(self, saved: tuple[Any, list[str], ModuleType]) -> None:
        """Restore the saved values when their rank runs again."""
        os.environ, sys.argv, sys.modules["__main__"] = saved

    def begin(self, rank: int, ranks: int, argv: Sequence[str]) -> None:
        """Give the calling rank its own environment, like torchrun, and its own arguments."""
        mine = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "GROUP_RANK": 0,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
        }
        own: Any = {**os.environ, **{name: str(value) for name, value in mine.items()}}
        self.restore((own, list(argv), sys.modules["__main__"]))
