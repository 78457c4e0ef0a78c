"""The web page at ``/``: one HTML file with inline script and style, and a content security policy that allows only them."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import FastAPI
from starlette.responses import HTMLResponse


def add_page(app: FastAPI) -> None:
    """Add the route of the page to ``app``. The page itself needs no API key; its requests to the API do."""
    text = resources.files("outrider.serve.http").joinpath("page.html").read_text("utf-8")
    headers = {
        "content-security-policy": content_security_policy(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        """Return the web page, with its content security policy."""
        return HTMLResponse(text, headers=headers)


def content_security_policy(text: str) -> str:
    """Return the content security policy of the page ``text``.

    It allows the page's inline script and style, by their hashes, and requests to the page's own server.
    """
    inline = [f"{tag}-src {_inline_hash(text, tag)}" for tag in ("script", "style")]
    others = ("connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
    return "; ".join(("default-src 'none'", *inline, *others))


def _inline_hash(text: str, tag: str) -> str:
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
