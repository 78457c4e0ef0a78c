"""Compilation of guides in threads, so that running requests don't wait for a compilation."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from outrider.engine.engine import Engine
from outrider.engine.requests.sampling import SamplingParams

_NUM_THREADS = 2


class GuideCompilers:
    """The threads that compile guides for one engine. The first guide starts them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool: ThreadPoolExecutor | None = None

    def start_compilation(self, params: SamplingParams) -> Future[None] | None:
        """Start to compile the guide of a request, and return the future of the compilation. None: there is no guide.

        The request may be added to the engine once the future is done. The future's error says why the guide is invalid.
        """
        if params.guide is None:
            return None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="outrider-guides")
        return self._pool.submit(self._engine.compile_guide, params.guide)

    def close(self) -> None:
        """Cancel the compilations that haven't started. A running compilation continues until it is done."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
