"""An S3 server in this process, and directories of objects in it."""

from __future__ import annotations

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
    """Runs the server on a port of its own, and points this process's programs of AWS to it."""
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
        # The objects of all servers of this process are in one place.
        httpx.post(f"http://{host}:{port}/moto-api/reset").raise_for_status()
        store = ObjectStoreServer(f"http://{host}:{port}")
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
