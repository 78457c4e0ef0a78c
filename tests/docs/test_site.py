"""The site builds without a warning, misses no page, and a broken link would stop it."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from outrider.engine.fences import FENCES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_site" not in path.parts)

pytest.importorskip("material", reason="not run: set up again, mkdocs-material is in the group docs")
pytest.importorskip("mkdocstrings", reason="not run: set up again, mkdocstrings is in the group docs")


def build(root, target):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site") / "site"
    done = build(ROOT, target)
    assert done.returncode == 0, done.stderr
    assert not re.search("WARNING|ERROR", done.stderr), done.stderr
    return target


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.targets, self.ids, self.fetched = set(), set(), set()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "a" and found.get("href"):
            self.targets.add(found["href"])
        if tag in ("img", "script") and found.get("src"):
            self.fetched.add(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon"):
            self.fetched.add(found["href"])
        self.ids.update(value for key, value in attrs if key == "id" and value)


@pytest.fixture(scope="module")
def parsed(site):
    pages = {}
    for path in site.rglob("*.html"):
        if path.name != "404.html":
            pages[path] = Links()
            pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


@pytest.mark.slow
def test_every_page_is_there_and_can_be_reached_from_the_navigation(site, parsed):
    reachable = {(site / "index.html")}
    waiting = list(reachable)
    while waiting:
        page = waiting.pop()
        for target in parsed[page].targets:
            path = (page.parent / unquote(target.partition("#")[0])).resolve()
            if path in parsed and path not in reachable:
                reachable.add(path)
                waiting.append(path)
    for page in PAGES:
        html = (site / page.relative_to(ROOT / "docs")).with_suffix(".html")
        html = html.with_name("index.html") if html.name == "README.html" else html
        assert html in reachable, page.name


@pytest.mark.slow
def test_links_and_anchors_lead_somewhere(site, parsed):
    lost = []
    for page, links in parsed.items():
        for target in links.targets:
            name, _, anchor = target.partition("#")
            if "://" in name or name.startswith("mailto:"):
                continue
            path = (page.parent / unquote(name)).resolve() if name else page
            if path.is_dir():
                path = path / "index.html"
            if path not in parsed:
                found = path.is_file() and not anchor  # a table, a picture
            else:
                found = not anchor or unquote(anchor) in parsed[path].ids or anchor.startswith("__")
            if not found:
                lost.append(f"{page.name}: {target}")
    assert lost == []


@pytest.mark.slow
def test_a_page_fetches_nothing_from_elsewhere(parsed):
    assert {src for links in parsed.values() for src in links.fetched if "//" in src} == set()


@pytest.mark.slow
def test_every_fence_of_the_table_is_drawn(site):
    text = (site / "architecture.html").read_text(encoding="utf-8")
    drawing = text[text.index('<svg class="fences"') : text.index("</svg>", text.index('<svg class="fences"'))]
    for fence in FENCES:
        assert f">{fence.name.replace('_', ' ')}</text>" in drawing, fence.name
        assert f"<code>{fence.name}</code>" in text
    assert drawing.count("<circle") == len(FENCES)


@pytest.mark.slow
def test_the_reference_holds_the_contract(site):
    stream = (site / "reference" / "stream.html").read_text(encoding="utf-8")
    assert "Complete a new generation of" in stream
    assert ":class:" not in stream, "roles of docstrings aren't for readers"
    errors = (site / "reference" / "errors.html").read_text(encoding="utf-8")
    assert "OutOfDeviceMemory" in errors


def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "_site" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_index_of_records_misses_none(tmp_path):
    unlisted = hooks().unlisted
    assert unlisted(ROOT / "docs" / "evidence") == []
    (tmp_path / "2026-01-02-chip.md").write_text("# 2026-01-02: on a chip\n\n    outrider bench decode --backend chip\n")
    (missing,) = unlisted(tmp_path)
    line = "| 2026-01-02 | [on a chip](2026-01-02-chip.md) | `outrider bench decode` |"
    assert line in missing
    (tmp_path / "README.md").write_text(line)
    assert unlisted(tmp_path) == []
    (tmp_path / "README.md").write_text(line.replace("01-02 |", "01-03 |"))
    (wrong,) = unlisted(tmp_path)
    assert "another date" in wrong


def uncited(records, pages):
    """Return the names of the records that no text of ``pages`` mentions."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return [record.name for record in records if f"evidence/{record.name}" not in text]


def test_records_with_a_page_are_few_and_each_is_cited(tmp_path):
    records = sorted((ROOT / "docs" / "evidence").glob("2*.md"))
    assert len(records) <= 12
    bundled = ROOT / "core" / "outrider" / "bundled" / "README.md"
    pages = [page for page in PAGES if page.parent.name != "evidence"] + [ROOT / "README.md", bundled]
    assert uncited(records, pages) == []
    (tmp_path / "page.md").write_text("nothing", encoding="utf-8")
    assert uncited(records[:1], [tmp_path / "page.md"]) == [records[0].name]


def test_citations_of_rows_lead_to_a_row():
    index = (ROOT / "docs" / "evidence" / "README.md").read_text(encoding="utf-8")
    rows = set(re.findall(r'<a id="([^"]+)"></a>', index))
    assert len(rows) > 50
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    cited = {
        (path, match)
        for path in listed.stdout.split()
        if (ROOT / path).exists()
        for match in re.findall(r"evidence/README\.md#(20[\d-]+-[\w-]+)", (ROOT / path).read_text(encoding="utf-8"))
    }
    assert len(cited) > 10
    assert {(path, row) for path, row in cited if row not in rows} == set()


def tables():
    spec = importlib.util.spec_from_file_location("site_tables", ROOT / "docs" / "_site" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_packages_is_that_of_the_tree():
    table = tables()
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert table.differences(page) == [], "run: python docs/_site/tables.py"
    (row,) = re.findall(r"^\| `tools/outrider_trace` .*\n", page, re.MULTILINE)
    count = table.rows()["tools/outrider_trace"][1]
    assert table.differences(page.replace(row, "")) == ["tools/outrider_trace has no row"]
    wrong = re.sub(r"[\d,]+ \|$", f"{count * 2:,} |", row.rstrip("\n")) + "\n"
    assert table.differences(page.replace(row, wrong)) == [
        f"tools/outrider_trace: the page says {count * 2:,} lines, the tree has {count:,}"
    ]


def test_the_tables_of_fences_and_stages_are_those_of_the_engine():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert tables().fence_table() in page, "run: python docs/_site/tables.py"
    assert tables().stage_table() in page, "run: python docs/_site/tables.py"


def test_the_table_of_stages_has_every_fence_that_forward_or_plan_waits_for():
    waited = {fence for before, _ in tables().stage_fences().values() for fence in before}
    assert waited == {fence.name for fence in FENCES if {"forward", "plan"} & set(fence.consumers)}


def test_pictures_are_small():
    pictures = list((ROOT / "docs" / "images").glob("*.png"))
    assert pictures
    assert all(path.stat().st_size < 200_000 for path in pictures)


@pytest.mark.slow
def test_broken_links_stop_the_build(tmp_path):
    """A site of two pages, with the settings of ours."""
    mistakes = ("nowhere.md", "home.md#no-such-heading", "images/none.png", "../examples/none")
    shutil.copytree(ROOT / "docs" / "_site", tmp_path / "docs" / "_site")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings = settings[: settings.index("\nnav:")] + "\nnav:\n  - Guides: [home.md]\n"
    (tmp_path / "mkdocs.yml").write_text(settings.replace("extra_css: [assets/site.css]", ""))
    (tmp_path / "docs" / "home.md").write_text("# Home\n\n[here](home.md#home)\n")
    assert build(tmp_path, tmp_path / "site").returncode == 0
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n\n" + "\n".join(f"[gone]({mistake})" for mistake in mistakes) + "\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for mistake in mistakes:
        assert re.search(rf"WARNING.*{re.escape(mistake.partition('#')[2] or mistake)}", done.stderr), mistake
