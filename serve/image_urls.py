"""Images of requests that are elsewhere: on hosts that the server may ask, and in files below one directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from .._core import RequestError
from ..common.regular_file import read_regular
from ..common.shown_value import shown
from .image_fetch import SCHEMES, fetch
from .options import ServerLimits, ServerOptions
from .root_paths import paths_below, root_spellings

_FILE: Final = "file"
_SUBJECT: Final = "the URL of an image"


class ImageUrls:
    """Reads http, https and file URLs as far as the server's options allow it. Thread-safe."""

    def __init__(self, options: ServerOptions) -> None:
        """Reads nothing."""
        self._hosts = options.media_hosts
        self._limits: ServerLimits = options.limits
        root = options.media_root
        self._root = None if root is None else Path(os.path.realpath(root))
        self._spellings = () if root is None else root_spellings([root])

    def read(self, urls: Iterable[str]) -> dict[str, bytes]:
        """Returns the files of those URLs that are elsewhere. Blocks; all downloads share image_fetch_seconds.

        Raises RequestError for a URL that may not or cannot be read, and if the files are larger than max_body_bytes
        together.
        """
        deadline = time.monotonic() + self._limits.image_fetch_seconds
        files: dict[str, bytes] = {}
        remaining = self._limits.max_body_bytes
        for url in dict.fromkeys(urls):
            if not is_elsewhere(url):
                continue
            files[url] = self._file(url) if _scheme(url) == _FILE else self._download(url, deadline)
            remaining -= len(files[url])
            if remaining < 0:
                raise RequestError(f"the images have more than {self._limits.max_body_bytes} bytes, the maximum")
        return files

    def _download(self, url: str, deadline: float) -> bytes:
        if not self._hosts:
            raise RequestError(
                f"{_SUBJECT} is {shown(url)}; expected a data: URL, because the server was started without "
                "--allowed-media-domains"
            )
        max_bytes = self._limits.max_image_bytes
        return fetch(url, self._hosts, subject=_SUBJECT, max_bytes=max_bytes, deadline=deadline)

    def _file(self, url: str) -> bytes:
        if self._root is None:
            raise RequestError(
                f"{_SUBJECT} is {shown(url)}; expected a data: URL, because the server was started without "
                "--allowed-local-media-path"
            )
        path = self._confined(url)
        if path is None:
            raise RequestError(f"{_SUBJECT} is {shown(url)}; expected file:///PATH below --allowed-local-media-path")
        try:
            return read_regular(path, self._limits.max_image_bytes)
        except OSError as error:
            raise RequestError(f"{_SUBJECT} is {shown(url)}, which cannot be read: {error.strerror}") from None

    def _confined(self, url: str) -> Path | None:
        """Returns the path of a file URL with its links resolved; None if it leads out of the root."""
        try:
            parts = urlsplit(url)
        except ValueError:
            return None
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
            return None
        for candidate in paths_below(self._spellings, path):
            real = Path(os.path.realpath(candidate))
            if self._root is not None and real.is_relative_to(self._root):
                return real
        return None


def is_elsewhere(url: str) -> bool:
    """True for URLs of hosts and files; False for data: URLs and all others."""
    return _scheme(url) in (*SCHEMES, _FILE)


def _scheme(url: str) -> str:
    return url[: len("https:")].partition(":")[0].lower()
