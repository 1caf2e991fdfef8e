"""What becomes of a request: one record of an HTTP request, and one of each generation that it starts."""

from __future__ import annotations

import ipaddress
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from .._core import FinishReason

_FINISH_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timed_out",
    FinishReason.CANCELLED: "cancelled",
}
POOLED = "pooled"
"""Of one that ended in rows: an embedding, or classes."""
ERROR = "error"
"""Of a generation that failed."""
FINISH_REASONS = tuple(dict.fromkeys([*_FINISH_REASONS.values(), POOLED, ERROR]))


@dataclass(slots=True, eq=False)
class GenerationRecord:
    """One request of the executor. Times are those of time.monotonic()."""

    adapter: str | None
    """A name, or the digits of a task_id; None: the base."""
    num_prompt_tokens: int
    began: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    newest_tokens: dict[int, float] = field(default_factory=dict)
    """When each sequence got its newest token, by its index."""
    num_generated_tokens: int = 0
    finish_reason: str | None = None
    """None: it runs; else one of FINISH_REASONS."""

    def end(self, reason: FinishReason | None, *, is_pooled: bool = False) -> None:
        """None: it failed."""
        self.finish_reason = ERROR if reason is None else POOLED if is_pooled else _FINISH_REASONS[reason]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    client: str = ""
    """Client that slow work is counted for: the key that it gave, or else its address."""
    began: float = field(default_factory=time.monotonic)
    status: int | None = None
    """None: nothing was answered yet."""
    is_complete: bool = False
    """The whole answer has been sent."""
    generations: list[GenerationRecord] = field(default_factory=list)

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
        # The status of a stream has gone out before anything could go wrong.
        return "failed" if any(made.finish_reason == ERROR for made in self.generations) else "ok"


def peer_client(host: str) -> str:
    """The name of a client that gave no key, from its address; a network of IPv6 (/64) is one client."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a proxy's name for it
        return f"address {host}"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"address {ipaddress.IPv6Network((int(address) >> 64 << 64, 64))}"
        address = address.ipv4_mapped
    return f"address {address}"


OUTCOMES = ("ok", "refused", "overloaded", "cancelled", "failed")

current_request: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)
"""Of the HTTP request that this task answers; generations that begin there are its own."""
