"""Seal and verify reports of the suite.

The seal is a hash of the report's content, and anyone can compute it again. It shows that a report is unchanged and which
version of the kit made it. It is no signature: it doesn't identify the author.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.device.errors import ConfigError
from outrider_conformance.levels import LEVELS, MODULES, REPORTED, SUITE, level_of

FORMAT = 1
PASSED, WAIVED, FAILED, NOT_RUN = "passed", "passed with waivers", "failed", "not run"


def levels_of(tests: Sequence[Mapping[str, Any]], level: int) -> dict[str, dict[str, str]]:
    """Return the result and the counts of tests of each level up to ``level``, by the level's name."""
    found = {}
    for number in range(level + 1):
        counts = Counter(str(test["outcome"]) for test in tests if test["level"] == number)
        found[f"L{number}"] = {
            "result": _result(counts),
            "counts": ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()) or "no tests",
            "what": LEVELS[number],
        }
    return found


def _result(counts: Counter[str]) -> str:
    if counts["failed"]:
        return FAILED
    if counts["not run"] or not counts["passed"]:
        # All tests of the level need abilities that the backend doesn't declare: the level is passed.
        return PASSED if counts and not counts["not run"] and not counts["waived"] else NOT_RUN
    return WAIVED if counts["waived"] else PASSED


def reached(tests: Sequence[Mapping[str, Any]], level: int) -> str | None:
    """Return the name of the highest level that is passed together with all lower levels, or None without one. L5 only
    reports figures and always passes.
    """
    highest = None
    for name, result in levels_of(tests, level).items():
        if result["result"] in (PASSED, WAIVED):
            highest = name
        elif name != f"L{REPORTED}":
            break
    return highest


def seal(report: dict[str, Any]) -> dict[str, Any]:
    """Return ``report`` with the hash of its other content as entry ``seal``."""
    content = {key: value for key, value in report.items() if key != "seal"}
    return {**content, "seal": digest(content)}


def digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of ``content``."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def suite_hash() -> str:
    """Return the SHA-256 of the suite's sources, which identifies its tests."""
    found = hashlib.sha256()
    for path in sorted(SUITE.glob(MODULES)):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def suite_functions() -> dict[str, int]:
    """Return each test function of the installed suite with its level, without importing the suite."""
    found = {}
    for path in sorted(SUITE.glob(MODULES)):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[f"{path.stem}::{node.name}"] = level_of(path) or 0
    return found


def verify(report: Mapping[str, Any]) -> list[str]:
    """Return the problems of a sealed report; an empty list if there are none.

    Checks the seal, and that the results follow from the tests. If the installed suite made the report, its list of tests is
    checked too. If another suite made it, that is a problem.
    """
    try:
        return _problems(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"not a report of this kit: {type(error).__name__}: {error}"]


def _problems(report: Mapping[str, Any]) -> list[str]:
    problems = []
    if report["format"] != FORMAT:
        return [f"the report has format {report['format']!r}, this kit reads {FORMAT}"]
    content = {key: value for key, value in report.items() if key != "seal"}
    if digest(content) != report["seal"]:
        problems.append("the seal doesn't fit the content: the report was changed after it was made")
    tests, level = report["tests"], int(report["level"][1:])
    if report["levels"] != levels_of(tests, level):
        problems.append("the results of the levels don't follow from the tests")
    if report["reached"] != reached(tests, level):
        problems.append(f"it claims {report['reached']}, its tests give {reached(tests, level)}")
    capabilities = report["capabilities"] or {}
    made = datetime.date.fromisoformat(report["started"][:10])
    for test in tests:
        if test["outcome"] == "not declared" and all(capabilities.get(ability) for ability in test["needs"]):
            problems.append(f"{test['id']} wasn't run, though the backend declares {', '.join(test['needs'])}")
        waiver = test["waiver"]
        if test["outcome"] == "waived":
            if not waiver or not all(waiver.get(key) for key in ("reason", "link", "expires")):
                problems.append(f"{test['id']} is waived without reason, link and date")
            elif datetime.date.fromisoformat(waiver["expires"]) < made:
                problems.append(f"{test['id']}: its waiver had expired on {waiver['expires']}, before the run")
    if report["kit"]["suite"] != suite_hash():
        problems.append(
            f"it was made by another suite (kit {report['kit']['version']}): install that version to check which tests it "
            "must hold"
        )
    else:
        present = {test["id"].partition("[")[0] for test in tests}
        missing = sorted(name for name, at in suite_functions().items() if at <= level and name not in present)
        problems += [f"{name} is missing" for name in missing]
    return problems


MOST_BYTES = 1 << 28
"""Maximum size of a report's file; real reports are far smaller."""


def load_report(text: str, where: str) -> dict[str, Any]:
    """Parse a report's JSON. ``where`` names the file in errors. Raises :class:`ConfigError` for other content."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} isn't JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where} isn't a report: expected a JSON object")
    return data
