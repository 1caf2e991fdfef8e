"""Messages between an orchestrator and its workers, except engine steps: JSON over a local socket."""

from __future__ import annotations

import json
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

_MOST_BYTES: Final = 1 << 20


def connect(place: Path) -> Connection:
    """Connects to the orchestrator that listens at `place`. Raises OSError."""
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(place))
    return Connection(made.detach())


def send(connection: Connection, **fields: Any) -> None:
    """Sends a message. Raises OSError if the other end is closed."""
    connection.send_bytes(json.dumps(fields).encode())


def receive(connection: Connection) -> dict[str, Any] | None:
    """Returns the next message; None: the other end is closed."""
    try:
        fields: dict[str, Any] = json.loads(connection.recv_bytes(_MOST_BYTES))
    except (EOFError, OSError):
        return None
    return fields
