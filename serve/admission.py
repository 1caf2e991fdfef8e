"""Admission of tenants' requests: refuses what a tenant may not have, and lets the others in by weight.

The executor starts waiting requests in an order of its own, so only a few requests wait there. All others wait here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from .errors import ApiError
from .tenants import Tenant, TenantRules

_NEWEST_SHARE: Final = 0.1
"""Weight of the newest measurement in a moving average."""
MAX_LEAD: Final = 4096
"""Tokens per weight that a tenant with a target may take before its turn."""


class Refused(Enum):
    """Reasons to refuse a request. The values are labels of metrics."""

    TOKENS = "tokens_per_minute"
    REQUESTS = "max_requests"
    FIRST_TOKEN = "first_token_seconds"
    QUEUE = "queue"


class _Phase(Enum):
    WAITING = 0
    ENTERED = 1
    """The executor has the request, and it has no token yet."""
    STARTED = 2
    ENDED = 3


class Ticket:
    """A request's place in the queue, and later in the executor. Made by AdmissionQueue.offer."""

    def __init__(
        self,
        number: int,
        tenant: TenantUse,
        group: Hashable,
        num_tokens: int,
        now: float,
        on_enter: Callable[[], None],
        on_lost: Callable[[ApiError], None],
    ) -> None:
        """See AdmissionQueue.offer."""
        self.number: Final = number
        self.tenant: Final = tenant
        self.group: Final = group
        self.num_tokens: Final = num_tokens
        self.arrived: Final = now
        self.on_enter: Final = on_enter
        self.on_lost: Final = on_lost
        limit = tenant.rules.tokens_per_minute
        self.reserved = num_tokens if limit is None else min(num_tokens, limit)
        """Tokens that were taken from the tenant's budget. A request above the whole budget takes all of it."""
        self.is_targeted: Final = tenant.rules.first_token_seconds is not None
        """True if its tenant had a target when it was offered."""
        self.phase = _Phase.WAITING


@dataclass(eq=False)
class TenantUse:
    """Current and past use of a tenant."""

    rules: Tenant
    budget: float
    """Tokens of tokens_per_minute that are left. Below 0 after an answer that was longer than the budget."""
    budget_time: float
    virtual: float = 0.0
    """Tokens per weight that its requests took."""
    waiting: list[tuple[float, int, Ticket]] = field(default_factory=list)
    """Heap of (-priority, number, ticket). It may have tickets that have ended."""
    num_waiting: int = 0
    num_unstarted: int = 0
    """Number of its requests that have no token yet."""
    start_interval: float | None = None
    """Mean time between first tokens while further requests wait."""
    last_start: float | None = None
    """Time of the last first token if requests have waited since then."""
    active: Counter[Hashable] = field(default_factory=Counter)
    """Number of tickets of each HTTP request, waiting or in the executor."""
    mean_seconds: float = 1.0
    """Duration of its requests."""
    num_admitted: int = 0
    refused: Counter[Refused] = field(default_factory=Counter)
    num_tokens: int = 0
    """Tokens of prompts and answers of requests that have ended."""
    first_tokens: Counter[bool] = field(default_factory=Counter)
    """Number of first tokens; True: within first_token_seconds."""

    def refill(self, now: float) -> None:
        """Adds the tokens of the time that has passed."""
        limit = self.rules.tokens_per_minute
        if limit is not None:
            self.budget = min(float(limit), self.budget + (now - self.budget_time) * limit / 60)
        self.budget_time = now

    def head(self) -> Ticket | None:
        """Returns the ticket that enters next; None: no request waits."""
        while self.waiting and self.waiting[0][2].phase is not _Phase.WAITING:
            heapq.heappop(self.waiting)
        return self.waiting[0][2] if self.waiting else None


class AdmissionQueue:
    """Bookkeeping of all tenants: no clock, no loop and no I/O. Times are in seconds, from any origin.

    Tenants take turns by weight: the next request is one of the tenant that has taken the fewest tokens per weight. A
    tenant with a target goes first once half of its time has passed, unless it has taken MAX_LEAD more than the others.
    """

    def __init__(self, rules: TenantRules, *, room: int, max_waiting: int, now: float) -> None:
        """room: maximum number of requests in the executor that have no token yet. max_waiting: of requests here."""
        self._rules = rules
        self._room = room
        self._max_waiting = max_waiting
        self._numbers = itertools.count()
        self._num_waiting = 0
        self._waiting: set[TenantUse] = set()
        """Tenants whose requests wait."""
        self._num_entered = 0
        self._virtual = 0.0
        self._uses = {tenant.name: _new_use(tenant, now) for tenant in rules}
        self._names = frozenset(self._uses)

    @property
    def rules(self) -> TenantRules:
        """The rules in force."""
        return self._rules

    @property
    def uses(self) -> Iterable[TenantUse]:
        """All tenants of the rules, and earlier ones that still have requests."""
        return self._uses.values()

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not entered the executor."""
        return self._num_waiting

    def replace(self, rules: TenantRules, now: float) -> None:
        """Puts new rules in force. Requests that were admitted stay admitted."""
        before, self._uses = self._uses, {}
        for tenant in rules:
            use = before.pop(tenant.name, None)
            if use is None:
                use = _new_use(tenant, now)
            use.refill(now)
            limit = tenant.tokens_per_minute
            if limit is not None and use.rules.tokens_per_minute is None:
                use.budget = limit
            use.rules = tenant
            self._uses[tenant.name] = use
        self._names = frozenset(self._uses)
        self._uses.update({name: use for name, use in before.items() if use.active})
        self._rules = rules

    def offer(
        self,
        tenant: Tenant,
        *,
        group: Hashable,
        num_tokens: int,
        priority: float,
        now: float,
        on_enter: Callable[[], None],
        on_lost: Callable[[ApiError], None],
    ) -> Ticket:
        """Queues a request. Call enter_waiting() then. Raises ApiError with status 429 for a request that is refused.

        group: the HTTP request that it belongs to. num_tokens: maximum number of tokens of its prompt and answers.
        priority: orders the requests of one tenant. on_enter: called when the request may enter the executor. on_lost:
        called with the error if it loses its place to another tenant.
        """
        use = self._uses[tenant.name]
        use.refill(now)
        refusal = self._refusal(use, group, num_tokens, now)
        if refusal is not None:
            raise self._refuse(use, *refusal)
        if self._num_waiting >= self._max_waiting:
            self._make_place(use, now)
        if not use.active:
            use.virtual = max(use.virtual, self._virtual)
        ticket = Ticket(next(self._numbers), use, group, num_tokens, now, on_enter, on_lost)
        use.budget -= ticket.reserved
        use.active[group] += 1
        use.num_admitted += 1
        use.num_unstarted += 1
        self._count_waiting(use, 1)
        heapq.heappush(use.waiting, (-priority, ticket.number, ticket))
        return ticket

    def enter_waiting(self, now: float) -> None:
        """Lets requests enter the executor while there is room."""
        while self._num_entered < self._room:
            ticket = self._next(now)
            if ticket is None:
                return
            use = ticket.tenant
            heapq.heappop(use.waiting)
            self._count_waiting(use, -1)
            ticket.phase = _Phase.ENTERED
            self._num_entered += 1
            self._virtual = use.virtual
            use.virtual += ticket.num_tokens / use.rules.weight
            ticket.on_enter()

    def start(self, ticket: Ticket, now: float) -> None:
        """Notes the first token of a request."""
        if ticket.phase is not _Phase.ENTERED:
            return
        use = ticket.tenant
        self._num_entered -= 1
        use.num_unstarted -= 1
        ticket.phase = _Phase.STARTED
        target = use.rules.first_token_seconds
        use.first_tokens[target is None or now - ticket.arrived <= target] += 1
        if use.last_start is not None:
            use.start_interval = _moved(use.start_interval, now - use.last_start)
        use.last_start = now if use.num_unstarted else None
        self.enter_waiting(now)

    def end(self, ticket: Ticket, num_tokens: int, now: float) -> None:
        """Ends a request in any phase; num_tokens: tokens that it took. Ending it again has no effect."""
        if ticket.phase is _Phase.ENDED:
            return
        use = ticket.tenant
        if ticket.phase is not _Phase.STARTED:
            use.num_unstarted -= 1
        if ticket.phase is _Phase.WAITING:
            self._count_waiting(use, -1)
        else:
            self._num_entered -= ticket.phase is _Phase.ENTERED
            use.virtual += (num_tokens - ticket.num_tokens) / use.rules.weight
            use.mean_seconds = _moved(use.mean_seconds, now - ticket.arrived)
        ticket.phase = _Phase.ENDED
        use.refill(now)
        use.budget += ticket.reserved - num_tokens
        use.num_tokens += num_tokens
        use.active[ticket.group] -= 1
        if not use.active[ticket.group]:
            del use.active[ticket.group]
        if not use.active and use.rules.name not in self._names:
            del self._uses[use.rules.name]
        self.enter_waiting(now)

    def _refusal(self, use: TenantUse, group: Hashable, num_tokens: int, now: float) -> tuple[Refused, float] | None:
        """Returns why a request is refused, and the seconds after which it may be accepted; None: it is accepted."""
        rules = use.rules
        if rules.max_requests is not None and group not in use.active and len(use.active) >= rules.max_requests:
            return Refused.REQUESTS, use.mean_seconds / rules.max_requests
        if rules.tokens_per_minute is not None:
            missing = min(num_tokens, rules.tokens_per_minute) - use.budget
            if missing > 0:
                return Refused.TOKENS, missing * 60 / rules.tokens_per_minute
        if rules.first_token_seconds is not None:
            late = _expected_wait(use, now) - rules.first_token_seconds
            if late > 0:
                return Refused.FIRST_TOKEN, late
        return None

    def _refuse(self, use: TenantUse, reason: Refused, seconds: float) -> ApiError:
        use.refused[reason] += 1
        rules = use.rules
        if reason is Refused.QUEUE:
            said = f"number of requests that wait is {self._max_waiting}; expected fewer"
        elif reason is Refused.TOKENS:
            said = f"the tokens of {rules.name} for this minute are used; accepted: {rules.tokens_per_minute} a minute"
        elif reason is Refused.REQUESTS:
            said = f"{rules.name} has {len(use.active)} requests; expected at most {rules.max_requests} at a time"
        else:
            said = f"the first token would come later than {rules.first_token_seconds} seconds after the request"
        return ApiError.overloaded(f"{said}: try again later", retry_after=math.ceil(max(1.0, seconds)))

    def _make_place(self, newcomer: TenantUse, now: float) -> None:
        """Takes the place of the tenant with the most waiting requests per weight. Raises ApiError if that is the
        newcomer's own tenant.
        """
        longest = max(self._waiting, key=lambda use: use.num_waiting / use.rules.weight)
        if longest.num_waiting / longest.rules.weight <= (newcomer.num_waiting + 1) / newcomer.rules.weight:
            raise self._refuse(newcomer, Refused.QUEUE, 1.0)
        waiting = [entry for entry in longest.waiting if entry[2].phase is _Phase.WAITING]
        last = max(waiting, key=lambda entry: entry[:2])[2]
        longest.num_admitted -= 1
        self.end(last, 0, now)
        last.on_lost(self._refuse(longest, Refused.QUEUE, 1.0))

    def _next(self, now: float) -> Ticket | None:
        heads = [ticket for use in self._waiting if (ticket := use.head()) is not None]
        least = min((ticket.tenant.virtual for ticket in heads), default=0.0)
        due = [ticket for ticket in heads if _is_due(ticket, now) and ticket.tenant.virtual - least <= MAX_LEAD]
        return min(due or heads, key=lambda ticket: (ticket.tenant.virtual, ticket.number), default=None)

    def _count_waiting(self, use: TenantUse, change: int) -> None:
        self._num_waiting += change
        use.num_waiting += change
        (self._waiting.add if use.num_waiting else self._waiting.discard)(use)


def _expected_wait(use: TenantUse, now: float) -> float:
    """Returns the expected time to the first token of the tenant's next request."""
    if use.start_interval is None or use.last_start is None:
        return 0.0
    return max(use.start_interval, now - use.last_start) * (use.num_unstarted + 1)


def _is_due(ticket: Ticket, now: float) -> bool:
    target = ticket.tenant.rules.first_token_seconds
    return target is not None and now - ticket.arrived >= target / 2


def _new_use(tenant: Tenant, now: float) -> TenantUse:
    return TenantUse(tenant, float(tenant.tokens_per_minute or 0), now)


def _moved(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST_SHARE * (newest - mean)
