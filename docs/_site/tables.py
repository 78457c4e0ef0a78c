"""The tables of packages, stages and fences on the architecture page, taken from the tree.

``python docs/_site/tables.py`` rewrites them; ``tests/docs/test_site.py`` compares them with the tree.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- packages: begin -->", "<!-- packages: end -->"
STAGES_BEGIN, STAGES_END = "<!-- stages: begin -->", "<!-- stages: end -->"
FENCES_BEGIN, FENCES_END = "<!-- fences: begin -->", "<!-- fences: end -->"
CORE = "core/outrider"
TOLERANCE = 0.1
"""Fraction by which a count on the page may differ from the tree before the test fails."""


def package_folders(root: Path) -> list[Path]:
    """Return the folder of each package that has a row: parts of the core, and each installed package elsewhere."""
    core = [path.parent for path in (root / CORE).glob("*/__init__.py")]
    engine = [path.parent for path in (root / CORE / "engine").glob("*/__init__.py")]
    others = [
        path.parent
        for pattern in ("kernels/*", "tools/*", "backends/*/*")
        for path in root.glob(f"{pattern}/__init__.py")
        if path.parent.name.startswith("outrider_")
    ]
    return sorted(core + engine) + sorted(others)


def purpose(package: Path) -> str:
    """Return the first sentence of the package's docstring."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", sentence).replace("``", "`").replace("|", "\\|")


def count_lines(package: Path, nested: list[Path]) -> int:
    """Return the lines of the package's Python files, without those of ``nested`` packages that have rows of their own."""
    inner = [path for path in nested if path != package and path.is_relative_to(package)]
    files = [path for path in package.rglob("*.py") if not any(path.is_relative_to(other) for other in inner)]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def rows(root: Path = ROOT) -> dict[str, tuple[str, int]]:
    """Return purpose and lines by folder, relative to ``root``."""
    folders = package_folders(root)
    return {folder.relative_to(root).as_posix(): (purpose(folder), count_lines(folder, folders)) for folder in folders}


def rounded(count: int) -> int:
    """Return ``count`` with two significant digits, so that a small change leaves the page alone."""
    digits = max(len(str(count)) - 2, 0)
    return round(count, -digits)


def table(root: Path = ROOT) -> str:
    """Return the table as Markdown."""
    lines = ["| package | purpose | lines |", "|---|---|---|"]
    lines += [f"| `{name}` | {text} | {rounded(count):,} |" for name, (text, count) in rows(root).items()]
    return "\n".join(lines)


def differences(page: str, root: Path = ROOT) -> list[str]:
    """Return one line for each row of ``page`` that the tree contradicts: missing, unknown, other purpose, other size."""
    section = page[page.index(BEGIN) : page.index(END)]
    found = {name: (text, int(lines.replace(",", ""))) for name, text, lines in
             re.findall(r"^\| `([\w/]+)` \| (.*) \| ([\d,]+) \|$", section, re.MULTILINE)}  # fmt: skip
    wanted = rows(root)
    complaints = [f"{name} has no row" for name in wanted.keys() - found.keys()]
    complaints += [f"{name} does not exist" for name in found.keys() - wanted.keys()]
    for name in wanted.keys() & found.keys():
        (text, count), (written, lines) = wanted[name], found[name]
        if text != written:
            complaints.append(f"{name}: the page says {written!r}, the docstring {text!r}")
        if abs(lines - count) > TOLERANCE * count:
            complaints.append(f"{name}: the page says {lines:,} lines, the tree has {count:,}")
    return sorted(complaints)


def fence_table() -> str:
    """Return the engine's table of fences as Markdown."""
    from outrider.engine.fences import FENCES

    lines = ["| fence | from | to | prevents | protects |", "|---|---|---|---|---|"]
    lines += [f"| `{f.name}` | {f.producer} | {', '.join(f.consumers)} | {f.hazard} | {f.resources} |" for f in FENCES]
    return "\n".join(lines)


def stage_table() -> str:
    """Return what each stage of an iteration reads and writes, as Markdown."""
    from outrider.engine.stages import STAGES
    from outrider.engine.state.buffers import GROUPS

    def listed(names: tuple[str, ...]) -> str:
        code = (f"`{name}`" if "." in name else f"`{name}.*`" if name in GROUPS else name for name in names)
        return ", ".join(code) or "the plan in the attention metadata"

    lines = ["| stage | stream | reads | writes |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {s.name} | {s.on} | {listed(s.reads)} | {listed(s.writes)} |" for s in STAGES])


def replaced(page: str, begin: str, end: str, content: str) -> str:
    """Return ``page`` with ``content`` between the two markers."""
    head, tail = page.index(begin) + len(begin), page.index(end)
    return f"{page[:head]}\n{content}\n{page[tail:]}"


def main() -> None:
    """Rewrite the tables on the page."""
    page = replaced(PAGE.read_text(encoding="utf-8"), BEGIN, END, table())
    page = replaced(page, STAGES_BEGIN, STAGES_END, stage_table())
    PAGE.write_text(replaced(page, FENCES_BEGIN, FENCES_END, fence_table()), encoding="utf-8")


if __name__ == "__main__":
    main()
