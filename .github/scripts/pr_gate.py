"""May the costly jobs of this pull request run? Asks for its labels as they are now.

The event that started a workflow carries the labels of that moment, and a re-run carries them again: a label that was
added since isn't in it. So the labels are asked for at run time, with the command `gh`.

Reads GITHUB_EVENT_NAME, GITHUB_REPOSITORY, PR_NUMBER and REQUIRE_RUN_CI_EXTRA ("true" or "false"). Exit codes: 0 it may;
1 a label is missing; 2 the labels couldn't be found out, which never counts as leave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

LABEL = "run-ci"
EXTRA_LABEL = "run-ci-extra"
TIMEOUT_S = 60
# Whoever can start these can write to the repository.
TRUSTED_EVENTS = frozenset(["push", "schedule", "workflow_dispatch", "merge_group"])


class Unknown(Exception):
    """The labels couldn't be found out."""


def main(environment: Mapping[str, str]) -> int:
    """Decide, and say why in a line that GitHub shows with the run."""
    try:
        missing = missing_labels(environment)
    except Unknown as error:
        print(f"::error title=Gate::{error}")
        return 2
    if missing:
        what = f"label{'s' if len(missing) > 1 else ''} {' and '.join(missing)}"
        print(
            f"::error title=Gate::this pull request lacks the {what}: a maintainer adds what is missing after a look at the "
            "changes; then re-run this job"
        )
        return 1
    print("the gate is open")
    return 0


def missing_labels(environment: Mapping[str, str]) -> list[str]:
    """The labels that this run needs and the pull request doesn't have now; none for an event that isn't one."""
    event = environment.get("GITHUB_EVENT_NAME", "")
    if event in TRUSTED_EVENTS:
        return []
    if event == "pull_request":
        raise Unknown(
            "the event is 'pull_request', whose workflow files come from the pull request: it could take this gate out; "
            "start the workflow on pull_request_target"
        )
    if event != "pull_request_target":
        raise Unknown(f"the event is {event!r}; expected pull_request_target or one of {', '.join(sorted(TRUSTED_EVENTS))}")
    extra = environment.get("REQUIRE_RUN_CI_EXTRA", "")
    if extra not in ("true", "false"):
        raise Unknown(f"REQUIRE_RUN_CI_EXTRA is {extra!r}; expected 'true' or 'false'")
    number, repository = environment.get("PR_NUMBER", ""), environment.get("GITHUB_REPOSITORY", "")
    if not number.isascii() or not number.isdecimal() or not repository:
        raise Unknown(f"PR_NUMBER is {number!r} and GITHUB_REPOSITORY {repository!r}; expected a number and OWNER/NAME")
    present = current_labels(number, repository)
    return [label for label in (LABEL, *([EXTRA_LABEL] if extra == "true" else [])) if label not in present]


def current_labels(number: str, repository: str) -> frozenset[str]:
    """The labels that the pull request has at this moment."""
    command = ["gh", "pr", "view", number, "--repo", repository, "--json", "labels"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unknown(f"`{' '.join(command)}` couldn't be run: {error}") from error
    if found.returncode != 0:
        raise Unknown(f"`{' '.join(command)}` ended with {found.returncode}: {' '.join(found.stderr.split())}")
    try:
        return frozenset(label["name"] for label in json.loads(found.stdout)["labels"])
    except (ValueError, KeyError, TypeError) as error:
        raise Unknown(f"`{' '.join(command)}` printed what isn't a list of labels: {found.stdout[:200]!r}") from error


if __name__ == "__main__":
    sys.exit(main(os.environ))
