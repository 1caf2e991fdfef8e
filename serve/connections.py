"""Limits of connections: how many may be open, and how long each may keep the server waiting."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Final, Protocol

from .options import ServerLimits

LONGEST_INTERVAL: Final = 5.0
"""Maximum number of seconds between two checks of the connections."""
LOOKS_PER_LIMIT: Final = 4
"""Minimum number of checks within the shortest limit."""


class Phase(Enum):
    """The side that a connection waits for."""

    HEAD = "head"
    """The client: nothing has arrived yet, or a request's head has begun and is incomplete."""
    BODY = "body"
    """The client: the head has arrived, and the body is incomplete."""
    ANSWER = "answer"
    """The server: a request is being answered. No limit ends this phase."""
    IDLE = "idle"
    """The client: the last request was answered, and the next one has not begun."""


_CLIENT_MAY_LEAVE: Final = frozenset({Phase.HEAD, Phase.IDLE})
"""No request is lost if the connection ends in one of these phases."""


class Connection(Protocol):
    """The part of a connection that its watch needs."""

    phase: Phase
    phase_since: float
    """Time of the loop when the phase began."""

    def is_reading_paused(self) -> bool:
        """True while the server takes nothing from the client."""

    def num_stalled_bytes(self) -> int:
        """Bytes that wait for the client to read and to which the server adds nothing now."""

    def refuse_late(self) -> None:
        """Ends the connection because its client is late. Sends an error if the client has sent part of a request."""

    def abort(self) -> None:
        """Ends the connection at once."""


class ConnectionWatch:
    """All connections of one server, with one timer that runs while there are any. Call all methods on the event loop.

    Limits are accurate to the timer's interval: a quarter of the shortest limit, at most LONGEST_INTERVAL.
    """

    def __init__(self, limits: ServerLimits, max_connections: int) -> None:
        self._max_connections = max_connections
        self._seconds = {
            Phase.HEAD: limits.header_seconds,
            Phase.BODY: limits.body_seconds,
            Phase.IDLE: limits.keep_alive_seconds,
        }
        self._write_seconds = limits.write_seconds
        self._interval = min(LONGEST_INTERVAL, min(*self._seconds.values(), self._write_seconds) / LOOKS_PER_LIMIT)
        self._connections: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        """Connections without a request, the longest-waiting one first."""
        self._stalled: dict[Connection, tuple[int, float]] = {}
        """Number of unread bytes at the last check, and the time since when it has not decreased."""
        self._timer: asyncio.TimerHandle | None = None

    def admit(self, connection: Connection) -> bool:
        """Adds a new connection. Returns False if the limit is reached and all connections have requests.

        Otherwise the connection that has waited longest without a request is closed to make room.
        """
        if len(self._connections) >= self._max_connections:
            longest = next(iter(self._idle), None)
            if longest is None:
                return False
            self.forget(longest)
            longest.abort()
        self._connections[connection] = None
        self.enter(connection, Phase.HEAD)
        if self._timer is None:
            self._schedule()
        return True

    def enter(self, connection: Connection, phase: Phase) -> None:
        """Records the connection's new phase."""
        if connection not in self._connections:
            return
        connection.phase = phase
        connection.phase_since = asyncio.get_running_loop().time()
        if phase not in _CLIENT_MAY_LEAVE:
            self._idle.pop(connection, None)
        elif connection not in self._idle:
            self._idle[connection] = None

    def note_progress(self, connection: Connection) -> None:
        """Called when the client has read enough that the server may write again."""
        self._stalled.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        """Removes a connection that has ended; does nothing for unknown ones."""
        self._connections.pop(connection, None)
        self._idle.pop(connection, None)
        self._stalled.pop(connection, None)
        if not self._connections and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._look)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in list(self._connections):
            if self._is_unread(connection, now):
                connection.abort()
            elif self._is_late(connection, now):
                connection.refuse_late()
        self._schedule()

    def _is_late(self, connection: Connection, now: float) -> bool:
        limit = self._seconds.get(connection.phase)
        if limit is None:
            return False
        if connection.is_reading_paused():  # the server does not read, so the client could not send
            connection.phase_since = now
        return now - connection.phase_since >= limit

    def _is_unread(self, connection: Connection, now: float) -> bool:
        size = connection.num_stalled_bytes()
        if size == 0:
            self._stalled.pop(connection, None)
            return False
        last = self._stalled.get(connection)
        if last is None or size < last[0]:
            self._stalled[connection] = (size, now)
            return False
        return now - last[1] >= self._write_seconds
