"""Derive the kit's verdict about the backend from pytest's outcome of a test, and from waivers.

A waiver is a known failure with a reason, a link to an issue and an expiry date.
"""

from __future__ import annotations

import datetime
import textwrap
import tomllib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

import pytest

from outrider.cli.terminal.files import read_utf8
from outrider.device import Capabilities, CaptureError, ConfigError
from outrider_conformance.levels import level_of
from outrider_conformance.promises import Promise
from outrider_conformance.reporting.causes import Diagnosis, diagnose

_KEYS = ("test", "reason", "link", "expires")


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiver:
    """One known failure of a test, accepted until a date."""

    test: str
    """Id of the test as the report prints it; ``*`` and ``?`` match as in file names."""
    reason: str
    link: str
    expires: datetime.date

    def covers(self, test: str) -> bool:
        """Return whether the waiver covers the test with this id."""
        return fnmatchcase(test.replace("[", "("), self.test.replace("[", "("))  # brackets aren't wildcards here

    def expired(self, today: datetime.date) -> bool:
        """Return whether the waiver's last valid day is before ``today``."""
        return today > self.expires

    def as_dict(self) -> dict[str, str]:
        """Return the waiver as plain data for the report."""
        return {"test": self.test, "reason": self.reason, "link": self.link, "expires": self.expires.isoformat()}


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Return the waivers of a TOML file with tables ``[[waiver]]`` of ``test``, ``reason``, ``link`` and ``expires``.

    Raises :class:`ConfigError` for an unreadable file, and for a waiver with missing or unknown keys.
    """
    try:
        data = tomllib.loads(read_utf8(path, "waivers"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"waivers {path}: not TOML: {error}") from error
    unknown = sorted(set(data) - {"waiver"})
    if unknown or not isinstance(data.get("waiver", []), list):
        raise ConfigError(f"waivers {path}: expected tables [[waiver]] and nothing else, found {unknown}")
    return tuple(_waiver(path, number, entry) for number, entry in enumerate(data.get("waiver", []), 1))


def _waiver(path: Path, number: int, entry: dict[str, object]) -> Waiver:
    where = f"waivers {path}, waiver {number}"
    wrong = sorted(set(entry) ^ set(_KEYS))
    if wrong:
        raise ConfigError(f"{where}: {wrong} missing or unknown; a waiver has {', '.join(_KEYS)}")
    expires = entry["expires"]
    if isinstance(expires, str):
        try:
            expires = datetime.date.fromisoformat(expires)
        except ValueError:
            raise ConfigError(f"{where}: expires is {expires!r}; expected a date such as 2027-01-31") from None
    if not isinstance(expires, datetime.date):
        raise ConfigError(f"{where}: expires is {expires!r}; expected a date such as 2027-01-31")
    test, reason, link = (str(entry[key]).strip() for key in ("test", "reason", "link"))
    if not test or not reason:
        raise ConfigError(f"{where}: test and reason must say something")
    if not link.startswith(("https://", "http://")):
        raise ConfigError(f"{where}: link is {link!r}; expected the address of the issue that tracks it")
    return Waiver(test=test, reason=reason, link=link, expires=expires)


VERDICT = "verdict"
NOT_REACHED = "not run: "
"""First words of the reason of a skip that leaves a test out."""
_NOT_APPLICABLE = "not applicable: "
_NO_DIAGNOSIS = Diagnosis(None)


class Verdict(StrEnum):
    """The kit's result of one test of the backend."""

    PASSED = "passed"
    FAILED = "failed"
    WAIVED = "waived"
    """The test failed, and a waiver that hasn't expired covers it."""
    NOT_DECLARED = "not declared"
    """The test needs an ability that the backend doesn't declare."""
    NOT_APPLICABLE = "not applicable"
    """The tested situation can't arise on this device. The reason says why."""
    NOT_RUN = "not run"
    """The test was deselected, or the run ended before it."""


def not_applicable(reason: str) -> NoReturn:
    """End the running test because this device cannot show the case that it tests. Only tests of the suite may call this."""
    pytest.skip(_NOT_APPLICABLE + reason)


@contextmanager
def refusals_left_out(declared: Capabilities) -> Generator[None]:
    """End the running test as not applicable if its capture is refused and the backend declares ``captures_in_part``."""
    try:
        yield
    except CaptureError as error:
        if declared.captures_in_part:
            not_applicable(str(error))
        raise


def mark_of(item: pytest.Item, name: str) -> tuple[object, ...]:
    """Return the arguments of the marker ``name`` of a test, or an empty tuple without the marker."""
    marker = item.get_closest_marker(name)
    return tuple(marker.args) if marker is not None else ()


def set_verdict(
    item: pytest.Item,
    call: pytest.CallInfo[None],
    report: pytest.TestReport,
    waivers: Sequence[Waiver],
    today: datetime.date,
    *,
    alone: str,
) -> None:
    """Set the outcome of pytest's report by the kit's rules, and add the verdict to its user properties.

    ``alone`` is the command that runs the test by itself.
    """
    test = test_id(item)
    waiver = next((waiver for waiver in waivers if waiver.covers(test)), None)
    verdict, reason = Verdict.PASSED, ""
    checked = _promise(item)
    diagnosis = Diagnosis(checked)
    if report.skipped:
        reason = str(call.excinfo.value) if call.excinfo is not None else ""
        if reason.startswith("not declared: "):
            verdict = Verdict.NOT_DECLARED
        elif reason.startswith(NOT_REACHED):
            verdict, reason = Verdict.NOT_RUN, reason.removeprefix(NOT_REACHED)
        elif reason.startswith(_NOT_APPLICABLE):
            verdict, reason = Verdict.NOT_APPLICABLE, reason.removeprefix(_NOT_APPLICABLE)
        else:
            reason = f"skipped ({reason}): a test of declared abilities may not be skipped"
            verdict = _fail(report, reason)
    elif report.failed:
        verdict = Verdict.FAILED
        reason = text_of(call.excinfo.value) if call.excinfo is not None else "failed"
        if call.excinfo is not None:
            diagnosis = diagnose(checked, call.excinfo.value, report.when)
        report.sections.append(("the promise", _explain(diagnosis, checked)))
        report.sections.append(("alone", alone))
        if waiver is not None and not waiver.expired(today):
            report.outcome = "skipped"
            report.wasxfail = f"waived until {waiver.expires}: {waiver.reason} ({waiver.link})"
            verdict = Verdict.WAIVED
        elif waiver is not None:
            reason += f"\n(its waiver expired on {waiver.expires}: {waiver.link})"
    elif report.when == "call" and waiver is not None:
        reason = f"passed although {waiver.link} waives it: remove the waiver"
        verdict = _fail(report, reason)
    what = " ".join((getattr(getattr(item, "function", None), "__doc__", "") or "").split())
    entry = verdict_entry(test, level_of(item.path), verdict, reason, what, diagnosis)
    entry["alone"] = alone if verdict is Verdict.FAILED else ""
    entry["needs"] = list(mark_of(item, "needs"))
    entry["waiver"] = waiver.as_dict() if verdict is Verdict.WAIVED and waiver is not None else None
    report.user_properties.append((VERDICT, entry))


def text_of(error: BaseException) -> str:
    """Return the message of ``error`` with its notes, which name what was running."""
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


def verdict_entry(
    test: str, level: int | None, verdict: Verdict, reason: str, what: str = "", diagnosis: Diagnosis = _NO_DIAGNOSIS
) -> dict[str, Any]:
    """Return a test's entry in the report as plain data, without seconds and figures."""
    promise = diagnosis.promise
    return {
        "id": test,
        "level": level,
        "outcome": str(verdict),
        "reason": reason,
        "what": what,
        "promise": {"member": promise[0], "words": promise[1]} if promise else None,
        "where": diagnosis.where,
        "causes": list(diagnosis.causes),
        "alone": "",
        "needs": [],
        "waiver": None,
    }


def test_id(item: pytest.Item) -> str:
    """Return the id of a test in reports and waivers: ``test_l1_events::test_…[…]``, without the path of the installation."""
    return f"{item.path.stem}::{item.name}"


test_id.__test__ = False  # type: ignore[attr-defined]  # a module that imports it must not run it


def _fail(report: pytest.TestReport, reason: str) -> Verdict:
    report.outcome = "failed"
    report.longrepr = reason
    return Verdict.FAILED


def _promise(item: pytest.Item) -> Promise | None:
    marked = mark_of(item, "promise")
    return (str(marked[0]), str(marked[1])) if marked else None


def _explain(diagnosis: Diagnosis, checked: Promise | None) -> str:
    if diagnosis.promise is not None:
        member, words = diagnosis.promise
        text = f"{member} promises:\n" + textwrap.fill(f"“{words}”", 100, initial_indent="  ", subsequent_indent="  ")
    elif checked is not None:
        text = "(the backend interface promises nothing about this failure)"
    else:
        text = "(this test checks the kit's own rules)"
    return "\n".join(filter(None, [text, diagnosis.text()]))
