"""HTTP/1.1 with uvicorn and httptools, plus limits on a request's head and on the time of a connection.

uvicorn's entry in pyproject.toml has an upper bound because this module uses parts of HttpToolsProtocol that may
change.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .connections import ConnectionWatch, Phase
from .errors import RETRY_AFTER_SECONDS


class _HeadTooLargeError(Exception):
    """Raised inside httptools' parser, which reports it as an invalid request."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. It ends with 431 for a head that is too large, 408 for a late request, and 503 if there are too
    many connections.

    uvicorn limits heads only with h11, which takes several times as long to write a piece of a stream.
    """

    max_head_bytes: ClassVar[int]
    """Maximum size of the target and of all header names and values together. A subclass sets it, because uvicorn makes
    one object per connection.
    """
    watch: ClassVar[ConnectionWatch]
    """The watch over all connections of the server. A subclass sets it."""

    phase = Phase.HEAD
    phase_since = 0.0

    _head_bytes = 0
    """Size of an incomplete head, without the piece of data that it began in."""
    _is_in_head = False
    _is_in_body = False
    _is_too_large = False
    _asks_to_upgrade = False
    """True if the last head asks for another protocol."""
    _is_ending = False
    """True while the server shuts down: the connection closes after the answer to the last complete request."""

    # asyncio's base class declares a BaseTransport; uvicorn narrows it too.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Answers 503 if there are too many connections."""
        super().connection_made(transport)
        if not self.watch.admit(self):
            self._end_with(HTTPStatus.SERVICE_UNAVAILABLE, "the server has too many connections; try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        """Called once when the connection has ended for any reason."""
        self.watch.forget(self)
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Called when the client has read most of the waiting data."""
        self.watch.note_progress(self)
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Rejects a head that is too large before it is complete: httptools buffers a header until its end arrives."""
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._is_too_large = True
                self.send_400_response("")
                return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._asks_to_upgrade:
                self._begin_again(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
            return
        self._note_phase()

    def on_message_begin(self) -> None:
        """Called when a request begins: the next bytes belong to its head."""
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Rejects a head that arrived in one piece. Raises _HeadTooLargeError for one that is too large."""
        self._is_in_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.max_head_bytes:
            self._is_too_large = True
            raise _HeadTooLargeError
        # CONNECT asks by its method, which it would keep when it is read again.
        self._asks_to_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._asks_to_upgrade:
            super().on_headers_complete()
            self._is_in_body = True

    def on_message_complete(self) -> None:
        """Called when a request is complete; ignores a head that is read again."""
        if not self._asks_to_upgrade:
            super().on_message_complete()
            self._is_in_body = False
            if self.phase is Phase.BODY:  # the next request may have begun in the same piece of data
                self._note_phase()

    def on_response_complete(self) -> None:
        """Called when the whole answer has been handed to the transport."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the watch ends idle connections
        self._note_phase()

    def is_reading_paused(self) -> bool:
        """True while the application has not consumed the received data."""
        return self.flow.read_paused

    def num_stalled_bytes(self) -> int:
        """Returns the bytes of answers that wait for the client; 0 while the server may add to them at any time."""
        may_write = self.phase is Phase.ANSWER and not self.flow.write_paused and not self.transport.is_closing()
        return 0 if may_write else self.transport.get_write_buffer_size()

    def refuse_late(self) -> None:
        """Answers 408 if part of a request has arrived and no part of its answer has been sent."""
        if self.transport.is_closing():
            return
        if self._has_part_of_request():
            self._end_with(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive within the server's time limits")
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Called when the server shuts down. Answers complete requests; an incomplete one gets 503."""
        self._is_ending = True
        if self.phase is not Phase.ANSWER and self._has_part_of_request():
            self._refuse_part()
        else:
            super().shutdown()

    def abort(self) -> None:
        """Ends the connection without writing the waiting data."""
        self.transport.abort()

    def _has_part_of_request(self) -> bool:
        """True if the current request is incomplete and no part of its answer has been sent."""
        has_begun = self._is_in_head or self._is_in_body
        return has_begun and (self.phase is Phase.HEAD or not self.cycle.response_started)

    def _refuse_part(self) -> None:
        if not self.transport.is_closing():
            self._end_with(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down; try again later")

    def _note_phase(self) -> None:
        phase = self._find_phase()
        if phase is not self.phase:
            self.watch.enter(self, phase)
            if self._is_ending and phase is Phase.BODY:  # it arrived with an earlier request, answered by now
                self._refuse_part()

    def _find_phase(self) -> Phase:
        # Answers keep the order of requests: an earlier answer is being written while the pipeline is not empty.
        if self.cycle is not None and (self.pipeline or not self.cycle.response_complete):
            return Phase.BODY if self._is_in_body and not self.pipeline else Phase.ANSWER
        if self._is_in_body:  # the request was rejected before it was complete
            return Phase.BODY
        return Phase.HEAD if self._is_in_head or self.cycle is None else Phase.IDLE

    def _begin_again(self, rest: bytes) -> None:
        """Reads a request that asks for another protocol as one that does not. Clients such as Java's ask for HTTP/2 in
        the first request of each connection, and the parser would accept no body and no further request after that.
        """
        head = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1\r\n"]
        head += [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def send_400_response(self, msg: str) -> None:
        """Answers a request that the parser rejected, and closes the connection."""
        if self._is_too_large:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._end_with(status, f"the request's target and headers have more than {self.max_head_bytes} bytes")
        else:
            super().send_400_response(msg)

    def _end_with(self, status: HTTPStatus, text: str) -> None:
        retry = b"retry-after: %d\r\n" % RETRY_AFTER_SECONDS if status is HTTPStatus.SERVICE_UNAVAILABLE else b""
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            + retry
            + b"content-length: %d\r\n\r\n" % len(text)
            + text.encode()
        )
        self.transport.close()
