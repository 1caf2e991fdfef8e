"""Records of HTTP requests and of the generations that they start."""

from __future__ import annotations

import ipaddress
import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import Scope

from .._core import FinishReason
from ..runtime.adapter_versions import VersionHold

_FINISH_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timed_out",
    FinishReason.CANCELLED: "cancelled",
}
POOLED = "pooled"
"""Finish reason of a request whose result is rows: an embedding, or classes."""
ERROR = "error"
"""Finish reason of a generation that failed."""
FINISH_REASONS = tuple(dict.fromkeys([*_FINISH_REASONS.values(), POOLED, ERROR]))
REQUEST_IDS = "1 to 128 printable ASCII characters without spaces"
"""Ids that clients may give to their requests."""
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def is_request_id(text: str) -> bool:
    """True for an id that a client may give. It cannot break a header or a line of the log."""
    return _REQUEST_ID.fullmatch(text) is not None


@dataclass(slots=True, eq=False)
class GenerationRecord:
    """One executor request. Times are those of time.monotonic()."""

    adapter: str | None
    """A name, or the digits of a task_id; None: the base model."""
    num_prompt_tokens: int
    began: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    newest_tokens: dict[int, float] = field(default_factory=dict)
    """Time of each sequence's newest token, by sequence index."""
    num_generated_tokens: int = 0
    finish_reason: str | None = None
    """None: the request runs; otherwise one of FINISH_REASONS."""

    @property
    def prompt_seconds(self) -> float:
        """Seconds until the first token, with those in the queue; 0: there is none."""
        return 0.0 if self.first_token is None else self.first_token - self.began

    @property
    def answer_seconds(self) -> float:
        """Seconds from the first token to the newest one."""
        if self.first_token is None:
            return 0.0
        return max(self.newest_tokens.values(), default=self.first_token) - self.first_token

    def end(self, reason: FinishReason | None, *, is_pooled: bool = False) -> None:
        """Sets the finish reason. reason: None if the request failed."""
        self.finish_reason = ERROR if reason is None else POOLED if is_pooled else _FINISH_REASONS[reason]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    is_named: bool = False
    """True: the client gave the id."""
    refused_field: str | None = None
    """Field of the request that was refused; the client may have chosen its name."""
    client: str = ""
    """Client that slow work is counted for: the key that it sent, or else its address."""
    began: float = field(default_factory=time.monotonic)
    status: int | None = None
    """Status of the answer; None: not answered yet."""
    is_complete: bool = False
    """True if the whole answer has been sent."""
    generations: list[GenerationRecord] = field(default_factory=list)
    may_change_adapters: bool = True
    """False: the request's key is not an admin key, and there are some."""
    versions: list[VersionHold] = field(default_factory=list)
    """Keeps the adapters' versions that answer the request."""

    def name(self, request_id: str | None) -> None:
        """Takes an id that a field of the request gives. A header's precedes it."""
        if request_id is not None and not self.is_named:
            self.id, self.is_named = request_id, True

    @property
    def outcome(self) -> str:
        """One of OUTCOMES."""
        if self.status is None or self.status >= 500:
            return "failed"
        if self.status == 429:
            return "overloaded"
        if self.status == 499 or not self.is_complete:
            return "cancelled"
        if self.status >= 400:
            return "refused"
        # A stream's status is sent before an error can occur.
        return "failed" if any(made.finish_reason == ERROR for made in self.generations) else "ok"


def client_of(scope: Scope) -> str:
    """Returns the client of a request without a key."""
    peer = scope.get("client")
    return "" if peer is None else peer_client(peer[0])


def peer_client(host: str) -> str:
    """Returns the name of a client without a key, from its address. An IPv6 network (/64) is one client."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a proxy may send a name
        return f"address {host}"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"address {ipaddress.IPv6Network((int(address) >> 64 << 64, 64))}"
        address = address.ipv4_mapped
    return f"address {address}"


OUTCOMES = ("ok", "refused", "overloaded", "cancelled", "failed")

current_request: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)
"""The HTTP request that this task answers. Generations that begin in the task belong to it."""


def newest_generation() -> GenerationRecord | None:
    """Returns the record of the request that this task has queued last; None: it has none."""
    record = current_request.get()
    return record.generations[-1] if record is not None and record.generations else None
