"""Write a report as files: JSON, JUnit XML, an HTML page and a badge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from outrider.cli.terminal.files import write_whole
from outrider_conformance.reporting.page import badge, page

FILES = ("report.json", "report.xml", "report.html", "badge.svg")


def publish(report: Mapping[str, Any], directory: Path) -> None:
    """Write the four files of :data:`FILES` to ``directory``, which is created if it doesn't exist."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = (json.dumps(report, indent=1, ensure_ascii=False) + "\n", junit(report), page(report), badge(report))
    for name, text in zip(FILES, texts, strict=True):
        write_whole(directory / name, text)


def junit(report: Mapping[str, Any]) -> str:
    """Return the report as JUnit XML with one test suite per level."""
    root = ElementTree.Element("testsuites", name=f"outrider conformance: {report['backend']['spec']}")
    for level in report["levels"]:
        tests = [test for test in report["tests"] if f"L{test['level']}" == level]
        skipped = ("not declared", "not applicable", "not run", "waived")
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=level,
            tests=str(len(tests)),
            failures=str(sum(test["outcome"] == "failed" for test in tests)),
            errors="0",
            skipped=str(sum(test["outcome"] in skipped for test in tests)),
            time=f"{sum(test['seconds'] for test in tests):.3f}",
        )
        for test in tests:
            module, _, name = test["id"].partition("::")
            case = ElementTree.SubElement(suite, "testcase", classname=module, name=name, time=f"{test['seconds']:.3f}")
            if test["outcome"] == "failed":
                ElementTree.SubElement(case, "failure", message=_line(test["reason"])).text = _printable(test["reason"])
            elif test["outcome"] in skipped:
                ElementTree.SubElement(case, "skipped", message=f"{test['outcome']}: {_line(test['reason'])}")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _line(text: str) -> str:
    return _printable(text).split("\n", 1)[0]


def _printable(text: str) -> str:
    """Return ``text`` with control characters replaced, most of which XML can't represent."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
