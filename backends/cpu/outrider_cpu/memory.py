"""Allocator setting of the host: the process retains freed memory, so that the system needn't map and clear it again."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_KEPT = 256 << 20
"""Maximum bytes of freed memory at the end of the heap that the C library keeps."""
_LARGEST = 32 << 20
"""Maximum bytes of a block that is allocated from the heap; glibc accepts no larger value."""


def retain_freed_memory() -> bool:
    """Let the C library retain up to 256 MiB of freed memory for blocks of up to 32 MiB. Return whether it accepts this.

    By default glibc returns freed blocks of about 100 KiB or more to the system. The next such block then causes a page
    fault every 4 KiB, which takes longer than filling the block. The setting applies to all threads of the process.
    Other C libraries have no such settings and are unchanged.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST))
