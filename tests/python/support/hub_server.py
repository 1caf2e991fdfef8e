"""A small server that speaks the Hub's API to huggingface_hub: repositories in memory, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LFS_BYTES = 2048
"""Files of at least this size are large files: they have a SHA-256, and a redirect leads to another path."""


@dataclass
class Repository:
    """The files of a repository at its commits, and the faults of the server when it serves them."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    is_gated: bool = False
    is_private: bool = False
    status: int | None = None
    """Status of every answer about the repository."""
    breaks_after: int | None = None
    """Number of bytes of a large file's body after which the connection breaks, each time."""
    slow_after: int | None = None
    """Number of bytes of a large file's body after which the answer waits for `go_on`."""
    go_on: threading.Event = field(default_factory=threading.Event)


def commit_of(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha1()
    for name in sorted(files):
        digest.update(name.encode() + files[name])
    return digest.hexdigest()


@dataclass
class Hub:
    """The server's repositories, and the requests that it received."""

    address: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range header."""

    @property
    def cdn(self) -> str:
        """Address for large files: another host, as the Hub has it, so that huggingface_hub drops the token."""
        return self.address.replace("127.0.0.1", "localhost")

    def add(self, name: str, files: Mapping[str, bytes], branch: str = "main") -> Repository:
        """Makes a commit of these files and moves the branch to it."""
        commit = commit_of(files)
        repository = self.repositories.setdefault(name, Repository({}, {}))
        repository.commits[commit] = dict(files)
        repository.branches[branch] = commit
        return repository

    def fetched(self) -> list[str]:
        """Paths of the files whose bodies were asked for."""
        paths = [path for method, path, _ in self.requests if method == "GET"]
        return [path.split("/resolve/", 1)[1].split("/", 1)[1] for path in paths if "/resolve/" in path]


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Runs the server on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        for repository in hub.repositories.values():
            repository.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([0-9a-f]+)/(.+)", path):
            self._send_body(
                self.hub.repositories[found[1]], self.hub.repositories[found[1]].commits[found[2]][found[3]]
            )
            return
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(?:revision|tree)/([^/]+)", path)
        found = found or re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if found is None or found[1] not in self.hub.repositories:
            self._error(401 if "Authorization" not in self.headers else 404, "RepoNotFound", "Repository not found")
            return
        repository = self.hub.repositories[found[1]]
        revision = found[2].replace("%2F", "/")
        if repository.status is not None:
            self._error(repository.status, None, "no")
        elif repository.is_private and self.headers.get("Authorization") != "Bearer right":
            self._error(401, "RepoNotFound", "Repository not found")
        elif repository.is_gated and "/resolve/" in path and self.headers.get("Authorization") != "Bearer right":
            self._error(403, "GatedRepo", "Access is restricted")
        elif (commit := repository.branches.get(revision, revision)) not in repository.commits:
            self._error(404, "RevisionNotFound", "Invalid rev id")
        elif path.startswith("/api/"):
            self._send_info(found[1], commit, repository.commits[commit])
        else:
            self._resolve(found[1], repository, commit, found[3])

    def _send_info(self, name: str, commit: str, files: Mapping[str, bytes]) -> None:
        siblings = [{"rfilename": file, "size": len(content), **_lfs(content)} for file, content in files.items()]
        body = json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _resolve(self, name: str, repository: Repository, commit: str, file: str) -> None:
        content = repository.commits[commit].get(file)
        if content is None:
            self._error(404, "EntryNotFound", "Entry not found", commit)
            return
        if len(content) < LFS_BYTES:
            self.send_response(200)
            self._headers_of(commit, hashlib.sha1(content).hexdigest())
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
            return
        self.send_response(302)
        self._headers_of(commit, hashlib.sha256(content).hexdigest())
        self.send_header("X-Linked-Etag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Location", f"{self.hub.cdn}/cdn/{name}/{commit}/{file}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _headers_of(self, commit: str, etag: str) -> None:
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{etag}"')

    def _send_body(self, repository: Repository, content: bytes) -> None:
        begin = 0
        if (asked := self.headers.get("Range")) is not None:
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
        body = content[begin:]
        self.send_response(200 if asked is None else 206)
        if asked is not None:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if self.command == "HEAD":
            return
        if repository.breaks_after is not None:
            self.wfile.write(body[: repository.breaks_after])
            self.close_connection = True
            return
        if repository.slow_after is not None:
            self.wfile.write(body[: repository.slow_after])
            self.wfile.flush()
            repository.go_on.wait(60)
            body = body[repository.slow_after :]
        self.wfile.write(body)

    def _error(self, status: int, code: str | None, message: str, commit: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _lfs(content: bytes) -> dict[str, Any]:
    """Fields of a large file in the list of a repository's files."""
    if len(content) < LFS_BYTES:
        return {}
    digest = hashlib.sha256(content).hexdigest()
    return {"lfs": {"sha256": digest, "size": len(content), "pointerSize": 134}}
