"""Self-contained HTML pages with light and dark colours, readable from a width of 360 pixels on."""

from __future__ import annotations

import re
from html import escape

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #f6f8fa; --text: #1f2328; --dim: #59636e; --back: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --soft: #151b23; --text: #f0f6fc; --dim: #9198a1; --back: #0d1117; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1rem 4rem; color: var(--text); background: var(--back); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.25rem 0 .5rem; }
p { margin: .25rem 0 .75rem; } .dim { color: var(--dim); }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .4rem .75rem .4rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { font-weight: 600; overflow-wrap: normal; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
code, pre { font: .875em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
"""
_MARKED = re.compile(r"(?::[a-z:]+:)?(`{1,2})(?:~(?:[\w.]*\.)?)?(?P<code>[^`]+)\1")
"""Code in a text between one or two backticks. Before it may stand a docstring's role, and ``~`` with a module."""


def html_page(title: str, body: str, style: str = "") -> str:
    """Return a page. ``body`` is HTML below the title, ``style`` is CSS in addition to that of every page."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}{style}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def prose(text: str) -> str:
    """Return ``text`` as HTML. Code between backticks becomes a ``code`` element."""
    return _MARKED.sub(r"<code>\g<code></code>", escape(text, quote=False))
