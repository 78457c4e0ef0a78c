"""Entry point of the command ``outrider``. It imports next to nothing, so that signals are handled from the first moment."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from outrider.cli.stopping import until_stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Takes ``sys.argv`` unless ``arguments`` are given."""
    with until_stopped(process_ends=arguments is None) as stop:
        from outrider.cli.dispatch import dispatch

        return dispatch(arguments, stop)


if __name__ == "__main__":
    sys.exit(main())
