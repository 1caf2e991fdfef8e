"""HTTP/1.1 as uvicorn speaks it with httptools, with a limit on the size of a request's head."""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

_TOO_LARGE: Final = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


class _HeadTooLargeError(Exception):
    """Raised inside the parser, which makes a request that is not HTTP of it."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. A request whose target and headers are too large is answered with 431, and the connection ends.

    uvicorn limits heads with h11 alone, which takes several times as long to write a piece of a stream.
    """

    max_head_bytes: ClassVar[int]
    """Of the target, and of the names and values of headers together. For a subclass to set: uvicorn makes one object
    a connection."""

    _head_bytes = 0
    """Of a head that has not ended, beyond the piece that it began in."""
    _is_in_head = False
    _is_too_large = False
    _asks_to_upgrade = False
    """Whether the head that came last asks for another protocol."""

    def data_received(self, data: bytes) -> None:
        """Refuses a head before all of it is there: httptools keeps a header until its end has come."""
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._is_too_large = True
                self.send_400_response("")
                return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._asks_to_upgrade:
                self._begin_again(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        """What comes from now on is the head's."""
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Refuses a head that came in one piece. Raises _HeadTooLargeError for it."""
        self._is_in_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.max_head_bytes:
            self._is_too_large = True
            raise _HeadTooLargeError
        # CONNECT asks by its name, which it would still have when it is read again.
        self._asks_to_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._asks_to_upgrade:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Not of a head that is read again."""
        if not self._asks_to_upgrade:
            super().on_message_complete()

    def _begin_again(self, rest: bytes) -> None:
        """Reads a request that asks for another protocol as one that does not: clients such as Java's ask for HTTP/2
        with each first request of a connection, and the parser takes no body and no further request after that."""
        head = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1\r\n"]
        head += [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def send_400_response(self, msg: str) -> None:
        """Answers what the parser refused, and closes the connection."""
        if not self._is_too_large:
            super().send_400_response(msg)
            return
        text = f"the request's target and headers have more than {self.max_head_bytes} bytes".encode()
        self.transport.write(
            STATUS_LINE[_TOO_LARGE]
            + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(text)
            + text
        )
        self.transport.close()
