"""Messages between an orchestrator and its workers: delivery, and events that close a connection."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from adaptrt.runtime.orchestrator.messages import connect, receive, send

MOST_BYTES = 1 << 20
NUM_OTHER_BYTES = len('{"text": ""}')


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    one, other = Pipe()
    with one, other:
        yield one, other


def received(ends: tuple[Connection, Connection], text: str) -> object:
    """Sends a text in a thread, because a long text waits for its reader."""
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(send, ends[0], text=text)
        found = receive(ends[1])
        if found is None:
            ends[1].close()
            assert isinstance(sent.exception(), OSError)
        return found


def test_fields_arrive_as_they_were_sent(ends: tuple[Connection, Connection]) -> None:
    fields = {"rank": 3, "failed": 'ü\n"quoted"', "sizes": [1, 2.5, None], "is_ready": True}
    send(ends[0], **fields)
    send(ends[0])
    assert [receive(ends[1]), receive(ends[1])] == [fields, {}]


@pytest.mark.parametrize(("num_bytes", "is_received"), [(MOST_BYTES, True), (MOST_BYTES + 1, False)])
def test_a_message_has_at_most_a_mebibyte(
    ends: tuple[Connection, Connection], num_bytes: int, is_received: bool
) -> None:
    text = "x" * (num_bytes - NUM_OTHER_BYTES)
    assert received(ends, text) == ({"text": text} if is_received else None)


def test_a_closed_end_sends_nothing_and_receives_nothing(ends: tuple[Connection, Connection]) -> None:
    send(ends[0], last=True)
    ends[0].close()
    assert [receive(ends[1]), receive(ends[1])] == [{"last": True}, None]
    with pytest.raises(OSError, match="handle is closed"):
        send(ends[0], more=True)
    with pytest.raises(OSError, match="Broken pipe"):
        send(ends[1], more=True)


def test_where_nothing_listens_an_error_is_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        connect(tmp_path / "place")
