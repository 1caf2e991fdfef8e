"""Bad requests, clients that disconnect, a full queue, wrong keys and SIGTERM: errors 4xx, and the server keeps
running."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tokenizers import Tokenizer, models

from adaptrt.builder.cli import main as command_line
from support.http_server import http_server
from support.models import ModelSpec, save_model
from support.serving import build_engine

SECONDS = 120.0
KEY = "a key with spaces, and ümlauts".encode().decode("latin-1")
HEADERS = {"Authorization": f"Bearer {KEY}".encode("latin-1")}
# A slow model: an answer of LONG tokens takes seconds, so clients disconnect in the middle of it.
SPEC = ModelSpec(num_hidden_layers=40, max_position_embeddings=4096)
LONG = 3000
MAX_BODY, MAX_HEADERS = 1 << 16, 1 << 13


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("abuse")
    model = save_model(SPEC, root / "model")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(model / "tokenizer.json"))
    return build_engine(model, root, max_batch_size=1, max_seq_len=4096)


@pytest.fixture(scope="module")
def address(engine: Path) -> Iterator[str]:
    flags = ("--served_model_name", "base", "--num_threads", 1, "--max_queue_size", 1, "--max_body_bytes", MAX_BODY,
             "--max_header_bytes", MAX_HEADERS, "--api_key", KEY.encode("latin-1").decode())  # fmt: skip
    with http_server(engine, *flags) as started:
        yield started


def body(max_tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {"model": "base", "prompt": [3, 4, 5], "max_tokens": max_tokens, "ignore_eos": True, **fields}


def post(address: str, content: bytes, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    return httpx.post(f"{address}{path}", content=content, headers={**HEADERS, **headers}, timeout=SECONDS)


def check_alive(address: str) -> None:
    answer = post(address, json.dumps(body()).encode())
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


def state(address: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{address}/api/state", headers=HEADERS, timeout=SECONDS).json()
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end


WRONG_BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "no UTF-8": b'{"model": "\xff"}',
    "a lone surrogate": rb'{"model": "base", "prompt": "\ud800", "max_tokens": 1}',
    "NaN": b'{"model": "base", "prompt": [3], "temperature": NaN}',
    "infinity": b'{"model": "base", "prompt": [3], "temperature": 1e999}',
    "a number of many digits": b'{"model": "base", "prompt": [3], "max_tokens": ' + b"9" * 5000 + b"}",
    "a number beyond 64 bits": b'{"model": "base", "prompt": [3], "seed": ' + b"9" * 30 + b"}",
    "deep lists": b'{"model": ' + b"[" * (MAX_BODY // 4),
    "deep and closed": b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}",
    "deep objects": b'{"a":' * (MAX_BODY // 8),
    "a list": b"[]",
    "null": b"null",
    "a NUL in a name": b'{"model": "ba\\u0000se", "prompt": [3]}',
    "a negative token": b'{"model": "base", "prompt": [-1]}',
    "a token beyond the vocabulary": b'{"model": "base", "prompt": [61]}',
    "an empty prompt": b'{"model": "base", "prompt": []}',
    "too many tokens": b'{"model": "base", "prompt": [3], "max_tokens": 100000}',
    "an unknown field": b'{"model": "base", "prompt": [3], "beam_me_up": true}',
    "a text for a number": b'{"model": "base", "prompt": [3], "max_tokens": "4"}',
}


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank", "/tokenize", "/detokenize"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v2/models/base/infer", "/v2/models/base/generate"),
    ],
)
def test_wrong_bodies_are_answered_with_4xx(address: str, path: str) -> None:
    for about, content in WRONG_BODIES.items():
        answer = post(address, content, path)
        assert 400 <= answer.status_code < 500, about
        assert answer.json()["error"], about
    check_alive(address)


@pytest.mark.parametrize("name", ["resp_1", "resp_" + "f" * 64, "a" * 5000, "%00", "..%2f..%2fetc", "%ff", "\u20ac"])
def test_odd_ids_of_responses_are_not_found(address: str, name: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = httpx.request(method, f"{address}/v1/responses/{name}{path}", headers=HEADERS, timeout=SECONDS)
        assert answer.status_code in (404, 405), (method, path)
    content = json.dumps({"input": "a", "previous_response_id": name}).encode()
    assert post(address, content, "/v1/responses").status_code == httpx.codes.NOT_FOUND
    check_alive(address)


def test_unknown_models_and_routes_are_404(address: str) -> None:
    for path, content in (("/v1/completions", body(model="nobody")), ("/v1/nothing", body())):
        answer = post(address, json.dumps(content).encode(), path)
        assert answer.status_code == httpx.codes.NOT_FOUND
        assert answer.json()["error"]["code"] == httpx.codes.NOT_FOUND


def test_large_bodies_are_refused_whether_or_not_their_size_is_stated(address: str) -> None:
    large = b" " * (MAX_BODY + 1)
    stated = post(address, large)
    counted = httpx.post(
        f"{address}/v1/completions", content=iter([large[:1000], large[1000:]]), headers=HEADERS, timeout=SECONDS
    )
    for answer in (stated, counted):
        assert answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE
        assert str(MAX_BODY) in answer.json()["error"]["message"]
    check_alive(address)


def test_large_headers_are_refused(address: str) -> None:
    answer = post(address, b"{}", **{"X-Large": "x" * 2 * MAX_HEADERS})
    assert answer.status_code == httpx.codes.REQUEST_HEADER_FIELDS_TOO_LARGE
    assert str(MAX_HEADERS) in answer.text
    assert post(address, b"{}", **{"X-Large": "x" * (MAX_HEADERS // 2)}).status_code == httpx.codes.BAD_REQUEST
    check_alive(address)


@pytest.mark.parametrize("beginning", [b"GET /", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX-Large: "])
def test_a_head_that_does_not_end_is_refused(address: str, beginning: bytes) -> None:
    place = urlsplit(address)
    assert place.hostname is not None
    with socket.create_connection((place.hostname, place.port or 0), timeout=SECONDS) as connection:
        connection.sendall(beginning)
        piece = b"x: x\r\n" * 100 if beginning.endswith(b"\r\n") else b"x" * 600
        answer = b""
        for _ in range(MAX_HEADERS):
            try:
                connection.sendall(piece)
            except OSError:
                break
            if select.select([connection], [], [], 0.01)[0]:
                answer = connection.recv(1 << 12)
                break
    assert answer.startswith(b"HTTP/1.1 431 ")
    check_alive(address)


@pytest.mark.parametrize("target", [b"example.com:443", b"/", b"/v1/models"])
def test_no_connection_is_forwarded(address: str, target: bytes) -> None:
    place = urlsplit(address)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=SECONDS) as connection:
        headers = b"Host: a\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n"
        connection.sendall(b"CONNECT " + target + b" HTTP/1.1\r\n" + headers + b"\r\n")
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 4")
    check_alive(address)


def test_requests_to_upgrade_the_protocol_are_answered_in_http_1(address: str) -> None:
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__"}
    with httpx.Client(base_url=address, headers=HEADERS, timeout=SECONDS) as client:
        for _ in range(2):
            answer = client.post("/v1/completions", json=body(), headers=upgrade)
            assert answer.status_code == httpx.codes.OK, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY])
def test_without_the_key_nothing_is_answered(address: str, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    for method, path in (
        ("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/v1/load_lora_adapter"), ("GET", "/api/state"),
        ("GET", "/v2/models/base"), ("GET", "/v1/nothing"),
    ):  # fmt: skip
        answer = httpx.request(method, f"{address}{path}", headers=headers, timeout=SECONDS)
        assert answer.status_code == httpx.codes.UNAUTHORIZED
    assert httpx.get(f"{address}/health", headers=headers).status_code == httpx.codes.OK


def test_web_pages_of_other_sites_are_refused(address: str) -> None:
    content = json.dumps(body()).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = post(address, content, **{"Content-Type": kind})
        assert answer.status_code == httpx.codes.UNSUPPORTED_MEDIA_TYPE
        assert answer.json()["error"]["code"] == httpx.codes.UNSUPPORTED_MEDIA_TYPE
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = post(address, b"{}", "/v1/load_lora_adapter", **{"Content-Type": "application/json"}, **headers)
        assert answer.status_code == httpx.codes.FORBIDDEN
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    check_alive(address)


def test_a_client_that_goes_away_frees_its_request(address: str) -> None:
    before = state(address)["tokens_generated"]
    streamed = {"content": json.dumps(body(LONG, stream=True)).encode(), "headers": HEADERS, "timeout": SECONDS}
    with httpx.stream("POST", f"{address}/v1/completions", **streamed) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/completions", json=body(LONG), headers=HEADERS, timeout=0.05)
    wait_until(lambda: state(address)["requests"] == {"running": 0, "waiting": 0})
    assert state(address)["tokens_generated"] - before < LONG
    check_alive(address)


def test_a_full_queue_is_429_and_says_when_to_come_back(address: str) -> None:
    client = httpx.Client(base_url=address, headers=HEADERS, timeout=SECONDS)
    with client, client.stream("POST", "/v1/completions", json=body(LONG, stream=True)) as running:
        lines = running.iter_lines()  # httpx closes the stream with the last reference to it
        next(lines)
        waiting = threading.Thread(target=lambda: check_alive(address))
        waiting.start()
        wait_until(lambda: state(address)["requests"]["waiting"] == 1)
        refused = post(address, json.dumps(body()).encode())
        assert refused.status_code == httpx.codes.TOO_MANY_REQUESTS
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "RateLimitError"
    waiting.join(SECONDS)
    assert not waiting.is_alive()
    check_alive(address)


def test_sigterm_finishes_what_runs_and_refuses_what_comes(engine: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "adaptrt.builder.cli",
        "serve",
        engine,
        "--port",
        "0",
        "--served_model_name",
        "base",
    ]
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with httpx.stream("POST", f"{address}/v1/completions", json=body(LONG, stream=True), timeout=SECONDS) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)

            def is_refused() -> bool:
                try:
                    httpx.get(f"{address}/health", timeout=SECONDS)
                except httpx.TransportError:
                    return True
                return False

            wait_until(is_refused)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(SECONDS) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        _, log = process.communicate()
    assert "Traceback" not in log


@pytest.mark.parametrize("module", ["x=/nowhere/adapter", "base=/nowhere/adapter"])
def test_an_adapter_that_cannot_be_served_ends_the_start_in_one_line(
    engine: Path, module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--port", "0", "--num_threads", "1", "--served_model_name", "base", "--lora_modules", module]
    assert command_line(["serve", str(engine), *flags]) == 2
    said = capfd.readouterr().err
    assert f"adaptrt: error: lora_modules '{module}': " in said.splitlines()[-1]
    assert "Traceback" not in said


def test_an_empty_key_in_the_environment_ends_the_start(
    engine: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAPTRT_API_KEY", "")
    assert command_line(["serve", str(engine), "--port", "0"]) == 2
    said = capfd.readouterr().err.splitlines()
    assert said == ["adaptrt: error: ADAPTRT_API_KEY is empty; expected a key, or a variable that is not set"]
