"""Shows what the limits and targets of tenants cost others: real admission, a simple model of the executor.

    python bench/serving/tenant_simulation.py [requests]

Time is virtual, and a step takes what scheduler_simulation assumes. docs/scheduling.md has the model and results.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import quantiles

from adaptrt.serve.admission import AdmissionQueue, Refused, Ticket
from adaptrt.serve.errors import ApiError
from adaptrt.serve.tenants import OTHERS, Tenant, TenantRules

BATCH, STEP_TOKENS = 16, 512
WEIGHTS_SECONDS, TOKEN_SECONDS, ADAPTER_SECONDS = 0.020, 0.00093, 0.001
MAX_WAITING = 1000
RATES = {"fast": 0.3, "steady": 1.2, "flood": 12.0}
"""Requests per second of each tenant. The machine answers about 4.5 requests per second."""


@dataclass(eq=False)
class SimulatedRequest:
    """A request and its progress."""

    tenant: str
    arrived: float
    prompt: int
    answer: int
    ticket: Ticket | None = None
    generated: int = 0


@dataclass
class Outcome:
    """Results of one run."""

    first_tokens: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, Refused]] = field(default_factory=Counter)
    seconds: float = 0.0


class Server:
    """An admission queue and an executor that starts the requests of the adapter with the fewest tokens first."""

    def __init__(self, rules: TenantRules) -> None:
        self.now = 0.0
        self.outcome = Outcome()
        self._rules = rules
        self._queue = AdmissionQueue(rules, room=BATCH, max_waiting=MAX_WAITING, now=0.0)
        self._unstarted: list[SimulatedRequest] = []
        self._running: list[SimulatedRequest] = []
        self._computed: Counter[str] = Counter()

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to compute."""
        return not self._unstarted and not self._running

    def arrive(self, request: SimulatedRequest) -> None:
        """Takes in a request, or refuses it. Its adapter has its tenant's name."""
        rules = next((tenant for tenant in self._rules.tenants if tenant.name == request.tenant), self._rules.others)
        try:
            request.ticket = self._queue.offer(
                rules,
                group=request,
                num_tokens=request.prompt + 128,
                priority=0.5,
                now=self.now,
                on_enter=lambda: self._unstarted.append(request),
                on_lost=lambda _: None,
            )
        except ApiError:
            return
        self._queue.enter_waiting(self.now)

    def step(self) -> None:
        """Computes one step."""
        tokens = len(self._running)
        started: list[SimulatedRequest] = []
        while self._unstarted and len(self._running) + len(started) < BATCH:
            targeted = [one for one in self._unstarted if one.ticket is not None and one.ticket.is_targeted]
            first = min(targeted or self._unstarted, key=lambda one: (self._computed[one.tenant], one.arrived))
            if tokens + first.prompt > STEP_TOKENS:
                break
            self._unstarted.remove(first)
            started.append(first)
            tokens += first.prompt
            self._computed[first.tenant] += first.prompt
        self._running += started
        adapters = len({one.tenant for one in self._running})
        self.now += max(WEIGHTS_SECONDS, TOKEN_SECONDS * tokens) + ADAPTER_SECONDS * adapters
        for one in started:
            assert one.ticket is not None
            self.outcome.first_tokens[one.tenant].append(self.now - one.arrived)
            self._queue.start(one.ticket, self.now)
        for one in tuple(self._running):
            one.generated += 1
            self._computed[one.tenant] += 1
            if one.generated == one.answer:
                self._end(one)

    def finish(self) -> Outcome:
        """Returns the results."""
        for use in self._queue.uses:
            self.outcome.refused.update({(use.rules.name, reason): count for reason, count in use.refused.items()})
        self.outcome.seconds = self.now
        return self.outcome

    def _end(self, one: SimulatedRequest) -> None:
        self._running.remove(one)
        assert one.ticket is not None
        self.outcome.tokens[one.tenant] += one.prompt + one.generated
        self._queue.end(one.ticket, one.prompt + one.generated, self.now)


def simulate(rules: TenantRules, num_requests: int) -> Outcome:
    """Runs requests of all tenants with gaps from an exponential distribution, until the last one has arrived."""
    drawn = random.Random(1)
    server = Server(rules)
    names, rates = list(RATES), list(RATES.values())
    arrival = 0.0
    for _ in range(num_requests):
        arrival += drawn.expovariate(sum(rates))
        while server.now < arrival and not server.is_idle:
            server.step()
        server.now = max(server.now, arrival)
        (name,) = drawn.choices(names, rates)
        server.arrive(SimulatedRequest(name, arrival, drawn.randint(8, 256), drawn.randint(8, 128)))
    return server.finish()


def row(name: str, outcome: Outcome) -> str:
    """Formats a run as a row of the table."""
    cells = [name]
    total = sum(outcome.tokens.values())
    for tenant in RATES:
        waits = outcome.first_tokens[tenant]
        cuts = quantiles(waits, n=100) if len(waits) > 1 else [0.0] * 99
        num_refused = sum(count for (refused, _), count in outcome.refused.items() if refused == tenant)
        cells.append(
            f"{cuts[49]:.2f}, {cuts[98]:.2f} s; {100 * outcome.tokens[tenant] / total:.0f}%; {num_refused} refused"
        )
    cells.append(f"{total / outcome.seconds:.0f}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Prints a row for each set of rules."""
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    alike = {name: Tenant(name) for name in RATES}
    runs = {
        "one tenant": TenantRules((), Tenant(OTHERS)),
        "three tenants": TenantRules(tuple(alike.values())),
        "steady has weight 3": TenantRules((alike["fast"], Tenant("steady", weight=3), alike["flood"])),
        "fast has a target of 1 s": TenantRules(
            (Tenant("fast", first_token_seconds=1.0), alike["steady"], alike["flood"])
        ),
        "flood has a target of 1 s": TenantRules(
            (alike["fast"], alike["steady"], Tenant("flood", first_token_seconds=1.0))
        ),
        "flood has 12,000 tokens a minute": TenantRules(
            (alike["fast"], alike["steady"], Tenant("flood", tokens_per_minute=12_000))
        ),
        "flood has 4 requests at a time": TenantRules(
            (alike["fast"], alike["steady"], Tenant("flood", max_requests=4))
        ),
    }
    print("| rules | " + " | ".join(f"{name}: {rate} requests/s" for name, rate in RATES.items()) + " | tokens/s |")
    print("|" + "---|" * (len(RATES) + 2))
    for name, rules in runs.items():
        print(row(name, simulate(rules, num_requests)), flush=True)


if __name__ == "__main__":
    main()
