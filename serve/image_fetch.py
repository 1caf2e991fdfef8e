"""Downloads images of requests over http and https: only from allowed hosts, bounded in bytes, redirects and time."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from .._core import RequestError
from .._version import __version__
from ..common.shown_value import shown
from .media_hosts import MediaHosts

SCHEMES: Final = {"http": 80, "https": 443}
"""Schemes with their usual ports."""
MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = (
    HTTPStatus.MOVED_PERMANENTLY,
    HTTPStatus.FOUND,
    HTTPStatus.SEE_OTHER,
    HTTPStatus.TEMPORARY_REDIRECT,
    HTTPStatus.PERMANENT_REDIRECT,
)
_PIECE: Final = 1 << 16
_MAX_URL: Final = 8192
_UNESCAPED: Final = "/%:=&?~+!$,;'@()*[]"
_HEADERS: Final = {
    "User-Agent": f"adaptrt/{__version__}",
    "Accept": "image/*",
    "Accept-Encoding": "identity",
    "Connection": "close",
}


@dataclass(frozen=True)
class _Place:
    """A URL whose parts were checked."""

    url: str
    scheme: str
    host: str
    port: int
    target: str
    """Path and query."""


def fetch(url: str, hosts: MediaHosts, *, subject: str, max_bytes: int, deadline: float) -> bytes:
    """Downloads a file. Blocks. deadline: in the time of time.monotonic(); also of connecting and of redirects.

    Each redirect is checked like the first URL. No proxy is used. Raises RequestError, which begins with `subject`.
    """
    asked = url
    for _ in range(MAX_REDIRECTS + 1):
        place = _checked(url, hosts, subject)
        try:
            answer = _answer(place, hosts, max_bytes, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error) if isinstance(error, OSError) and str(error) else type(error).__name__
            raise RequestError(f"{subject} is {shown(asked)}, which cannot be downloaded: {reason}") from None
        if isinstance(answer, bytes):
            return answer
        url = answer.url
    raise RequestError(f"{subject} is {shown(asked)}, which is redirected more than {MAX_REDIRECTS} times")


@dataclass(frozen=True)
class _Redirect:
    url: str


def _checked(url: str, hosts: MediaHosts, subject: str) -> _Place:
    """Raises RequestError for a URL that may not be downloaded."""
    complaint = f"{subject} is {shown(url)}; expected"
    if len(url) > _MAX_URL or any(character <= " " or character in '\\"<>^`{|}\x7f' for character in url):
        raise RequestError(f"{complaint} a URL of at most {_MAX_URL} characters without spaces and the like")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RequestError(f"{complaint} a URL: {error}") from None
    host = parts.hostname or ""
    if parts.scheme not in SCHEMES or not host or "@" in parts.netloc or not host.isascii():
        raise RequestError(f"{complaint} http://HOST/PATH or https://HOST/PATH, without a user, HOST in ASCII")
    port = SCHEMES[parts.scheme] if port is None else port
    if not hosts.accepts(host, port):
        raise RequestError(f"{complaint} a host that the server's --allowed-media-domains lists")
    return _Place(url, parts.scheme, host.rstrip("."), port, _target(parts))


def _target(parts: SplitResult) -> str:
    path = quote(parts.path or "/", safe=_UNESCAPED)
    return f"{path}?{quote(parts.query, safe=_UNESCAPED)}" if parts.query else path


def _answer(place: _Place, hosts: MediaHosts, max_bytes: int, deadline: float) -> bytes | _Redirect:
    """Sends one request. Raises OSError, HTTPException and ValueError."""
    with _connected(place, hosts, deadline) as connection:
        sent = http.client.HTTPConnection(place.host, place.port)
        sent.sock = _TimedSocket(connection, deadline)
        default = place.port == SCHEMES[place.scheme]
        name = f"[{place.host}]" if ":" in place.host else place.host
        sent.request("GET", place.target, headers={**_HEADERS, "Host": name if default else f"{name}:{place.port}"})
        response = sent.getresponse()
        location = response.headers.get("Location")
        if response.status in _REDIRECTS and location:
            return _Redirect(urljoin(place.url, location))
        if response.status != HTTPStatus.OK:
            raise OSError(f"the host answered with status {response.status}")
        return _body(response, max_bytes)


def _body(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    """Returns the body. Reads at most max_bytes, whatever length the header says."""
    found = bytearray()
    while piece := response.read(min(_PIECE, max_bytes + 1 - len(found))):
        found += piece
        if len(found) > max_bytes:
            raise OSError(f"it has more than {max_bytes} bytes, the maximum")
    return bytes(found)


def _connected(place: _Place, hosts: MediaHosts, deadline: float) -> socket.socket:
    """Connects to one of the checked addresses; the name is not resolved again."""
    failure: OSError | None = None
    for address in hosts.resolve(place.host, place.port):
        try:
            connection = socket.create_connection((address, place.port), timeout=_remaining(deadline))
            break
        except OSError as error:
            failure = error
    else:
        raise failure or OSError("no address answers")
    if place.scheme != "https":
        return connection
    try:
        connection.settimeout(_remaining(deadline))
        return ssl.create_default_context().wrap_socket(connection, server_hostname=place.host)
    except BaseException:
        connection.close()
        raise


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the time for downloads is over")
    return remaining


class _TimedSocket:
    """The part of a socket that http.client uses, with one deadline for all of its calls."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def sendall(self, data: Any) -> None:
        """Sends all bytes."""
        self._connection.settimeout(_remaining(self._deadline))
        self._connection.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """Returns what http.client reads the answer from."""
        return io.BufferedReader(_TimedReader(self._connection, self._deadline))

    def close(self) -> None:
        """Does nothing: _answer() closes the connection."""


class _TimedReader(io.RawIOBase):
    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(_remaining(self._deadline))
        return self._connection.recv_into(buffer)
