"""Directories of object stores, read with fsspec and s3fs.

s3fs finds credentials, regions and endpoints as all programs of AWS do: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,
AWS_PROFILE, AWS_ENDPOINT_URL, ~/.aws, and the role of the machine or container.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import logging
import re
from pathlib import Path
from typing import Any, Final

import xxhash

from ..adapter.recognise import DRAFT_DIRECTORY, INITIAL_DIRECTORY
from ..template_files import TEMPLATES_DIRECTORY
from .grammar import ObjectName
from .kind import Kind
from .remote import Listing, Watch
from .shown import first_line

_LOG: Final = logging.getLogger("adaptrt")
_PIECE_BYTES: Final = 4 << 20
_CONNECT_SECONDS: Final = 10
_READ_SECONDS: Final = 60
_ATTEMPTS: Final = 4
_MD5: Final = re.compile(r"[0-9a-f]{32}")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class ObjectStore:
    """One directory of an object store; a Remote."""

    def __init__(self, name: ObjectName, kind: Kind) -> None:
        """Raises kind.error without fsspec and s3fs."""
        self.name = name
        self.kind = kind
        try:
            self._files = _filesystem()
        except ImportError:
            raise kind.error(f"{name}: names of object stores need s3fs: pip install 'adaptrt[s3]'") from None
        self._etags: dict[str, str] = {}

    def listing(self) -> Listing | None:
        """Lists the directory, and the directories in it whose files may be read."""
        try:
            # Asked first: a listing of a directory that does not exist would read the directory above it.
            self._files.info(self._path(self.kind.config_file))
        except FileNotFoundError:
            return None
        files: dict[str, int] = {}
        for entry in self._files.ls(self.name.in_store, detail=True):
            self._add(entry, files)
            name = self._name_in(entry)
            if entry["type"] == "directory" and self._is_read(name):
                for inner in self._files.ls(self._path(name), detail=True):
                    self._add(inner, files)
        version = xxhash.xxh3_128()
        for file in sorted(files):
            version.update(f"{file}\0{files[file]}\0{self._etags[file]}\0".encode())
        return Listing(version.hexdigest(), files)

    def check(self) -> None:
        """Raises kind.error if the bucket is missing or access is refused.

        A store that cannot be reached raises nothing: adapters that were downloaded earlier can be served.
        """
        below = f"{self.name.path}/" if self.name.path else ""
        try:
            self._files.call_s3("list_objects_v2", Bucket=self.name.bucket, Prefix=below, MaxKeys=1)
        except self.failures as error:
            if not self.is_unreachable(error):
                raise self.kind.error(f"{self.name}: {self.explain(error)}") from error
            _LOG.warning("%s: %s", self.name, self.explain(error))

    def fetch(self, file: str, target: Path, watch: Watch) -> None:
        """Writes a file to `target` in pieces, all of the version that was listed."""
        digest, num_bytes = hashlib.md5(usedforsecurity=False), 0
        with self._files.open(self._path(file), "rb", block_size=_PIECE_BYTES, cache_type="none") as source:
            details = getattr(source, "details", None) or self._files.info(self._path(file))
            expected = details["size"]
            if _etag(details) != self._etags[file]:
                raise OSError(errno.EBUSY, f"{file} was replaced while the directory was read")
            with target.open("xb") as out:
                while num_bytes < expected:
                    watch.check()
                    piece = source.read(min(_PIECE_BYTES, expected - num_bytes))
                    if not piece:
                        break
                    digest.update(piece)
                    out.write(piece)
                    num_bytes += len(piece)
                    watch.advance(len(piece))
        if num_bytes != expected:
            raise OSError(errno.EIO, f"{file} has {num_bytes} bytes; expected {expected}")
        etag = self._etags[file]
        # The ETag of an object that was uploaded in one part, and is not encrypted with a key, is its MD5.
        if _MD5.fullmatch(etag) and digest.hexdigest() != etag and not self._has_own_key(file):
            raise OSError(errno.EIO, f"{file} has the MD5 {digest.hexdigest()}; expected {etag}, its ETag")

    @property
    def failures(self) -> tuple[type[BaseException], ...]:
        """Errors of s3fs, and those of botocore and aiohttp that s3fs passes on."""
        found: list[type[BaseException]] = [OSError, TimeoutError]
        for module, names in (
            ("botocore.exceptions", ("BotoCoreError", "ClientError")),
            ("aiohttp", ("ClientError",)),
            ("asyncio", ("TimeoutError",)),
        ):
            with contextlib.suppress(ImportError):
                found += [getattr(importlib.import_module(module), name) for name in names]
        return tuple(found)

    def explain(self, error: BaseException) -> str:
        """Says why a request failed, and what the user can do."""
        kind = type(error).__name__
        if kind in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"):
            return (
                f"no credentials were found ({first_line(error)}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or AWS_PROFILE, or give the machine a role"
            )
        if isinstance(error, PermissionError) and error.filename is not None:
            return f"{error.filename} cannot be written ({error.strerror}); set XDG_CACHE_HOME to another directory"
        if isinstance(error, PermissionError):
            return f"the store refuses access ({first_line(error)}); check the credentials and the bucket's policy"
        if isinstance(error, FileNotFoundError):
            return f"was not found ({first_line(error)})"
        if isinstance(error, OSError) and error.errno in _FULL:
            return "the disk of the cache is full; free some space (adaptrt cache), or set XDG_CACHE_HOME"
        if self.is_unreachable(error):
            return f"the object store cannot be reached ({first_line(error)}); check the network and AWS_ENDPOINT_URL"
        return f"the download failed ({first_line(error)}); try again"

    def is_unreachable(self, error: BaseException) -> bool:
        """True if the store gave no answer."""
        names = {base.__name__ for base in type(error).__mro__}
        return bool(names & {"EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError", "TimeoutError"})

    def _is_read(self, directory: str) -> bool:
        if self.kind is Kind.MODEL:  # any of them may be a module of Sentence Transformers
            return True
        return directory in (INITIAL_DIRECTORY, DRAFT_DIRECTORY, TEMPLATES_DIRECTORY)

    def _add(self, entry: dict[str, Any], files: dict[str, int]) -> None:
        name = self._name_in(entry)
        if entry["type"] == "file" and name:
            files[name] = entry["size"]
            self._etags[name] = _etag(entry)

    def _name_in(self, entry: dict[str, Any]) -> str:
        return str(entry["name"]).lstrip("/").removeprefix(self.name.in_store).strip("/")

    def _path(self, file: str) -> str:
        return f"{self.name.in_store}/{file}"

    def _has_own_key(self, file: str) -> bool:
        """True if the object is encrypted with a key, so that its ETag is no MD5."""
        bucket, _, key = self._path(file).partition("/")
        head = self._files.call_s3("head_object", Bucket=bucket, Key=key)
        return head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head


def _filesystem() -> Any:
    """The store's file system. s3fs keeps one for each thread, with its connections. Raises ImportError."""
    import s3fs

    return s3fs.S3FileSystem(
        use_listings_cache=False,
        config_kwargs={
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "retries": {"max_attempts": _ATTEMPTS, "mode": "standard"},
        },
    )


def _etag(entry: dict[str, Any]) -> str:
    """The object's ETag without its quotes."""
    return str(entry["ETag"]).strip('"')
