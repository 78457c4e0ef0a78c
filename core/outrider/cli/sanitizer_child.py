"""One run of ``outrider bench sanitizer``, in a process of its own."""

from __future__ import annotations

from outrider.cli.bench_sanitizer import measure
from outrider.cli.child import answer

if __name__ == "__main__":
    answer(measure)
