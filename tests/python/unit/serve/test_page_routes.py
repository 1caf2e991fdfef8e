"""The web page and its headers, tested without a browser."""

from __future__ import annotations

import base64
import hashlib
import re

from fastapi import FastAPI
from fastapi.testclient import TestClient

from adaptrt.serve import page_routes
from adaptrt.serve.page_routes import PAGE_FILE, content_security_policy


def test_the_page_comes_with_its_policy() -> None:
    app = FastAPI()
    app.include_router(page_routes.routes())
    answer = TestClient(app).get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.content == PAGE_FILE.read_bytes()
    assert answer.headers["content-security-policy"] == content_security_policy(answer.text)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_policy_allows_the_pages_own_style_and_script_alone() -> None:
    def digest(content: str) -> str:
        return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()

    page = (
        "<style>\na { }\n</style><script type='module'>run();</script><script>\nmore();</script><scripty>no</scripty>"
    )
    policy = dict(part.split(" ", 1) for part in content_security_policy(page).split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["style-src"] == f"'sha256-{digest(chr(10) + 'a { }' + chr(10))}'"
    assert policy["script-src"] == f"'sha256-{digest('run();')}' 'sha256-{digest(chr(10) + 'more();')}'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"


def test_the_page_is_one_file() -> None:
    page = PAGE_FILE.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page)
    assert "@import" not in page
    assert set(re.findall(r"https?://[^\s'\"]+", page)) == {"http://www.w3.org/2000/svg"}
    # Nothing in it turns text into HTML.
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\sstyle=|\son\w+=", page
    )
