"""Entry point of the command ``outrider``. Few imports precede the signal handlers, so that an early signal is handled."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from outrider.cli.terminal.stopping import until_stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Takes ``sys.argv`` unless ``arguments`` are given."""
    with until_stopped(process_ends=arguments is None) as stop:
        from outrider.cli.commands.dispatch import dispatch
        from outrider.cli.terminal.environment import limit_spinning

        if arguments is None:
            limit_spinning()

        code = dispatch(arguments, stop)
    if arguments is None:
        gc.freeze()  # saves the garbage collection of all modules at exit: half a second with torch
    return code


if __name__ == "__main__":
    sys.exit(main())
