"""Admission of tenants' requests in virtual time: shares, limits, targets, and what is refused."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptrt.serve.admission import MAX_LEAD, AdmissionQueue, Refused, Ticket
from adaptrt.serve.errors import ApiError
from adaptrt.serve.tenants import OTHERS, Tenant, TenantRules


class World:
    """A queue and a clock."""

    def __init__(self, *tenants: Tenant, room: int = 1, max_waiting: int = 1000) -> None:
        self.now = 0.0
        self.rules = TenantRules(tenants)
        self.queue = AdmissionQueue(self.rules, room=room, max_waiting=max_waiting, now=0.0)
        self.entered: list[Ticket] = []
        self.lost: list[ApiError] = []

    def offer(self, name: str, num_tokens: int = 10, *, priority: float = 0.5, group: object = None) -> Ticket:
        tenant = next(one for one in self.queue.rules if one.name == name)
        made: list[Ticket] = []
        ticket = self.queue.offer(
            tenant,
            group=object() if group is None else group,
            num_tokens=num_tokens,
            priority=priority,
            now=self.now,
            on_enter=lambda: self.entered.append(made[0]),
            on_lost=self.lost.append,
        )
        made.append(ticket)
        self.queue.enter_waiting(self.now)
        return ticket

    def finish(self, ticket: Ticket, num_tokens: int | None = None, seconds: float = 1.0) -> None:
        self.now += seconds
        self.queue.start(ticket, self.now)
        self.queue.end(ticket, ticket.num_tokens if num_tokens is None else num_tokens, self.now)

    def refusal(self, name: str, num_tokens: int = 10) -> tuple[Refused, int]:
        """Returns why an offer is refused, and the seconds of Retry-After."""
        use = next(use for use in self.queue.uses if use.rules.name == name)
        before = Counter(use.refused)
        with pytest.raises(ApiError) as caught:
            self.offer(name, num_tokens)
        assert caught.value.status == 429
        (reason,) = (use.refused - before).elements()
        return reason, int(caught.value.headers["Retry-After"])


def test_waiting_tenants_get_tokens_in_proportion_to_their_weights() -> None:
    world = World(Tenant("a", weight=3), Tenant("b"))
    for name, num_tokens in (("a", 30), ("b", 10)):
        for _ in range(200):
            world.offer(name, num_tokens)
    tokens: Counter[str] = Counter()
    for i in range(100):
        ticket = world.entered[i]
        tokens[ticket.tenant.rules.name] += ticket.num_tokens
        world.finish(ticket)
    assert tokens["a"] / tokens["b"] == pytest.approx(3, rel=0.1)


def test_answers_shorter_than_allowed_count_with_their_length() -> None:
    world = World(Tenant("short"), Tenant("long"))
    for name in ("short", "long"):
        for _ in range(100):
            world.offer(name, 100)
    for i in range(66):
        ticket = world.entered[i]
        world.finish(ticket, 50 if ticket.tenant.rules.name == "short" else 100)
    counts = Counter(ticket.tenant.rules.name for ticket in world.entered)
    assert counts["short"] == pytest.approx(2 * counts["long"], abs=3)


def test_a_tenant_that_was_away_gets_no_credit() -> None:
    world = World(Tenant("a"), Tenant("b"))
    for _ in range(50):
        world.offer("a")
    for i in range(20):
        world.finish(world.entered[i])
    for _ in range(10):
        world.offer("b")
    for i in range(20, 30):
        world.finish(world.entered[i])
    counts = Counter(ticket.tenant.rules.name for ticket in world.entered[20:31])
    assert abs(counts["a"] - counts["b"]) <= 2


def test_priority_orders_the_requests_of_one_tenant_only() -> None:
    world = World(Tenant("a"), Tenant("b"))
    running = world.offer("a")
    low, high = world.offer("a", priority=0.1), world.offer("a", priority=0.9)
    other = world.offer("b", priority=0.0)
    for ticket in (running, other, high, low):
        assert world.entered[-1] is ticket
        world.finish(ticket)


def test_tokens_of_a_minute_are_spent_and_come_back() -> None:
    world = World(Tenant("a", tokens_per_minute=600), room=9)
    first = world.offer("a", 500)
    assert world.refusal("a", 200) == (Refused.TOKENS, 10)
    world.finish(first, 100, seconds=0)  # 400 of the reserved tokens come back
    second = world.offer("a", 500)
    world.now += 9.9
    assert world.refusal("a", 100) == (Refused.TOKENS, 1)
    world.now += 0.2
    world.offer("a", 100)
    world.finish(second)
    # A request above the whole budget takes all of it, once it is full.
    assert world.refusal("a", 10_000)[0] is Refused.TOKENS
    world.now += 60
    world.finish(world.offer("a", 10_000), 1200, seconds=0)
    assert world.refusal("a", 1) == (Refused.TOKENS, 61)
    world.offer(OTHERS, 10_000)


def test_requests_at_a_time_are_http_requests() -> None:
    world = World(Tenant("a", max_requests=2), room=9)
    one = object()
    tickets = [world.offer("a", group=one) for _ in range(5)]
    world.offer("a")
    assert world.refusal("a") == (Refused.REQUESTS, 1)
    world.offer("a", group=one)
    for ticket in tickets:
        world.finish(ticket)
    assert world.refusal("a")[0] is Refused.REQUESTS
    world.finish(world.entered[-1])
    world.offer("a")


def test_a_target_moves_a_request_forward_after_half_of_its_time() -> None:
    for target, place in ((4.0, 2), (None, 11)):
        world = World(Tenant("fast", weight=0.1, first_token_seconds=target))
        world.offer("fast", 10)
        for _ in range(20):
            world.offer(OTHERS)
        fast = world.offer("fast", 10)
        for i in range(15):
            world.finish(world.entered[i])
        assert abs(world.entered.index(fast) - place) <= 1


def test_a_target_lets_a_tenant_take_only_so_much_before_its_turn() -> None:
    world = World(Tenant("fast", first_token_seconds=0.001))
    for name in ("fast", OTHERS):
        for _ in range(50):
            world.offer(name, 1000)
    for i in range(50):
        world.finish(world.entered[i])
    counts = Counter(ticket.tenant.rules.name for ticket in world.entered)
    assert MAX_LEAD // 1000 <= counts["fast"] - counts[OTHERS] <= MAX_LEAD // 1000 + 2


def test_a_target_that_cannot_be_met_is_refused_with_the_time_until_it_can() -> None:
    world = World(Tenant("fast", first_token_seconds=5.0))
    tickets = [world.offer("fast") for _ in range(8)]
    for ticket in tickets[:6]:  # a first token every 2 seconds
        world.finish(ticket, seconds=2.0)
    assert world.refusal("fast") == (Refused.FIRST_TOKEN, 1)
    world.offer(OTHERS)
    world.queue.end(tickets[7], 0, world.now)
    world.offer("fast")
    world.now += 9.0
    assert world.refusal("fast") == (Refused.FIRST_TOKEN, 22)


def test_a_full_queue_takes_the_place_of_the_tenant_with_the_most() -> None:
    world = World(Tenant("a"), Tenant("b"), max_waiting=3)
    world.offer("a")
    flood = [world.offer("a") for _ in range(3)]
    assert world.refusal("a")[0] is Refused.QUEUE
    world.offer("b")
    assert [error.status for error in world.lost] == [429]
    world.queue.end(flood[-1], 0, world.now)  # it has ended already
    assert world.queue.num_waiting == 3
    assert world.refusal("b")[0] is Refused.QUEUE  # both have about as many
    for ticket in flood[:2]:
        world.queue.end(ticket, 0, world.now)
    world.offer("a")


def test_new_rules_hold_for_requests_to_come() -> None:
    world = World(Tenant("a"), Tenant("gone"), room=3)
    running, leaving = world.offer("a", 50), world.offer("gone")
    world.queue.replace(TenantRules((Tenant("a", tokens_per_minute=100, max_requests=1), Tenant("new"))), world.now)
    assert world.refusal("a")[0] is Refused.REQUESTS
    assert [use.rules.name for use in world.queue.uses] == ["a", "new", OTHERS, "gone"]
    world.finish(leaving)
    assert [use.rules.name for use in world.queue.uses] == ["a", "new", OTHERS]
    world.finish(running, 50)
    world.offer("a", 100)
    world.queue.replace(TenantRules((Tenant("a"),)), world.now)
    world.offer("a", 10**6)


LIMITS = st.builds(
    Tenant,
    st.just("x"),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    tokens_per_minute=st.sampled_from([None, 100, 5000]),
    max_requests=st.sampled_from([None, 1, 3]),
    first_token_seconds=st.sampled_from([None, 0.5, 20.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_events_keeps_the_counts(data: st.DataObject) -> None:
    tenants = [replace(data.draw(LIMITS), name=name) for name in "abc"]
    world = World(*tenants, room=2, max_waiting=4)
    open_tickets: list[Ticket] = []
    for _ in range(data.draw(st.integers(1, 60))):
        world.now += data.draw(st.sampled_from([0.0, 0.1, 3.0]))
        event = data.draw(st.sampled_from(["offer", "offer", "start", "end", "reload"]))
        if event == "offer":
            with contextlib.suppress(ApiError):
                open_tickets.append(world.offer(data.draw(st.sampled_from("abc")), data.draw(st.integers(1, 300))))
        elif event == "reload":
            rules = TenantRules(tuple(replace(data.draw(LIMITS), name=tenant.name) for tenant in tenants))
            world.queue.replace(rules, world.now)
        elif open_tickets:
            ticket = data.draw(st.sampled_from(open_tickets))
            if event == "start":
                world.queue.start(ticket, world.now)
            else:
                world.queue.end(ticket, data.draw(st.integers(0, 300)), world.now)
                open_tickets.remove(ticket)
        assert 0 <= world.queue.num_waiting <= 4
        assert all(use.num_waiting >= 0 for use in world.queue.uses)
    for ticket in open_tickets:
        world.queue.end(ticket, 0, world.now)
    assert world.queue.num_waiting == 0
    assert not any(use.active or use.num_waiting for use in world.queue.uses)
    # Nothing that has ended holds a place.
    for _ in range(2):
        world.offer(OTHERS)
    assert world.queue.num_waiting == 0
