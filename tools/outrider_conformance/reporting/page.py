"""Write a report as files: JSON, JUnit XML, one self-contained HTML page and a badge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from outrider.cli.terminal.files import write_whole
from outrider_conformance.reporting.causes import cause_line
from outrider_conformance.run import passed
from outrider_trace.picture import html_page, prose

_COLOURS = {
    "passed": "#1a7f37",
    "passed with waivers": "#9a6700",
    "failed": "#cf222e",
    "not run": "#6e7781",
    "waived": "#9a6700",
    "not declared": "#6e7781",
    "not applicable": "#6e7781",
}
_STYLE = """
body { max-width: 64rem; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .75rem 1rem; margin: .5rem 0;
  white-space: pre-wrap; }
.tag { display: inline-block; color: #fff; border-radius: 1rem; padding: .05rem .65rem; font-size: .8rem; font-weight: 600;
  white-space: nowrap; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .75rem 1rem; border-top: 4px solid var(--c); }
.card b { font-size: 1.25rem; } .card p { margin: .15rem 0 0; font-size: .85rem; }
.card .tag { white-space: normal; } .date { white-space: nowrap; }
details { border-bottom: 1px solid var(--line); padding: .4rem 0; } td details { border: 0; padding: 0; }
summary { cursor: pointer; }
summary .tag { margin-right: .5rem; } details p { margin: .4rem 0 .4rem 1rem; } blockquote { margin: .4rem 0 .4rem 1rem;
  padding-left: .75rem; border-left: 3px solid var(--line); color: var(--dim); }
.lead { display: flex; align-items: center; gap: 1rem; margin: 1rem 0 0; } .lead p { margin: 0; }
.reached { font-size: 1.6rem; font-weight: 700; color: #fff; background: var(--c); border-radius: 10px; padding: .35rem .9rem;
  white-space: nowrap; }
.abilities { display: flex; flex-wrap: wrap; gap: .5rem; list-style: none; padding: 0; margin: .75rem 0; }
.abilities li { border: 1px solid var(--line); border-radius: 1rem; padding: .15rem .8rem; font-size: .9rem; }
.abilities li.yes { border-color: #1a7f37; } .abilities li.yes::before { content: "✓ "; color: #1a7f37;
  font-weight: 700; }
.abilities li.no { color: var(--dim); background: var(--soft); }
"""


def page(report: Mapping[str, Any]) -> str:
    """Return the HTML page of a report."""
    backend, tier = report["backend"], report["tier"]
    reached, asked = report["reached"], report["level"]
    lead = (
        f"All requested levels are passed: L0 to {asked}."
        if reached == asked
        else f"{f'Passed up to {reached}' if reached else 'No level is passed'}; the levels up to {asked} were requested."
    )
    colour = _COLOURS["passed" if passed(report) else "failed"]
    # The name of a simulated device says that it is simulated.
    known = tier["device"].startswith(tier["kind"])
    device = tier["device"] if known else f"{tier['kind']}: {tier['device']}" if tier["device"] else tier["kind"]
    declared = report["capabilities"] or {}
    abilities = "".join(_chip(key, value) for key, value in declared.items() if isinstance(value, bool))
    others = "".join(_row(key, _ability(value)) for key, value in declared.items() if not isinstance(value, bool))
    waived = [test for test in report["tests"] if test["outcome"] == "waived"]
    body = f"""<div class="lead"><span class="reached" style="--c:{colour}">{escape(reached or "none")}</span>
<p>{escape(lead)}<br><span class="dim">{escape(backend["spec"])} · {escape(device)} ·
<span class="date">{escape(tier["date"])}</span></span></p></div>
<div class="cards">{"".join(map(_card, report["levels"].items()))}</div>
{_problems(report)}
<h2>What ran, and how to run it again</h2>
<pre>{escape(report["command"])}</pre>
<table>{"".join(_row(key, value) for key, value in _facts(report))}</table>
<h2>What the backend declares</h2>
<p class="dim">The levels test these abilities. An ability that isn't declared isn't claimed, and one that works
without being declared is a failure.</p>
<ul class="abilities">{abilities}</ul>
<table>{others}</table>
{_kernels(report)}
{_figures(report)}
{_waivers(waived)}
<h2>Every test</h2>
<p class="dim">{len(report["tests"])} tests in {report["seconds"]:g} s. Open one to see the promise that it checks.</p>
{"".join(map(_test, report["tests"]))}
<h2>Check this report</h2>
<p>Its data is <code>report.json</code>. <code>outrider conform --verify report.json</code> computes the seal again and
checks that the results follow from the tests. The seal shows that the report is unchanged; it doesn't say who made it.</p>
<pre>{escape(report["seal"])}</pre>"""
    return html_page(f"Conformance of {backend['name']}", body, _STYLE)


def badge(report: Mapping[str, Any]) -> str:
    """Return a small SVG with the level that was reached, coloured by the result."""
    reached = report["reached"]
    results = {level["result"] for level in report["levels"].values()}
    text = f"{reached} {report['tier']['kind']}" if reached else "not passed"
    if "passed with waivers" in results and reached:
        text += ", waivers"
    colour = _COLOURS["failed"] if "failed" in results or not reached else "#0969da"
    left, right = 118, 14 + 7 * len(text)
    label = f"outrider conformance: {text}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>"
        f'<clipPath id="r"><rect width="{left + right}" height="20" rx="3"/></clipPath><g clip-path="url(#r)">'
        f'<rect width="{left}" height="20" fill="#444c56"/><rect x="{left}" width="{right}" height="20" fill="{colour}"/></g>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2}" y="14">outrider conformance</text><text x="{left + right / 2}" y="14">{escape(text)}</text>'
        "</g></svg>\n"
    )


def _card(entry: tuple[str, Mapping[str, str]]) -> str:
    name, level = entry
    return (
        f'<div class="card" style="--c:{_COLOURS[level["result"]]}"><b>{name}</b> {_tag(level["result"])}'
        f'<p>{escape(level["what"])}</p><p class="dim">{escape(level["counts"])}</p></div>'
    )


def _problems(report: Mapping[str, Any]) -> str:
    failed = {test["id"]: test for test in report["tests"] if test["outcome"] == "failed"}
    if not failed:
        return ""
    causes = "".join(f"<li>{prose(cause_line(cause))}</li>" for cause in report["causes"])
    groups = "".join(_group([failed[test] for test in group["tests"]]) for group in report["failures"])
    look = f"<h3>Where to look first</h3><ol>{causes}</ol>" if causes else ""
    return f"<h2>Promises that were broken ({len(failed)})</h2>{look}{groups}"


def _group(tests: list[Mapping[str, Any]]) -> str:
    """Return the HTML of a group of equal errors: the first test, and the names of the others."""
    others = "".join(f"<div><code>{escape(test['id'])}</code></div>" for test in tests[1:])
    more = f"<details><summary>the same error in {len(tests) - 1} more</summary>{others}</details>" if others else ""
    return _test(tests[0], opened=True) + more


def _test(test: Mapping[str, Any], *, opened: bool = False) -> str:
    promise = test["promise"]
    quote = f"<blockquote><code>{escape(promise['member'])}</code>: {prose(promise['words'])}</blockquote>" if promise else ""
    reason = f"<pre>{escape(test['reason'])}</pre>" if test["reason"] else ""
    said = [("where", test.get("where", "")), *(("likely cause", cause) for cause in test.get("causes", ()))]
    hints = "".join(f"<p><b>{name}</b>: {prose(text)}</p>" for name, text in said if text)
    hints += f"<p><b>alone</b>: <code>{escape(test['alone'])}</code></p>" if test.get("alone") else ""
    return (
        f"<details{' open' if opened else ''}><summary>{_tag(test['outcome'])}<code>{escape(test['id'])}</code>"
        f' <span class="dim">{test["seconds"]:.2f} s</span></summary>'
        f"<p>{prose(test['what'])}</p>{quote}{reason}{hints}</details>"
    )


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    backend, host = report["backend"], report["host"]
    contract = f"{host['interface_version']} of {host.get('interface_date', 'an unknown day')}"
    versions = {**(report["versions"] or {})}
    return [
        ("backend", f"{backend['spec']} of {backend.get('distribution', 'an unknown distribution')}"),
        ("device", str(report["device"])),
        ("kernels", str(report["kernels"])),
        *((key, str(value)) for key, value in versions.items() if key != "device"),
        (
            "kit",
            f"{report['kit']['version']}, interface version {contract}",
        ),
        ("python", f"{host['python']} on {host['system']}"),
        ("threads of torch", str(host.get("threads", "not recorded"))),
        ("started", report["started"]),
    ]


def _figures(report: Mapping[str, Any]) -> str:
    if not report["figures"]:
        return ""
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{value:,.4g}</td><td>{escape(unit)}</td></tr>'
        for name, value, unit in report["figures"]
    )
    return (
        f"<h2>Figures</h2><p class='dim'>Measured in this run. No figure passes or fails a backend.</p><table>{rows}</table>"
    )


def _kernels(report: Mapping[str, Any]) -> str:
    """Return the HTML table of kernel calls, with one row for each kernel, kernel set and use."""
    found: dict[tuple[str, str, str], dict[bool, Mapping[str, int]]] = {}
    for row in report.get("kernel_calls", ()):
        found.setdefault((row["kernel"], row["kernels"], row["use"]), {})[row["own"]] = row["shapes"]
    if not found:
        return ""
    rows = "".join(
        f"<tr><td>{_shapes(kernel, ', for '.join(filter(None, (kernels, use))), answers)}</td>"
        f'<td class="number">{sum(answers.get(True, {}).values())}</td>'
        f'<td class="number">{sum(answers.get(False, {}).values())}</td></tr>'
        for (kernel, kernels, use), answers in sorted(found.items())
    )
    return (
        "<h2>Kernels that answered</h2><p class='dim'>Calls of each kernel that the kernel set computed itself, and calls "
        "that it left to the method that it overrides, or doesn't override (the references). A call in a graph is counted "
        "when it's captured. Open a kernel to see the shapes of its operands.</p>"
        f"<table><tr><th>kernel<th class='number'>own<th class='number'>left</tr>{rows}</table>"
    )


def _shapes(kernel: str, where: str, answers: Mapping[bool, Mapping[str, int]]) -> str:
    """Return the HTML of a kernel's name, which opens the list of its operands' shapes."""
    lines = [
        f"{'own' if own else 'left'} {count}: {shape}"
        for own in (True, False)
        for shape, count in answers.get(own, {}).items()
    ]
    listed = "".join(f"<div><code>{escape(line)}</code></div>" for line in lines)
    return f"<details><summary><code>{escape(kernel)}</code> of {escape(where)}</summary>{listed}</details>"


def _waivers(tests: list[Mapping[str, Any]]) -> str:
    if not tests:
        return ""
    rows = "".join(
        f"<tr><td><code>{escape(test['id'])}</code><br>{prose(test['waiver']['reason'])}</td>"
        f'<td><a href="{escape(test["waiver"]["link"])}">until {escape(test["waiver"]["expires"])}</a></td></tr>'
        for test in tests
    )
    return f"<h2>Waivers</h2><table><tr><th>test and reason<th>tracked</tr>{rows}</table>"


def _row(key: str, value: str) -> str:
    return f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>"


def _chip(key: str, value: bool) -> str:
    words = escape(key.replace("_", " "))
    return f'<li class="{"yes" if value else "no"}" title="{"declared" if value else "not declared"}">{words}</li>'


def _ability(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _tag(outcome: str) -> str:
    return f'<span class="tag" style="background:{_COLOURS[outcome]}">{escape(outcome)}</span>'


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
