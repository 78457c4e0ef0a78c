"""What the first kernel would wait for, done meanwhile: while weights are read, above all."""

from __future__ import annotations

from threading import Thread

from triton.runtime import cache


def hash_compiler() -> None:
    """Have another thread hash the compiler's own files, of which the key of every compiled kernel is made; once a process.

    Triton keeps the hash, which takes half a second; where its release has no such function, the first kernel takes it.
    """
    key = getattr(cache, "triton_key", None)
    if key is not None:
        # It reads files alone, and no process need wait for it to end.
        Thread(target=key, name="outrider-triton-key", daemon=True).start()
