"""Worker processes that compile kernels for this process, by way of Triton's cache on disk.

Threads of one process hardly compile at the same time, since the compiler's front end holds the interpreter's lock. A worker
imports Triton and the modules of the kernels, and neither torch nor the device's driver. ``python -m
outrider_triton.workers`` is a worker.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from inspect import signature
from threading import Lock, local
from typing import IO, Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime._async_compile import AsyncCompileMode, active_mode
from triton.runtime.cache import get_cache_manager
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import serialize_specialization_data

_MAX_WORKERS = 14
_MIN_PROCESSORS = 4
"""Number of processors below which this process compiles alone: a worker takes longer to start than it saves."""


class WorkerCompileMode(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types
    """Triton's mode of asynchronous compilation, with a worker process for each thread of its pool.

    The worker's result is in Triton's cache on disk, from which this process loads it. If the cache has the kernel already,
    or no worker can compile it, this process compiles it as without workers; so an error is raised as without workers, too.
    Without ``workers`` the threads of the pool compile.

    The threads also load the kernels onto the device. A load takes milliseconds, and Triton 3.6 first runs a C compiler for
    each new signature.
    """

    def __init__(self, executor: ThreadPoolExecutor, workers: WorkerPool | None) -> None:
        super().__init__(executor)
        self._workers = workers

    def __exit__(self, *error: object) -> None:
        """Wait for all kernels. Raises the error of one that couldn't be compiled or loaded; later launches then compile as
        without this mode.
        """
        try:
            super().__exit__(*error)
        finally:
            active_mode.set(None)  # Triton leaves a mode with an error active

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        """Submit a compilation, which the pool gives to a worker first, and the loading of the kernel."""
        device = driver.active.get_current_device()  # of this thread

        def compile_and_load() -> Any:
            request = None if self._workers is None else _request(key, compile_fn)
            if self._workers is not None and request is not None:
                self._workers.compile_kernel(request)
            kernel = compile_fn()
            driver.active.set_current_device(device)
            with suppress(OutOfResources):  # only a call that uses the kernel must fail
                _ = kernel.run  # Triton loads a kernel at the first access
            return kernel

        future = super().submit(key, compile_and_load, finalize_fn)
        finalize_fn(future)  # Triton 3.6 would ask for the kernel again in each launch of the scope
        return future


class WorkerPool:
    """The worker processes, one for each thread that asks for one, started when it first asks."""

    def __init__(self) -> None:
        self._own = local()
        self._lock = Lock()
        self._started: list[subprocess.Popen[bytes]] = []

    def compile_kernel(self, request: bytes) -> None:
        """Wait until a worker has compiled the kernel of ``request``, or has failed to."""
        worker = self._worker()
        if worker is None:
            return
        assert worker.stdin is not None
        assert worker.stdout is not None
        with suppress(BrokenPipeError):
            worker.stdin.write(request + b"\n")
            worker.stdin.flush()
            worker.stdout.read(1)

    def _worker(self) -> subprocess.Popen[bytes] | None:
        """Return the calling thread's worker; None if it could not be started or has ended."""
        if not hasattr(self._own, "worker"):
            self._own.worker = None
            paths = os.pathsep.join(path for path in sys.path if path)
            with suppress(OSError):
                self._own.worker = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    env={**os.environ, "PYTHONPATH": paths},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # this process handles Ctrl-C
                )
                with self._lock:
                    self._started.append(self._own.worker)
        worker: subprocess.Popen[bytes] | None = self._own.worker
        return worker if worker is not None and worker.poll() is None else None

    def close(self) -> None:
        """Kill the worker processes and wait for their ends."""
        for worker in self._started:
            worker.kill()
            worker.communicate()


@contextmanager
def compiling(processors: int | None = None) -> Generator[None]:
    """Compile the kernels that are launched in the scope by workers, several at a time; a launch waits for its own kernel.
    All kernels are on the current device when the scope exits.

    ``processors`` is the number of processors of this process. With few of them, threads of this process compile.
    """
    count = len(os.sched_getaffinity(0)) if processors is None else processors
    threads = min(count, _MAX_WORKERS)
    workers = WorkerPool()
    try:
        with (
            ThreadPoolExecutor(threads, thread_name_prefix="outrider-compile") as pool,
            WorkerCompileMode(pool, None if count < _MIN_PROCESSORS else workers),
        ):
            yield
    finally:
        workers.close()


def _request(key: str, compile_fn: Callable[[], Any]) -> bytes | None:
    """Return the message that asks a worker for a kernel; None if the cache has it, or if it can't be sent."""
    cells = zip(compile_fn.__code__.co_freevars, compile_fn.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells}
    if not {"src", "target", "options"} <= found.keys():
        return None
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if manager.get_group(f"{found['src'].name[:150]}.json"):
        return None
    source, target = found["src"], found["target"]
    name = source.fn._fn_name
    more = (target,) if "target" in signature(serialize_specialization_data).parameters else ()  # since Triton 3.7
    try:
        data = serialize_specialization_data(
            name, source.signature, source.constants, source.attrs, found["options"], "", *more
        )
    except TypeError:  # a constant that JSON has no form for
        return None
    function = source.fn
    kernel = {"module": function.fn.__module__, "function": function.fn.__name__, "hash": function.cache_key}
    return json.dumps(kernel | {"target": vars(target), "data": data}).encode()


class _Target:
    """The part of a device's driver that Triton asks when it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Compile one kernel after another into the cache on disk, until there are no more requests."""
    for line in requests:
        request = json.loads(line)
        with suppress(Exception):  # the process that asked compiles again, and raises the error
            driver.set_active(_Target(GPUTarget(**request["target"])))
            function = getattr(import_module(request["module"]), request["function"])
            function.hash = request["hash"]  # Triton's own depends on the functions that were hashed before
            function.preload(request["data"])
        answers.write(b".")
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # the compiler may print
        _serve(sys.stdin.buffer, answers)
