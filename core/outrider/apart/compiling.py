"""Guides are compiled beside the engine: requests that run don't wait for it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from outrider.engine.engine import Engine
from outrider.engine.requests.sampling import SamplingParams

_THREADS = 2


class Compilers:
    """Threads that compile for one engine; made when the first guide comes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, params: SamplingParams) -> Future[None] | None:
        """What ends when a request may go to the engine; its error says why it can't. None: it may go now."""
        if params.guide is None:
            return None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="outrider-guides")
        return self._pool.submit(self._engine.compile_guide, params.guide)

    def close(self) -> None:
        """Begin no other one. What is being compiled goes on for as long as a guide may take."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
