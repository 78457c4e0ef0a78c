"""Work that a background thread does while weights load, so that the first kernel doesn't wait for it."""

from __future__ import annotations

from threading import Thread

from triton.runtime import cache


def hash_compiler() -> None:
    """Hash the compiler's source files in a background thread, once per process.

    The hash is part of each compiled kernel's cache key, takes half a second, and is cached by Triton. Releases without
    ``triton_key`` compute it with the first kernel.
    """
    key = getattr(cache, "triton_key", None)
    if key is not None:
        # The thread only reads files, so the process can exit without waiting for it.
        Thread(target=key, name="outrider-triton-key", daemon=True).start()
