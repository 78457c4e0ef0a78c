"""The tables of packages, stages and fences on the architecture page, taken from the tree.

``python docs/_site/tables.py`` rewrites them; ``tests/docs/test_site.py`` compares them with the tree.
"""

from __future__ import annotations

import ast
import inspect
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


EVENT = re.compile(r"run\(stages\.(\w+)|fences\.(\w+)(?:\[\w+\])?\.(wait|signal)\((?:\w+\.)*(\w+)\)")
"""The launch of a stage, or the wait or signal of a fence on a stream, in a line of the step's source."""


def step_lines() -> list[str]:
    """Return the lines that enqueue an iteration in staged mode, in their order, with the called methods in place."""
    from outrider.engine.guided import GuidedDecoding
    from outrider.engine.step import Step

    called = {"self._publish(": Step._publish, "self._guided.mask_draft(": GuidedDecoding.mask_draft}
    lines: list[str] = []
    for method in (Step._upload_inputs, Step._decode, Step._copy_results_to_host):
        for line in inspect.getsource(method).splitlines():
            inner = next((called[call] for call in called if call in line), None)
            lines += [line] if inner is None else inspect.getsource(inner).splitlines()
    return lines


def stage_fences() -> dict[str, tuple[list[str], list[str]]]:
    """Return for each stage the fences that its stream waits for before it, and those that its stream signals after it."""
    from outrider.engine.stages import STAGES, Stages

    by_class = {stage.__name__: stage for stage in STAGES}
    attributes = re.findall(r"self\.(\w+) = (\w+)\(parts\)", inspect.getsource(Stages))
    stages = {name: by_class[kind] for name, kind in attributes}
    found: dict[str, tuple[list[str], list[str]]] = {stage.name: ([], []) for stage in STAGES}
    waits: dict[str, list[str]] = {}
    last: dict[str, str] = {}
    for match in filter(None, map(EVENT.search, step_lines())):
        launched, fence, verb, stream = match.groups()
        if launched:
            stage = stages[launched]
            found[stage.name][0].extend(waits.pop(stage.on, []))
            last[stage.on] = stage.name
        elif verb == "wait":
            waits.setdefault(stream, []).append(fence)
        elif stream in last:
            found[last[stream]][1].append(fence)
    return found


def stage_table() -> str:
    """Return what each stage of an iteration reads and writes, and the fences around it, as Markdown."""
    from outrider.engine.stages import STAGES
    from outrider.engine.state.buffers import GROUPS

    def listed(names: tuple[str, ...]) -> str:
        code = (f"`{name}`" if "." in name else f"`{name}.*`" if name in GROUPS else name for name in names)
        return ", ".join(code) or "the plan in the attention metadata"

    fences = stage_fences()
    lines = ["| stage | stream | waits for | reads | writes | then signals |", "|---|---|---|---|---|---|"]
    for stage in STAGES:
        before, after = (", ".join(f"`{name}`" for name in names) for names in fences[stage.name])
        lines.append(f"| {stage.name} | {stage.on} | {before} | {listed(stage.reads)} | {listed(stage.writes)} | {after} |")
    return "\n".join(lines)


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
