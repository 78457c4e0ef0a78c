"""Hooks of the site's build: a complete navigation, a complete index of records, the layers, and a drawing of the fences."""

from __future__ import annotations

import logging
import re
import tomllib
from html import escape
from pathlib import Path
from typing import Any

FENCES = "<!-- every fence, drawn from the table -->"
PARTS = re.compile(r"```mermaid\n.*?\n```", re.DOTALL)
ITERATION = "<!-- one iteration as a drawing -->"
LINK = re.compile(r"\[([^\]\n]*)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.outrider")
LANES = ("host", "schedule", "forward", "plan", "copy")
"""The order of columns; a stream of the table that isn't here gets one behind them."""


def on_config(config: Any) -> Any:
    """Spell out the folders of the navigation, and find a place for pages that it does not name."""
    root = Path(config["docs_dir"])
    pages = {path.relative_to(root).as_posix() for path in root.rglob("*.md") if "_site" not in path.parts}
    named: set[str] = set()
    _visit(config["nav"], named.add)
    absent = {name for name in named if name.endswith("?") and name.rstrip("?") not in pages}
    named = {name.rstrip("?") for name in named}
    folders = {name for name in named if name.endswith("/")}
    hidden = config["not_in_nav"]
    rest = sorted(page for page in pages - named if hidden is None or not hidden.match_file(page))
    for complaint in unlisted(root / "evidence"):
        log.warning(complaint)

    def spell_out(entries: list[Any]) -> list[Any]:
        found: list[Any] = []
        for entry in entries:
            if isinstance(entry, dict):
                for title, value in entry.items():
                    if isinstance(value, list):
                        found.append({title: spell_out(value)})
                    elif value not in absent:
                        found.append({title: value.rstrip("?")})
            elif entry in folders:
                found += [page for page in rest if page.startswith(entry)]
            else:
                found.append(entry)
        return found

    config["nav"] = spell_out(config["nav"])
    homeless = [page for page in rest if not any(page.startswith(folder) for folder in folders)]
    for entry in config["nav"]:
        if "Guides" in entry:
            entry["Guides"] += homeless
    return config


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """The index of records may be styled apart: its cells hold dates and commands."""
    return f'<div class="records">{html}</div>' if page.file.src_uri == "evidence/README.md" else html


def unlisted(folder: Path) -> list[str]:
    """Return the faults of the index of records in ``folder``: a text for each record whose line is missing or wrong.

    A record is a page or a table whose name begins with its date. For a page the line that is missing is made from what
    stands at its head.
    """
    index = folder / "README.md"
    rows = [line for line in index.read_text(encoding="utf-8").splitlines() if line.startswith("|")] if index.exists() else []
    found = []
    for path in sorted(folder.glob("2*")):
        row = next((row for row in rows if f"]({path.name})" in row), None)
        if row is None:
            found.append(f"evidence/README.md has no line for {path.name}. It may begin so: {line_of(path)}")
        elif not row.startswith(f"| {path.name[:10]} |"):
            found.append(f"evidence/README.md gives {path.name} another date than its name: {row}")
    return found


def line_of(path: Path) -> str:
    """A line of the index for the record ``path``, from its title and its first command."""
    text = path.read_text(encoding="utf-8")
    title = re.search(r"^# (?:[\d-]+: )?(.+)$", text, re.MULTILINE) if path.suffix == ".md" else None
    command = re.search(r"\b(?:outrider [a-z-]+(?: [a-z]+)?|pytest [^\s`]+|python [^\s`]+(?: [\w.]+)?)", text)
    named = f"`{command[0]}`" if command and path.suffix == ".md" else "COMMAND"
    return f"| {path.name[:10]} | [{title[1] if title else path.stem}]({path.name}) | {named} | DEVICE | WHAT IT SHOWS |"


def _visit(entries: Any, see: Any) -> None:
    if isinstance(entries, str):
        see(entries)
    elif isinstance(entries, dict):
        for value in entries.values():
            _visit(value, see)
    else:
        for entry in entries:
            _visit(entry, see)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Put the drawing where its marker stands; files of the repository that aren't pages are named, not linked."""
    root = Path(config["docs_dir"]).resolve()
    here = (root / page.file.src_uri).parent

    def name(match: re.Match[str]) -> str:
        target = (here / match[2]).resolve()
        if target.is_relative_to(root) or not target.is_relative_to(root.parent):
            return match[0]
        if not target.exists():
            log.warning("%s links to %s, which isn't there", page.file.src_uri, match[2])
        return match[1]

    if page.file.src_uri == "evidence/README.md":
        page.meta["hide"] = ["toc"]
    markdown = LINK.sub(name, markdown)
    markdown = markdown.replace(ITERATION, iteration())
    if page.file.src_uri == "architecture.md":
        # Where the page is read as a file, the same is drawn by mermaid, which the site would fetch from elsewhere.
        markdown = PARTS.sub(lambda _: layers(root.parent), markdown, count=1)
    return markdown.replace(FENCES, fences()) if FENCES in markdown else markdown


def fences() -> str:
    """The table of the engine as a drawing."""
    from outrider.engine import fences as engine

    return drawing([(s.name, s.producer, s.consumers, str(s.hazard)) for s in engine.FENCES])


def layers(root: Path) -> str:
    """Draw the packages by their import contracts: tools on top, the core's layers, plugins at the backend interface."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]

    def rows_of(name: str) -> list[list[str]]:
        (contract,) = (c for c in contracts if c["id"] == name)
        return [[part.strip(" ()") for part in layer.split("|")] for layer in contract["layers"]]

    core = [[part for part in row if not part.startswith("_") and part != "bundled"] for row in rows_of("layers")]
    core = [row for row in core if row]
    tools = [part.removeprefix("outrider_") for row in rows_of("tools")[:-1] for part in row]
    rooms = sorted(path.name for path in (root / "core/outrider/engine").iterdir() if (path / "__init__.py").exists())
    said = {"engine": f"engine: {', '.join(rooms)}", "device": "device: the backend interface"}
    width, height, step = 760, 44, 62
    out = [
        f'<svg class="layers" viewBox="0 0 {width + 240} {step * (len(core) + 1) + 8}" role="img" '
        'aria-label="Tools, the layers of the core, and the plugins" xmlns="http://www.w3.org/2000/svg">'
    ]

    def box(x: float, y: float, wide: float, text: str, kind: str = "") -> None:
        out.append(f'<rect class="part {kind}" x="{x}" y="{y}" width="{wide}" height="{height}" rx="6"/>')
        out.append(f'<text class="{kind}" x="{x + wide / 2}" y="{y + height / 2 + 5}">{text}</text>')

    for index, row in enumerate([tools, *core]):
        each = (width - 12 * (len(row) - 1)) / len(row)
        for place, part in enumerate(row):
            kind = "tool" if index == 0 else "interface" if part == "device" else ""
            box(place * (each + 12), 4 + step * index, each, said.get(part, part), kind)
    device_y = 4 + step * (1 + next(index for index, row in enumerate(core) if "device" in row))
    for place, plugin in enumerate(("kernels", "backends")):
        box(width + 60, device_y + step * (place - 1), 170, plugin, "plugin")
        middle = device_y + step * (place - 1) + height / 2
        out.append(
            f'<path class="import" d="M{width + 60} {middle}C{width + 30} {middle} {width + 30} {device_y + 22} '
            f'{width + 8} {device_y + 22}"/>'
        )
    out.append(
        f'<path class="import" d="M{width + 18} {device_y + 16}L{width + 6} {device_y + 22}L{width + 18} {device_y + 28}"/>'
    )
    out.append("</svg>")
    caption = (
        "The top row are tools: each may import the core and the tools right of it, except that bench and proof don't know "
        "each other. Below are the layers of the core: a part imports from the rows below it, never from its own row or from "
        "above. Of the core, backends and kernels import the backend interface alone."
    )
    return f'<figure class="wide">{"".join(out)}<figcaption>{caption}</figcaption></figure>'


def drawing(rows: list[tuple[str, str, tuple[str, ...], str]]) -> str:
    """One line a fence, in the order of the table; a column for each stream, and for the host."""
    named = [end for _, producer, consumers, _ in rows for end in (producer, *consumers)]
    lanes = (*LANES, *sorted({end for end in named if " of " not in end} - set(LANES)))
    step, top, left = 46, 64, 90
    width = 160
    x = {lane: left + index * width for index, lane in enumerate(lanes)}
    right = x[lanes[-1]] + 70
    height = top + step * len(rows) + 24
    out = [
        f'<svg class="fences" viewBox="0 0 {right + 20} {height}" role="img" '
        'aria-label="The fences between the streams of an iteration" xmlns="http://www.w3.org/2000/svg">',
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L10 5L0 10z"/></marker></defs>',
    ]
    for lane, at in x.items():
        out.append(f'<line class="lane" x1="{at}" y1="44" x2="{at}" y2="{height - 10}"/>')
        out.append(f'<rect class="head" x="{at - 48}" y="14" width="96" height="30" rx="6"/>')
        out.append(f'<text class="lanename" x="{at}" y="34">{lane}</text>')
    for index, (name, producer, consumers, hazard) in enumerate(rows):
        y = top + step * index + 26
        kind = "war" if hazard.startswith("write") else "raw"
        start = x[producer]
        out.append(f"<g><title>{escape(name)}: {escape(hazard)}</title>")
        ends = []
        for consumer in consumers:
            end = x.get(consumer)
            if end is None or end == start:  # another engine's stream of the same name
                out.append(f'<path class="{kind}" d="M{start} {y}h44" marker-end="url(#tip)"/>')
                out.append(f'<text class="other" x="{start + 50}" y="{y + 4}">another engine</text>')
            else:
                out.append(f'<line class="{kind}" x1="{start}" y1="{y}" x2="{end}" y2="{y}" marker-end="url(#tip)"/>')
                ends.append(end)
        nearest = min(ends, key=lambda end: abs(end - start)) if ends else start + width
        middle = (start + (start + width if nearest > start else start - width)) / 2
        out.append(f'<circle class="{kind}" cx="{start}" cy="{y}" r="4"/>')
        out.append(f'<text class="name" x="{middle}" y="{y - 8}">{escape(name.replace("_", " "))}</text></g>')
    out.append("</svg>")
    caption = (
        "Time runs downward within an iteration. A dot is where the fence opens, an arrow ends where somebody waits. Solid: "
        "something is read that was written before; dashed: a buffer is written again that was read before."
    )
    return f'<figure class="wide">{"".join(out)}<figcaption>{caption}</figcaption></figure>'


def iteration() -> str:
    """Two iterations that overlap, each with its streams; a sketch, without a scale."""
    lanes = ("host", "schedule", "forward", "plan", "copy")
    left, width, height, top = 86, 560, 44, 12
    y = {lane: top + index * height for index, lane in enumerate(lanes)}
    # lane, from, to, text, whether it belongs to the next iteration
    bars = (
        ("host", 0, 66, "launch", False),
        ("schedule", 46, 112, "inputs", False),
        ("forward", 124, 214, "draft", False),
        ("plan", 136, 206, "lengths", False),
        ("plan", 226, 260, "tree", False),
        ("forward", 272, 360, "verify", False),
        ("plan", 372, 424, "extend", False),
        ("forward", 436, 500, "extend", False),
        ("copy", 372, 440, "results", False),
        ("host", 214, 280, "launch", True),
        ("schedule", 372, 438, "inputs", True),
        ("forward", 512, 560, "draft", True),
        ("host", 454, 510, "read", False),
        ("plan", 520, 560, "", True),
    )
    # from lane at, to lane at
    edges = (
        ("schedule", 112, "forward", 124),
        ("forward", 214, "plan", 226),
        ("plan", 260, "forward", 272),
        ("forward", 360, "plan", 372),
        ("forward", 360, "copy", 372),
        ("forward", 360, "schedule", 372),
        ("plan", 424, "forward", 436),
        ("copy", 440, "host", 454),
        ("schedule", 438, "forward", 512),
    )
    out = [
        f'<svg class="iteration" viewBox="0 0 {left + width + 6} {top + height * len(lanes) + 6}" role="img" '
        'aria-label="Two overlapping iterations on four streams and the host" xmlns="http://www.w3.org/2000/svg">',
        '<defs><marker id="end" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
        '<path class="tip" d="M0 0L10 5L0 10z"/></marker></defs>',
    ]
    for lane in lanes:
        out.append(f'<text class="lanename" x="{left - 12}" y="{y[lane] + 19}">{lane}</text>')
        out.append(f'<line class="lane" x1="{left}" y1="{y[lane] + 14}" x2="{left + width}" y2="{y[lane] + 14}"/>')
    for source, start, target, end in edges:
        down = y[target] > y[source]
        y1, y2 = (y[source] + 28, y[target]) if down else (y[source], y[target] + 28)
        x1, x2 = left + start - 7, left + end + 7
        curve = f"M{x1} {y1}C{x1} {(y1 + y2) / 2} {x2} {(y1 + y2) / 2} {x2} {y2}"
        out.append(f'<path class="fence" d="{curve}" marker-end="url(#end)"/>')
    for lane, start, end, text, later in bars:
        kind = " next" if later else ""
        out.append(f'<rect class="bar{kind}" x="{left + start}" y="{y[lane]}" width="{end - start}" height="28" rx="5"/>')
        out.append(f'<text class="bartext{kind}" x="{left + (start + end) / 2}" y="{y[lane] + 18.5}">{text}</text>')
    out.append("</svg>")
    caption = "One iteration, and pale the next one, launched before the results of the first are read. Arrows are fences."
    return f"<figure>{''.join(out)}<figcaption>{caption}</figcaption></figure>"
