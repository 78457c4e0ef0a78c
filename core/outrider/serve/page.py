"""The page at ``/``: one file, with all that it needs inside, and a policy that lets a browser run that and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import FastAPI
from starlette.responses import HTMLResponse


def add_page(app: FastAPI) -> None:
    """Serve the page. It needs no key; what it asks of the API does."""
    text = resources.files("outrider.serve").joinpath("page.html").read_text("utf-8")
    headers = {
        "content-security-policy": policy(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        """The page."""
        return HTMLResponse(text, headers=headers)


def policy(text: str) -> str:
    """The policy of a page: its own inline script and style, by their hashes, and calls to its own server."""
    parts = [f"{kind}-src {_hash(text, tag)}" for kind, tag in (("script", "script"), ("style", "style"))]
    others = ("connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
    return "; ".join(("default-src 'none'", *parts, *others))


def _hash(text: str, tag: str) -> str:
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
