"""Modelfiles, and `adaptrt create`, which sends them to a server."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import adaptrt
from adaptrt.builder.cli import main
from adaptrt.serve.modelfile import Modelfile, parse_modelfile, read_modelfile

WHOLE = '''# A comment
from llama3.2
ADAPTER ./adapter

PARAMETER temperature 0.5
parameter num_ctx 4096
PARAMETER stop "<|end|>"
PARAMETER stop AI assistant:
PARAMETER penalize_newline true
TEMPLATE """{{ .System }}
  {{ .Prompt }}"""
SYSTEM You are "Mario".
MESSAGE user Is Toronto in Canada?
MESSAGE assistant """yes
it is"""
LICENSE MIT
LICENSE "two
lines"
'''


def test_every_instruction_arrives() -> None:
    assert parse_modelfile(WHOLE) == Modelfile(
        base="llama3.2",
        adapter="./adapter",
        template="{{ .System }}\n  {{ .Prompt }}",
        system='You are "Mario".',
        parameters={
            "temperature": 0.5,
            "num_ctx": 4096,
            "stop": ["<|end|>", "AI assistant:"],
            "penalize_newline": True,
        },
        messages=[
            {"role": "user", "content": "Is Toronto in Canada?"},
            {"role": "assistant", "content": "yes\nit is"},
        ],
        licenses=["MIT", "two\nlines"],
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SYSTEM x", "Modelfile: FROM is missing"),
        ("FROM a\nFROM b", "line 2: FROM is given again, after line 1"),
        ("FROM a\n\nREQUIRES 0.14.0", "line 3: REQUIRES is not known; expected FROM, ADAPTER, TEMPLATE, SYSTEM"),
        ('FROM a\nSYSTEM """x\ny', "line 2: the quotation mark of SYSTEM is not closed"),
        ("FROM a\nPARAMETER top_k 1\nPARAMETER top_k 2", "line 3: PARAMETER top_k is given twice"),
        ("FROM a\nPARAMETER top_k", "line 2: PARAMETER top_k has no value"),
        ("FROM a\nMESSAGE tool x", "line 2: MESSAGE has the role 'tool'; expected one of system, user, assistant"),
        ("FROM", "line 1: FROM has no value"),
    ],
)
def test_a_wrong_line_is_named(text: str, said: str) -> None:
    with pytest.raises(adaptrt.ConfigError) as raised:
        parse_modelfile(text)
    assert said in str(raised.value)


def test_a_file_is_read_within_its_limits(tmp_path: Path) -> None:
    file = tmp_path / "Modelfile"
    file.write_bytes(b"\xef\xbb\xbfFROM a\r\n")
    assert read_modelfile(file).base == "a"
    for content in (b"FROM \xff", b"F" * ((1 << 20) + 1)):
        file.write_bytes(content)
        with pytest.raises(adaptrt.ConfigError, match="cannot be read"):
            read_modelfile(file)
    with pytest.raises(adaptrt.ConfigError, match="cannot be read"):
        read_modelfile(tmp_path / "other")


class Server(HTTPServer):
    """Notes requests. It has no file, and creates any model but `bad`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str, bytes]] = []
        self.keys: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self._answer(404 if "/api/blobs/" in self.path else 200)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, self.headers["Content-Type"], body))
        self.server.keys.add(self.headers["Authorization"])
        self._answer(400 if b'"bad"' in body else 200, b'{"error": "no such base"}')

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_model_is_created_on_a_server(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter").mkdir()
    contents = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
    for name, content in contents.items():
        (tmp_path / "adapter" / name).write_bytes(content)
    (tmp_path / "base").mkdir()
    file = tmp_path / "Modelfile"
    file.write_text("FROM ./base\nADAPTER ./adapter\nSYSTEM s\nPARAMETER top_k 1\n")
    monkeypatch.setenv("ADAPTRT_API_KEY", "secret")
    address = f"http://127.0.0.1:{server.server_port}/below"
    assert main(["create", "mario", "-f", str(file), "--server", address]) == 0
    digests = {name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in contents.items()}
    *blobs, (path, kind, body) = server.seen
    assert blobs == [
        (f"/below/api/blobs/{digests[name]}", "application/octet-stream", content) for name, content in contents.items()
    ]
    assert (path, kind) == ("/below/api/create", "application/json")
    assert json.loads(body) == {
        "model": "mario", "from": "base", "adapters": digests, "system": "s", "parameters": {"top_k": 1},
        "stream": False,
    }  # fmt: skip
    assert server.keys == {"Bearer secret"}
    assert capsys.readouterr().out == "created mario\n"

    assert main(["create", "bad", "-f", str(file), "--server", address]) == 2
    assert "status 400: no such base" in capsys.readouterr().err
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    for flags, said in (
        (["--server", address], "has no adapter_config.json; expected the directory of a PEFT adapter, or a GGUF"),
        (["--server", "127.0.0.1"], "has no adapter_config.json"),
    ):
        assert main(["create", "mario", "-f", str(file), *flags]) == 2
        assert said in capsys.readouterr().err
    file.write_text("FROM base\nADAPTER a.gguf\n")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for given, said in (("127.0.0.1", "expected an address such as"), ("http://127.0.0.1:9", "cannot be reached")):
        assert main(["create", "mario", "-f", str(file), "--server", given]) == 2
        assert said in capsys.readouterr().err
