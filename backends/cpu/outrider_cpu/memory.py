"""Memory of the host: what is freed stays with the process, so that it needn't be fetched and cleared again."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_KEPT = 256 << 20
"""Bytes at the end of the heap that stay when they're free."""
_LARGEST = 32 << 20
"""Bytes of a block up to which it comes from the heap: glibc takes no larger value."""


def keep_freed() -> bool:
    """Have the C library keep up to 256 MiB of freed memory, and take blocks up to 32 MiB from it; whether it does.

    By default glibc gives a freed block of some 100 KiB or more back to the system, and the next one like it costs a page
    fault every 4 KiB: more than it takes to fill it. It is a setting of the process, for all of its threads. Other C
    libraries have no such settings, and stay as they are.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST))
