#!/usr/bin/env python3
"""Run the first commands of the README from a fresh clone, and print the time of each as a table.

    python .ci/first_commands.py [--readme FILE] [--summary FILE]

The commands are those of the README's first shell block, except `make test`, which a job of its own runs and times. The table
is also appended to the file of `--summary`. The exit status is 1 if a command failed. Needs Python alone.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMED_ELSEWHERE = ("make test",)


def first_commands(readme: str) -> list[str]:
    """Return the commands of the first shell block, without comments."""
    block = re.search(r"```sh\n(.*?)```", readme, re.DOTALL)
    lines = [] if block is None else [re.sub(r"\s+# .*", "", line).strip() for line in block[1].splitlines()]
    return [line for line in lines if line and line not in TIMED_ELSEWHERE]


def main(arguments: list[str] | None = None) -> int:
    """Run the commands and return the exit status."""
    parser = argparse.ArgumentParser(description="Time the first commands of the README.")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--summary", type=Path, help="Markdown file that the table is appended to")
    given = parser.parse_args(arguments)
    commands = first_commands(given.readme.read_text(encoding="utf-8"))
    if not commands:
        print(f"{given.readme} has no shell block with commands", file=sys.stderr)
        return 1
    rows, failed = [], False
    for command in commands:
        print(f"$ {command}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, shell=True, cwd=given.readme.parent, check=False).returncode
        failed = failed or code != 0
        rows.append(f"| `{command}` | {time.monotonic() - began:.1f} | {code} |")
    table = "\n".join(["| first commands of the README | seconds | exit code |", "|---|---|---|", *rows, ""])
    print(table, flush=True)
    if given.summary is not None:
        with given.summary.open("a", encoding="utf-8") as file:
            file.write(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
