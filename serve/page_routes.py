"""The web page at /: one file that loads nothing from other servers."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

PAGE_FILE: Final = Path(__file__).with_name("page.html")


def routes() -> APIRouter:
    """Makes the route. The page itself is the same for all users, so it needs no key."""
    router = APIRouter()
    page = PAGE_FILE.read_text(encoding="utf-8")
    headers = page_headers(page)

    # Ollama's clients ask with HEAD if the server runs.
    @router.get("/")
    @router.head("/")
    async def show() -> Response:
        return HTMLResponse(page, headers=headers)

    return router


def page_headers(page: str) -> dict[str, str]:
    """Returns the headers of a page that loads nothing from other servers."""
    return {
        "Content-Security-Policy": content_security_policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def content_security_policy(page: str) -> str:
    """Returns a policy that allows only the page's own style and script, by hash, and requests to this server."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(page, 'script')}",
            f"style-src {_hashes(page, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hashes(page: str, tag: str) -> str:
    contents = re.findall(rf"<{tag}(?:\s[^>]*)?>(.*?)</{tag}>", page, re.DOTALL)
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
