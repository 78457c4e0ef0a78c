"""The report of many failures: each error once, the likeliest method first, and nothing above a broken level."""

import io

import pytest

from conformance.test_mutants import command
from outrider.device import DeviceFault
from outrider_conformance.reporting.causes import cause_line, diagnose, grouped, ranked_causes, summary_lines
from outrider_conformance.run import conform


def verdict(test, outcome="failed", reason="", member="", level=1):
    promise = {"member": member, "words": ""} if member else None
    return {"id": test, "outcome": outcome, "reason": reason, "promise": promise, "level": level}


def test_equal_errors_are_one_group():
    """But for numbers in them, and for parameters of one test."""
    tests = [
        verdict("m::a", reason="found 1.5, expected 2"),
        verdict("m::b", reason="found 7, expected 0x1f\nand more"),
        verdict("m::c[x]", reason="after `sort`"),
        verdict("m::c[y]", reason="after `topk`"),
        verdict("m::d", reason="another"),
        verdict("m::e", "passed"),
    ]
    assert [group["tests"] for group in grouped(tests)] == [["m::a", "m::b"], ["m::c[x]", "m::c[y]"], ["m::d"]]


def test_the_verb_that_failed_tests_call_and_passed_ones_do_not_comes_first():
    """Every test records events; those that wait fail. A failure without a wait has a cause of its own."""
    record, wait, copy = "Stream._record", "Stream._wait", "Backend._copy_async"
    tests = [verdict(f"m::{n}", member="Stream.record") for n in range(4)]
    called = {test["id"]: [record, wait] for test in tests}
    tests += [verdict(f"m::ok {n}", "passed") for n in range(6)]
    called |= {f"m::ok {n}": [record] for n in range(6)}
    tests.append(verdict("m::copy", member="Backend.copy_async"))
    called["m::copy"] = [copy]
    causes = ranked_causes(tests, called)
    assert [(cause["verb"], cause["failed"], cause["passed"]) for cause in causes] == [(wait, 4, 0), (copy, 1, 0)]


def test_a_member_that_no_verb_keeps_is_ranked_by_its_own_tests():
    """Every test creates streams. Two find that a declared limit of memory is missing, one a wrong kernel, one a wait."""
    tests = [verdict(f"m::{n}", member="Capabilities.memory_limit") for n in range(2)]
    tests.append(verdict("m::blocks[Stream.wait]", member="Capabilities.asynchronous"))
    tests += [verdict("m::kernel", member="KernelSet.silu_mul"), *(verdict(f"m::ok {n}", "passed") for n in range(6))]
    causes = ranked_causes(tests, {test["id"]: ["Backend._create_stream"] for test in tests})
    assert [(cause["verb"], cause["failed"]) for cause in causes] == [
        ("Capabilities.memory_limit", 2),
        ("KernelSet.silu_mul", 1),
        ("Stream._wait", 1),
    ]
    assert ["checked by" in cause_line(cause) for cause in causes] == [True, True, False]


def test_a_wait_that_raises_an_earlier_failure_is_no_suspect():
    """A kernel failed in the queue, and the wait before the next test said so. The test of the kernel names the kernel."""
    late = verdict("m::late", member="Event.synchronize_within") | {
        "causes": diagnose(None, DeviceFault("a kernel failed")).causes
    }
    causes = ranked_causes([late, verdict("m::kernel", member="KernelSet.silu_mul")], {})
    assert [cause["verb"] for cause in causes] == ["KernelSet.silu_mul"]


def test_the_summary_says_how_to_see_the_other_errors():
    tests = [verdict(f"m::t{letter}", reason=letter) | {"where": "", "causes": (), "alone": ""} for letter in "abcdefg"]
    report = {"causes": [], "tests": tests, "failures": grouped(tests)}
    assert summary_lines(report)[-1] == "2 more errors: --report DIR writes them all"


MISSPELT = """
    def _create_stream(self, name, priority):
        from outrider.device import Stream

        class Half(Stream):
            native = None
            def _recrod(self, event): pass
            def _wait(self, event): pass
            def _synchronize(self): pass
            def _query(self): return True

        return Half(self, name)
"""


@pytest.mark.slow
def test_a_misspelt_verb_is_one_error_and_ends_the_run(sick):
    sick(MISSPELT)
    with io.StringIO() as said:
        report = conform("sick", level="L2", report=None)
        said.write("\n".join(summary_lines(report)))
        lines = said.getvalue().splitlines()
    assert report["causes"][0]["verb"] == "Half._record"
    assert len(report["causes"]) == len(report["failures"]) == 1
    assert len(report["failures"][0]["tests"]) > 2
    assert {name: level["result"] for name, level in report["levels"].items()} == {
        "L0": "failed",
        "L1": "not run",
        "L2": "not run",
    }
    assert len(lines) < 20


@pytest.mark.slow
def test_a_wait_that_does_nothing_is_named_first():
    code, output = command("--only", "a wait that does nothing", module="conformance.mutants.unseen", timeout=600)
    assert code == 0, output
