"""One run of ``outrider bench sanitizer``, in a process of its own."""

from __future__ import annotations

from outrider_bench.child import answer
from outrider_bench.commands.sanitizer import measure

if __name__ == "__main__":
    answer(measure)
