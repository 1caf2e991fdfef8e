"""An S3 server in this process, and directories of objects in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


@contextmanager
def object_store() -> Iterator[ObjectStoreServer]:
    """Runs the server on a free port, and makes AWS's clients in this process use it."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        # All servers of this process share their objects.
        httpx.post(f"http://{host}:{port}/moto-api/reset").raise_for_status()
        store = ObjectStoreServer(f"http://{host}:{port}")
        store.watch(server)
        store.files.mkdir(BUCKET)
        try:
            yield store
        finally:
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            server.stop()


class ObjectStoreServer:
    """A running server with one bucket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.files: Any = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
        self.fetched: list[str] = []
        """Paths of the objects whose bytes were asked for, with their buckets."""
        self.held: tuple[str, threading.Event] | None = None
        """End of the paths whose answers wait for the event."""

    def watch(self, server: Any) -> None:
        """Notes requests to the running server in `fetched`."""
        app = server._server.app

        def noting(environ: dict[str, Any], start_response: Any) -> Any:
            path = environ["PATH_INFO"].lstrip("/")
            if environ["REQUEST_METHOD"] == "GET" and "list-type" not in environ["QUERY_STRING"]:
                self.fetched.append(path)
                if self.held is not None and path.endswith(self.held[0]):
                    self.held[1].wait(60)
            return app(environ, start_response)

        server._server.app = noting

    def put(self, path: str, files: Mapping[str, bytes]) -> str:
        """Stores files below a path of the bucket; returns the name of the directory."""
        for name, content in files.items():
            self.files.pipe_file(f"{BUCKET}/{path}/{name}", content)
        return f"s3://{BUCKET}/{path}"

    def put_directory(self, path: str, directory: Path) -> str:
        """Stores the files of a local directory; returns the name of the directory."""
        files = {file.relative_to(directory).as_posix(): file for file in directory.rglob("*") if file.is_file()}
        return self.put(path, {name: file.read_bytes() for name, file in files.items()})

    def clear(self) -> None:
        """Deletes all objects."""
        for path in self.files.find(BUCKET):
            self.files.rm_file(path)
