"""From pytest's outcome to the kit's: what a test says about the backend."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Sequence
from enum import StrEnum
from typing import NoReturn

import pytest

from outrider_conformance.causes import Diagnosis, Promise, diagnose
from outrider_conformance.levels import level_of
from outrider_conformance.waivers import Waiver

VERDICT = "verdict"
_NOT_APPLICABLE = "not applicable: "


class Verdict(StrEnum):
    """What a test says about the backend."""

    PASSED = "passed"
    FAILED = "failed"
    WAIVED = "waived"
    """Failed, as a waiver that is still valid foretold."""
    NOT_DECLARED = "not declared"
    """The test is about an ability that the backend doesn't declare."""
    NOT_APPLICABLE = "not applicable"
    """The test's situation doesn't exist on this device; the reason says why."""
    NOT_RUN = "not run"
    """Deselected, or the run ended before it."""


def not_applicable(reason: str) -> NoReturn:
    """Leave a test whose situation can't arise on this device. For the suite alone: a plugin can't call it."""
    pytest.skip(_NOT_APPLICABLE + reason)


def mark_of(item: pytest.Item, name: str) -> tuple[object, ...]:
    """The arguments of a test's marker, empty without it."""
    marker = item.get_closest_marker(name)
    return tuple(marker.args) if marker is not None else ()


def judge(
    item: pytest.Item,
    call: pytest.CallInfo[None],
    report: pytest.TestReport,
    waivers: Sequence[Waiver],
    today: datetime.date,
    *,
    alone: str,
) -> None:
    """Set the report's outcome by the kit's rules, and leave what the recorder needs in its user properties.

    ``alone``: the command that runs the test by itself.
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
        elif reason.startswith(_NOT_APPLICABLE):
            verdict, reason = Verdict.NOT_APPLICABLE, reason.removeprefix(_NOT_APPLICABLE)
        else:
            reason = f"skipped ({reason}): a test of what the backend declares may not be skipped"
            verdict = _fail(report, reason)
    elif report.failed:
        verdict = Verdict.FAILED
        reason = str(call.excinfo.value) if call.excinfo is not None else "failed"
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
        reason = f"passed, though {waiver.link} waives it: remove the waiver"
        verdict = _fail(report, reason)
    promise = diagnosis.promise
    report.user_properties.append(
        (
            VERDICT,
            {
                "id": test,
                "level": level_of(item.path),
                "outcome": str(verdict),
                "reason": reason,
                "what": " ".join((getattr(getattr(item, "function", None), "__doc__", "") or "").split()),
                "promise": {"member": promise[0], "words": promise[1]} if promise else None,
                "where": diagnosis.where,
                "causes": list(diagnosis.causes),
                "alone": alone if verdict is Verdict.FAILED else "",
                "needs": list(mark_of(item, "needs")),
                "waiver": waiver.as_dict() if verdict is Verdict.WAIVED and waiver is not None else None,
            },
        )
    )


def test_id(item: pytest.Item) -> str:
    """How reports and waivers name a test: ``test_l1_events::test_…[…]``, wherever the suite is installed."""
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
        said = f"{member} promises:\n" + textwrap.fill(f"“{words}”", 100, initial_indent="  ", subsequent_indent="  ")
    elif checked is not None:
        said = "(what failed is nothing that the backend interface promises)"
    else:
        said = "(this test checks the kit's own rules)"
    return "\n".join(filter(None, [said, diagnosis.text()]))
