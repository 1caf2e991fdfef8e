"""Web pages of other sites change no adapters; programs, the server's own page and allowed hosts do."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from adaptrt.serve.adapter_routes import ADAPTER_PATHS
from adaptrt.serve.app import is_guarded, respond
from adaptrt.serve.command_flags import add_arguments
from adaptrt.serve.command_options import options_of
from adaptrt.serve.origin_guard import OriginGuard, OriginPolicy
from adaptrt.serve.places import Place, allowed_host
from adaptrt.serve.triton_routes import other_type

GUARDED = [*sorted(ADAPTER_PATHS), "/api/create", "/api/blobs/sha256:0"]
LOOPBACK, ANYWHERE, BEHIND_OTHERS = "127.0.0.1", "0.0.0.0", ""
JSON = {"Content-Type": "application/json"}


def ask(
    host: str,
    headers: Mapping[str, str],
    *allowed: str,
    path: str = "/v1/load_lora_adapter",
    body: bytes = b"{}",
    method: str = "POST",
) -> tuple[int, str]:
    """Returns (status, body) of a request to a server that listens on `host`. Empty headers are not sent."""

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(await Request(scope, receive).body())(scope, receive, send)

    policy = OriginPolicy(host, [allowed_host(text) for text in allowed])
    guard = OriginGuard(echo, policy, is_guarded, other_type, respond)
    length = {} if "Transfer-Encoding" in headers else {"Content-Length": str(len(body))}
    given = {"Host": "localhost:8000", **JSON, **length, **headers}
    scope = {
        "type": "http", "method": method, "path": path, "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items() if value],
    }  # fmt: skip
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:]).decode()


PAGE = {"Host": "localhost:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}
PROXY = {"Host": "llm.example.com", "Origin": "https://llm.example.com", "Sec-Fetch-Site": "same-origin"}
INNER = {**PROXY, "Host": "127.0.0.1:8000"}
"""A proxy that sends its own name for the server as Host."""


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize(
    ("host", "headers", "allowed"),
    [
        # Requests of programs.
        (LOOPBACK, {}, ()),
        (LOOPBACK, {"Host": ""}, ()),
        (LOOPBACK, {"Host": "127.0.0.1:8000"}, ()),
        (LOOPBACK, {"Host": "[::1]:8000"}, ()),
        (LOOPBACK, {"Host": "LOCALHOST"}, ()),
        (LOOPBACK, {"Host": "10.1.2.3:8000"}, ()),
        (LOOPBACK, {"Host": "llm.example.com"}, ("llm.example.com",)),
        (LOOPBACK, {"Host": "llm.example.com"}, ("llm.example.com:80",)),
        (ANYWHERE, {"Host": "adaptrt:8000"}, ()),
        (BEHIND_OTHERS, {"Host": "adaptrt.default.svc.cluster.local"}, ()),
        # Requests of the server's own page.
        (LOOPBACK, PAGE, ()),
        (LOOPBACK, {**PAGE, "Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"}, ()),
        (LOOPBACK, {**PAGE, "Host": "localhost", "Origin": "http://localhost"}, ()),
        (ANYWHERE, {**PAGE, "Host": "10.1.2.3:8000", "Origin": "http://10.1.2.3:8000"}, ()),
        ("box.lan", {**PAGE, "Host": "box.lan:8000", "Origin": "http://box.lan:8000"}, ()),
        ("::", {**PAGE, "Host": "[fd00::1]:8000", "Origin": "http://[fd00::1]:8000"}, ()),
        (LOOPBACK, PROXY, ("llm.example.com",)),
        (LOOPBACK, PROXY, ("llm.example.com:443",)),
        (ANYWHERE, PROXY, ("other.example", "LLM.example.com.")),
        (LOOPBACK, INNER, ("llm.example.com",)),
        (BEHIND_OTHERS, INNER, ("llm.example.com",)),
        # A page of an allowed host.
        (LOOPBACK, {"Origin": "https://tools.example:8443", "Sec-Fetch-Site": "cross-site"}, ("tools.example:8443",)),
    ],
)
def test_programs_and_the_servers_own_page_change_adapters(
    host: str, headers: dict[str, str], allowed: tuple[str, ...], path: str
) -> None:
    assert ask(host, headers, *allowed, path=path) == (200, "{}")


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize(
    ("host", "headers", "allowed", "named"),
    [
        (LOOPBACK, {"Origin": "http://evil.example"}, (), "Origin"),
        (LOOPBACK, {"Origin": "null"}, (), "Origin"),
        (LOOPBACK, {"Origin": "http://localhost:3000"}, (), "Origin"),
        (LOOPBACK, {"Origin": "http://localhost"}, (), "Origin"),
        (LOOPBACK, {"Origin": "file://"}, (), "Origin"),
        (LOOPBACK, {"Origin": "ftp://localhost:8000"}, (), "Origin"),
        (LOOPBACK, {"Origin": "http://localhost:8000 http://localhost:8000"}, (), "Origin"),
        (LOOPBACK, {"Sec-Fetch-Site": "cross-site"}, (), "Sec-Fetch-Site"),
        (LOOPBACK, {"Sec-Fetch-Site": "same-site"}, (), "Sec-Fetch-Site"),
        (LOOPBACK, {**PAGE, "Sec-Fetch-Site": "cross-site"}, (), "Sec-Fetch-Site"),
        (LOOPBACK, {"Sec-Fetch-Site": "cross-site"}, ("evil.example",), "Sec-Fetch-Site"),
        # A name that an attacker's DNS server resolves to this machine.
        (LOOPBACK, {"Host": "evil.example:8000"}, (), "Host"),
        (LOOPBACK, {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}, (), "Host"),
        ("localhost", {"Host": "evil.example:8000"}, (), "Host"),
        ("::1", {"Host": "evil.example:8000"}, (), "Host"),
        (LOOPBACK, {"Host": "127.1"}, (), "Host"),
        (LOOPBACK, {"Host": "localhost.evil.example"}, (), "Host"),
        (LOOPBACK, {"Host": "localhost:8000@evil.example"}, (), "Host"),
        (ANYWHERE, {"Host": "evil.example", "Origin": "http://evil.example"}, ("llm.example.com",), "Host"),
        (ANYWHERE, {"Host": "evil.example", "Sec-Fetch-Site": "same-origin"}, (), "Host"),
        (BEHIND_OTHERS, {"Host": "evil.example", "Origin": "http://evil.example"}, (), "Host"),
        (LOOPBACK, {"Host": "llm.example.com:9000"}, ("llm.example.com:8443",), "Host"),
        (LOOPBACK, {"Host": "llm.example.com"}, ("llm.example.com:8443",), "Host"),
        (ANYWHERE, INNER, (), "Origin"),
        (ANYWHERE, {**PROXY, "Host": "llm.example.com", "Origin": "https://x.example"}, ("llm.example.com",), "Origin"),
    ],
)
def test_other_sites_change_no_adapters(
    host: str, headers: dict[str, str], allowed: tuple[str, ...], named: str, path: str
) -> None:
    status, said = ask(host, headers, *allowed, path=path)
    assert status == 403
    assert f"{named} is '{headers[named]}'; accepted where adapters change: " in said
    assert "--allowed-hosts" in said


def test_other_routes_are_asked_from_anywhere() -> None:
    headers = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert ask(LOOPBACK, headers, path="/v1/completions") == (200, "{}")
    assert ask(LOOPBACK, headers, method="GET")[0] == 200


FORM, TEXT, BINARY = "application/x-www-form-urlencoded", "text/plain", "application/octet-stream"


@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [
        *(
            (path, kind, 200)
            for path in ("/v1/completions", "/v1/load_lora_adapter", "/v2/models/x/infer")
            for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", "")
        ),
        *(
            (path, kind, 415)
            for path in ("/v1/completions", "/v1/load_lora_adapter", "/v2/models/x/infer")
            for kind in (FORM, TEXT, "multipart/form-data; boundary=a", "text/plain; application/json",
                         "text/plain, application/json", "application/jsonp", "application/xml+json/text", "x")
        ),
        ("/v2/models/x/infer", BINARY, 200),
        ("/v1/completions", BINARY, 415),
    ],
)  # fmt: skip
def test_bodies_are_json(path: str, kind: str, status: int) -> None:
    answered, said = ask(LOOPBACK, {"Content-Type": kind}, path=path)
    assert answered == status
    if status == 415:
        assert f"Content-Type is '{kind}'; accepted: application/json" in said


@pytest.mark.parametrize("browser", [{"Origin": "http://localhost:8000"}, {"Sec-Fetch-Site": "cross-site"}])
def test_a_browser_names_the_type_of_a_body(browser: dict[str, str]) -> None:
    status, said = ask(LOOPBACK, {"Content-Type": "", **browser}, path="/v1/completions")
    assert status == 415
    assert "Content-Type is ''" in said


def test_a_chunked_body_has_a_type_and_an_empty_one_needs_none() -> None:
    assert ask(LOOPBACK, {"Content-Type": TEXT}, body=b"") == (200, "")
    chunked = {"Content-Type": TEXT, "Transfer-Encoding": "chunked"}
    assert ask(LOOPBACK, chunked, body=b"", path="/v1/completions")[0] == 415
    assert ask(LOOPBACK, {"Content-Type": TEXT}, path="/v1/completions", method="PUT")[0] == 415


def test_refusals_have_the_form_of_their_surface() -> None:
    assert ask(LOOPBACK, {"Content-Type": TEXT}, path="/v2/models/x/infer")[1].startswith('{"error":"Content-Type is ')
    assert '"code":415' in ask(LOOPBACK, {"Content-Type": TEXT}, path="/v1/completions")[1]


def test_allowed_hosts_are_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parsed = options_of(parser.parse_args(["model", "--allowed_hosts", "A.example", "b.example:8443", "[::1]:1"]))
    assert parsed.allowed_hosts == (Place("a.example", None), Place("b.example", 8443), Place("::1", 1))
    for wrong in ("https://a.example", "a.example/x", "*", "", "a.example:x", "::1"):
        with pytest.raises(SystemExit):
            parser.parse_args(["model", "--allowed_hosts", wrong])
        assert f"--allowed_hosts: it is '{wrong}'; expected NAME or NAME:PORT without" in capsys.readouterr().err
