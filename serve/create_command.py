"""`adaptrt create`: creates a model on a running server from a Modelfile, as `ollama create` does."""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from .._core import ConfigError
from ..formats.sources import model_label
from .command_flags import API_KEY_VARIABLE
from .modelfile import Modelfile, read_modelfile
from .options import DEFAULT_PORT

_PIECE_BYTES: Final = 1 << 20
_ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    parser.add_argument("name", metavar="NAME", help="name of the new model")
    parser.add_argument(
        "-f",
        "--file",
        type=Path,
        default=Path("Modelfile"),
        metavar="FILE",
        help="the Modelfile (default: %(default)s)",
    )
    parser.add_argument(
        "--server", default=f"http://127.0.0.1:{DEFAULT_PORT}", metavar="URL",
        help="a server that was started with --ollama-models (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--api_key", metavar="KEY", help=f"key of the server (default: ${API_KEY_VARIABLE})")


def run(args: argparse.Namespace) -> int:
    """Sends the adapter's files and creates the model."""
    given = read_modelfile(args.file)
    files = {} if not given.adapter else _adapter_files(args.file.parent / given.adapter, args.file)
    server = _Server(args.server, args.api_key or os.environ.get(API_KEY_VARIABLE))
    digests = {name: server.store(path) for name, path in files.items()}
    server.post("/api/create", create_body(args.name, given, args.file.parent, digests))
    print(f"created {args.name}")
    return 0


def create_body(name: str, given: Modelfile, directory: Path, adapters: Mapping[str, str]) -> dict[str, Any]:
    """Returns the body of POST /api/create. directory: paths in the Modelfile are relative to it."""
    base = directory / given.base
    body = {
        "model": name,
        # A server that was started with this path serves it under its label.
        "from": model_label(base) if base.exists() else given.base,
        "adapters": dict(adapters),
        "template": given.template,
        "system": given.system,
        "parameters": given.parameters,
        "messages": given.messages,
        "license": given.licenses,
    }
    return {**{field: value for field, value in body.items() if value}, "stream": False}


def _adapter_files(path: Path, modelfile: Path) -> dict[str, Path]:
    """Returns the files of an adapter by name. Raises ConfigError."""
    if path.is_file():
        return {path.name: path}
    files = {name: path / name for name in _ADAPTER_FILES}
    missing = [name for name, file in files.items() if not file.is_file()]
    if missing:
        raise ConfigError(
            f"{modelfile}: ADAPTER is {path}, which has no {missing[0]}; expected the directory of a PEFT adapter, or "
            "a GGUF file"
        )
    return files


class _Server:
    """A running server."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises ConfigError for anything but the address of a server."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"server is '{url}'; expected an address such as http://127.0.0.1:{DEFAULT_PORT}")
        self._url = url
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._place = parts.netloc.rpartition("@")[2]
        self._prefix = parts.path.rstrip("/")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def store(self, path: Path) -> str:
        """Sends a file unless the server has it. Returns its digest. Raises ConfigError."""
        with path.open("rb") as file:
            hashed = hashlib.sha256()
            while piece := file.read(_PIECE_BYTES):
                hashed.update(piece)
            digest = f"sha256:{hashed.hexdigest()}"
            address = f"/api/blobs/{digest}"
            if self._send("HEAD", address, None, {}) == http.client.NOT_FOUND:
                file.seek(0)
                size = str(path.stat().st_size)
                headers = {"Content-Type": "application/octet-stream", "Content-Length": size}
                self._send("POST", address, file, headers)
        return digest

    def post(self, address: str, body: Mapping[str, Any]) -> None:
        """Sends JSON. Raises ConfigError with the server's message."""
        self._send("POST", address, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send(self, method: str, address: str, body: bytes | IO[bytes] | None, headers: Mapping[str, str]) -> int:
        """Returns the status. Raises ConfigError for one of an error, except that of a file that is not found."""
        connection = self._connect(self._place)
        try:
            connection.request(method, self._prefix + address, body, {**headers, **self._headers})
            answer = connection.getresponse()
            said = answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"{self._url}: cannot be reached: {error}; expected a running server") from error
        finally:
            connection.close()
        is_missing = method == "HEAD" and answer.status == http.client.NOT_FOUND
        if answer.status >= http.client.BAD_REQUEST and not is_missing:
            raise ConfigError(f"{self._url}{address}: status {answer.status}: {_message(said) or answer.reason}")
        return answer.status


def _message(said: str) -> str:
    """Returns the message of an error in Ollama's form, or the text itself."""
    try:
        return str(json.loads(said)["error"])
    except (ValueError, KeyError, TypeError):
        return said[:500]
