"""The page for authors of plugins lists every module that has moved."""

import re
from pathlib import Path

from outrider._moved import MOVED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "renamed.md"


def test_every_module_that_moved_is_listed():
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## Modules") : text.index("## The seam")]
    assert dict(re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", section, re.MULTILINE)) == MOVED
