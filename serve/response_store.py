"""Keeps responses in memory, so that later requests can continue or read them."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

OVERHEAD_BYTES: Final = 1024
"""Memory of a stored response without its texts."""


_HOME_BYTES: Final = 4
_ID: Final = re.compile(rf"resp_(?P<home>[0-9a-f]{{{2 * _HOME_BYTES}}})[0-9a-f]{{32}}")


def home_of(replica: str) -> str:
    """Returns the part of responses' ids that stands for the replica that stores them."""
    return hashlib.blake2b(replica.encode(), digest_size=_HOME_BYTES).hexdigest()


def new_response_id(home: str = "") -> str:
    """Makes a unique id. home: of the replica that stores the response; "": there is only one server."""
    return f"resp_{home}{uuid.uuid4().hex}"


def home_in(response_id: str) -> str:
    """Returns the home in an id; "": it has none."""
    found = _ID.fullmatch(response_id)
    return "" if found is None else found["home"]


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended. Its parts are JSON, because objects take many times as much memory."""

    owner: str
    """The key of the client that made it; empty: the server has no keys."""
    status: str
    body: bytes
    """The response."""
    input_items: bytes
    """The request's own input: a list of items with ids."""
    messages: bytes
    """The whole conversation up to this answer, without instructions: a list of a chat's messages."""

    @property
    def num_bytes(self) -> int:
        """Memory of the response."""
        return OVERHEAD_BYTES + len(self.body) + len(self.input_items) + len(self.messages)


class ResponseStore:
    """Responses by id. The least recently used ones leave first."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """max_responses: 0: nothing is kept. max_bytes: sum of num_bytes."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    @property
    def is_on(self) -> bool:
        """True if responses can be kept."""
        return self._max_responses > 0

    @property
    def num_bytes(self) -> int:
        """Sum of the sizes of all responses."""
        return self._num_bytes

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keeps a response. One that is larger than the store is not kept."""
        if response.num_bytes > self._max_bytes or not self.is_on:
            return
        self._responses[response_id] = response
        self._num_bytes += response.num_bytes
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            _, oldest = self._responses.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Returns a response of the owner, and counts as its use; None: there is none."""
        response = self._responses.get(response_id)
        if response is None or response.owner != owner:
            return None
        self._responses.move_to_end(response_id)
        return response

    def remove(self, response_id: str, owner: str) -> bool:
        """Removes a response of the owner. Returns False if there is none."""
        if self.find(response_id, owner) is None:
            return False
        self._num_bytes -= self._responses.pop(response_id).num_bytes
        return True
