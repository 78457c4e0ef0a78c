"""Check the subject of commit messages: imperative mood, at most 72 characters, no full stop at the end.

``commit_message.py FILE`` checks the message in FILE (git's hook commit-msg). ``commit_message.py --range BASE..HEAD`` checks
each commit of the range that is not a merge. Exit status: 0 if all subjects pass, 1 otherwise; each fault is one line.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MAX_SUBJECT_CHARACTERS = 72
GENERATED = re.compile(r"^(?:Merge|Revert|fixup!|squash!) ")
# Forms that are no imperative: "Adds", "Added", "Adding"; and words that begin a description instead of a command.
NOT_IMPERATIVE = re.compile(
    r"^(?:\w+(?:ing|ed)|(?!Address|Process|Pass|Express|Compress|Suppress|Focus|Discuss|Cross|Canvas|Bypass|Access)\w+s)$"
)
NO_VERB = re.compile(r"^(?:an?|the|th[ei]s[e]?|that|it|wh\w+|on|in|of|for|with|no|not|new|more|some|all)$", re.IGNORECASE)
IMPERATIVE_ED = frozenset(["Embed", "Feed", "Need", "Seed", "Shed", "Speed", "Bring", "String", "Spring"])


def faults(subject: str) -> list[str]:
    """Return what is wrong with a subject line, one text per fault."""
    if GENERATED.match(subject):
        return []
    first = (subject.split() or [""])[0].rstrip(":,")
    found = []
    if len(subject) > MAX_SUBJECT_CHARACTERS:
        found.append(f"{len(subject)} characters; at most {MAX_SUBJECT_CHARACTERS}")
    if not subject or not first[:1].isupper():
        found.append("begins without a capital letter")
    if subject.endswith("."):
        found.append("ends with a full stop")
    if NO_VERB.match(first) or (first not in IMPERATIVE_ED and NOT_IMPERATIVE.match(first)):
        found.append(f"begins with {first!r}; begin with an imperative verb, such as 'Add' or 'Fix'")
    return found


def subjects_of_range(commits: str) -> list[str]:
    """Return the subjects of the commits in a range, merges left out."""
    command = ["git", "log", "--no-merges", "--format=%s", commits]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main(arguments: list[str]) -> int:
    """Check a file or a range; return the exit status."""
    if arguments[:1] == ["--range"]:
        subjects = subjects_of_range(arguments[1])
    else:
        lines = Path(arguments[0]).read_text(encoding="utf-8").splitlines()
        subjects = [next((line for line in lines if line.strip() and not line.startswith("#")), "")]
    complaints = [f"{subject!r}: {fault}" for subject in subjects for fault in faults(subject)]
    print("\n".join(complaints), end="\n" if complaints else "", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
