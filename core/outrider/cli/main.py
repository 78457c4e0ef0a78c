"""Entry point of the command ``outrider``. It imports next to nothing, so that signals are handled from the first moment."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from outrider.cli.stopping import until_stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Takes ``sys.argv`` unless ``arguments`` are given."""
    with until_stopped(process_ends=arguments is None) as stop:
        from outrider.cli.dispatch import dispatch

        code = dispatch(arguments, stop)
    if arguments is None:
        gc.freeze()  # else Python looks through all that was imported for garbage at its end: with torch half a second
    return code


if __name__ == "__main__":
    sys.exit(main())
