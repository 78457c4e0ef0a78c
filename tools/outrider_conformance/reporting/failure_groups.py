"""Summarize the failures of a run: equal errors as one group, and the verbs of the plugin that explain most failures.

Verbs are ranked as in spectrum-based fault localization (Abreu, Zoeteweij and van Gemund, 2006): a verb is suspicious if many
failed tests and few passed tests call it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from math import sqrt
from typing import Any

from outrider_conformance.reporting.causes import VERBS, cause_of, verb_of

_MAX_CAUSES = 3
_MAX_GROUPS = 5
_MAX_NAMED_TESTS = 4
_MAX_REASON_LINES = 12
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?")
_ABSTRACT = re.compile(r"Can't instantiate abstract class (\w+) .*abstract methods? '?([\w, ']+\w)")
_PARAMETER = re.compile(r"\[([A-Z]\w+\.\w+)\]$")
_PROMISED = 0.05
"""Weight of the fraction of failures that break the promise of the verb itself. It decides between verbs that the same tests
call.
"""

Verdicts = Sequence[Mapping[str, Any]]


@contextmanager
def tracing_verbs() -> Generator[set[str]]:
    """Collect the verbs of the plugin that are called inside the scope, on any thread, as ``Stream._wait``.

    The public methods of the interface are replaced inside the scope: each one calls the plugin's method of its name.
    """
    called: set[str] = set()
    originals = [
        (base, name, method)
        for base in VERBS
        for name, method in vars(base).items()
        if callable(method) and not name.startswith("_") and hasattr(base, f"_{name}")
    ]

    def traced(verb: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(verb)
            return method(*args, **kwargs)

        return call

    try:
        for base, name, method in originals:
            setattr(base, name, traced(f"{base.__name__}._{name}", method))
        yield called
    finally:
        for base, name, method in originals:
            setattr(base, name, method)


def ranked_causes(tests: Verdicts, called: Mapping[str, Iterable[str]]) -> list[dict[str, Any]]:
    """Return the verbs that explain the failed ``tests``, the best explanation first.

    ``called`` has the verbs that each test called. Each further verb explains failures that the verbs before it don't.
    """
    failed = {test["id"]: test for test in tests if test["outcome"] == "failed"}
    absent = {test: found for test, entry in failed.items() if (found := _ABSTRACT.search(str(entry["reason"])))}
    if absent:
        owner, method = next(iter(absent.values())).groups()
        why = f"{owner} doesn't implement it; the name is misspelt if the class has a similar method"
        explained = list(absent)
        return [{"verb": f"{owner}.{method}", "failed": len(explained), "passed": 0, "cause": why, "tests": explained}]

    def suspects(test: Mapping[str, Any]) -> set[str]:
        if _PARAMETER.search(str(test["id"])):  # a test of the one verb that its parameter names
            return set(filter(None, [_promised(test)]))
        return {*called.get(test["id"], ()), *filter(None, [_promised(test)])}

    by_passed = Counter(verb for test in tests if test["outcome"] == "passed" for verb in suspects(test))
    left = {test: suspects(entry) for test, entry in failed.items()}
    causes: list[dict[str, Any]] = []
    while left and len(causes) < _MAX_CAUSES:
        by_failed = Counter(verb for verbs in left.values() for verb in verbs)
        own = Counter(_promised(failed[test]) for test in left)
        if not by_failed:
            break
        total = len(left)

        def suspicion(verb: str) -> float:
            count = by_failed[verb]  # noqa: B023  (called in this turn of the loop)
            return count / sqrt(total * (count + by_passed[verb])) + _PROMISED * own[verb] / total  # noqa: B023

        # Of equals, a verb that makes an object is the last: the test calls it to prepare.
        verb = max(sorted(by_failed), key=lambda verb: (suspicion(verb), "._create_" not in verb))
        explained = [test for test, verbs in left.items() if verb in verbs]
        member = verb.replace("._", ".")
        causes.append(
            {"verb": verb, "failed": len(explained), "passed": by_passed[verb], "cause": cause_of(member), "tests": explained}
        )
        left = {test: verbs for test, verbs in left.items() if verb not in verbs}
    return causes


def _promised(test: Mapping[str, Any]) -> str:
    """Return the verb whose promise the test checks, or the member if no verb keeps its promise (a kernel, a capability), or
    an empty string for a whole class of verbs. A parameter of the test may name the verb.
    """
    named = _PARAMETER.search(str(test["id"]))
    member = str((test["promise"] or {}).get("member", ""))
    member = named[1] if named is not None and verb_of(named[1]) else member
    if verb := verb_of(member):
        return f"{member.partition('.')[0]}.{verb}"
    return "" if member in {base.__name__ for base in VERBS} else member


def grouped(tests: Verdicts) -> list[dict[str, Any]]:
    """Return the failed ``tests`` in groups, the largest first: equal errors but for numbers, or parameters of one test."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for test in tests:
        if test["outcome"] == "failed":
            reason = str(test["reason"]).partition("\n")[0]
            groups.setdefault(_NUMBER.sub("#", reason), []).append(test)
    merged: dict[str, list[Mapping[str, Any]]] = {}
    for error, members in groups.items():
        functions = {str(test["id"]).partition("[")[0] for test in members}
        merged.setdefault(functions.pop() if len(functions) == 1 else error, []).extend(members)
    return [
        {"reason": str(members[0]["reason"]), "tests": [test["id"] for test in members]}
        for members in sorted(merged.values(), key=lambda members: (members[0]["level"], -len(members)))
    ]


def summary_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the lines that sum up the failures of a report: causes by the number of failures, then each group once."""
    lines = [f"look first at {cause_line(cause)}" for cause in report["causes"]]
    by_id = {test["id"]: test for test in report["tests"]}
    for number, group in enumerate(report["failures"][:_MAX_GROUPS], 1):
        first, count = by_id[group["tests"][0]], len(group["tests"])
        named = ", ".join(group["tests"][:_MAX_NAMED_TESTS])
        named += f" and {count - _MAX_NAMED_TESTS} more" if count > _MAX_NAMED_TESTS else ""
        lines += ["", f"{number}. {count} failed test{'s' if count > 1 else ''}: {named}"]
        shown = group["reason"].partition("\n\n")[0].splitlines()[:_MAX_REASON_LINES]  # without the script of a program
        left_out = len(group["reason"].splitlines()) - len(shown)
        lines += [f"   {line}" for line in shown]
        lines += [f"   … {left_out} more lines in the report"] if left_out else []
        if first["promise"] and not group["reason"].startswith(f"{first['promise']['member']} promises"):
            lines.append(f"   {first['promise']['member']} promises: “{first['promise']['words']}”")
        lines += [f"   where: {first['where']}"] if first["where"] else []
        lines += [f"   likely cause: {cause}" for cause in first["causes"]]
        lines += [f"   alone: {first['alone']}"] if first["alone"] else []
    rest = len(report["failures"]) - _MAX_GROUPS
    return [*lines, "", f"{rest} more errors: see the report"] if rest > 0 else lines


def cause_line(cause: Mapping[str, Any]) -> str:
    """Return one entry of :func:`ranked_causes` as text."""
    why = f": {cause['cause']}" if cause["cause"] else ""
    how = "called" if "._" in cause["verb"] else "checked"
    return f"`{cause['verb']}` ({how} by {cause['failed']} failed and {cause['passed']} passed tests){why}"
