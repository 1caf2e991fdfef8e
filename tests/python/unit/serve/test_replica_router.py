"""The choice of a replica by adapter and by numbers of requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest

from adaptrt.serve.ray.application import application
from adaptrt.serve.ray.forwarding import ForwardedRequest
from adaptrt.serve.ray.options import DEFAULT_QUEUE_SLACK
from adaptrt.serve.ray.replica import Replica
from adaptrt.serve.ray.router import AdapterRouter, ranked
from adaptrt.serve.response_store import home_of

SLACK = 3
REPLICAS = [ReplicaID(f"replica{number}", DeploymentID("Replica", "app")) for number in range(5)]
NOTHING: dict[ReplicaID, set[str]] = {replica: set() for replica in REPLICAS}


def holding(*replicas: ReplicaID) -> dict[ReplicaID, set[str]]:
    return {replica: {"g"} if replica in replicas else set() for replica in REPLICAS}


@pytest.mark.parametrize("home", REPLICAS)
def test_a_request_goes_where_its_adapter_is_while_few_more_wait_there(home: ReplicaID) -> None:
    others = Counter({replica: 2 for replica in REPLICAS if replica != home})
    for queue in range(2 + SLACK + 1):
        assert ranked("g", holding(home), others + Counter({home: queue}), SLACK)[0] == home
    longer = others + Counter({home: 2 + SLACK + 1})
    assert ranked("g", holding(home), longer, SLACK)[-1] == home
    # A replica that has the adapter and no more requests than the slack is asked next.
    second = next(replica for replica in REPLICAS if replica != home)
    assert ranked("g", holding(home, second), longer, SLACK)[0] == second


def test_an_adapter_that_no_replica_has_goes_to_one_that_all_agree_on() -> None:
    homes = Counter(ranked(f"g{number}", NOTHING, {}, SLACK)[0] for number in range(1000))
    assert set(homes) == set(REPLICAS)
    assert all(100 < count < 300 for count in homes.values())
    # Removing a replica moves only its own groups.
    fewer = {replica: set[str]() for replica in REPLICAS[1:]}
    for number in range(100):
        before, after = (ranked(f"g{number}", replicas, {}, SLACK) for replicas in (NOTHING, fewer))
        assert list(after) == [replica for replica in before if replica != REPLICAS[0]]


def test_a_request_without_an_adapter_goes_to_the_shortest_queue() -> None:
    queues = {replica: number for number, replica in enumerate(reversed(REPLICAS))}
    assert ranked("", holding(REPLICAS[0]), queues, SLACK) == REPLICAS[::-1]
    assert len({ranked("", NOTHING, {}, SLACK)[0] for _ in range(200)}) == len(REPLICAS)


@given(
    st.lists(st.integers(0, 20), min_size=len(REPLICAS), max_size=len(REPLICAS)), st.sets(st.sampled_from(REPLICAS)),
    st.sampled_from(["", "g"]), st.integers(0, 5),
)  # fmt: skip
def test_no_queue_grows_by_more_than_the_slack(
    lengths: list[int], holders: set[ReplicaID], group: str, slack: int
) -> None:
    queues = dict(zip(REPLICAS, lengths, strict=True))
    order = ranked(group, holding(*holders), queues, slack)
    assert sorted(order, key=str) == sorted(REPLICAS, key=str)
    shortest = min(lengths)
    assert queues[order[0]] <= shortest + slack
    near = [replica for replica in holders if queues[replica] <= shortest + slack]
    assert not group or not near or order[0] in near


@dataclass
class FakeReplica:
    """The part of a running replica that the choice reads."""

    replica_id: ReplicaID
    multiplexed_model_ids: set[str]
    max_ongoing_requests: int = 100

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def pending(group: str, home: str = "") -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id="i", multiplexed_model_id=group)
    request = ForwardedRequest("POST", "/v1/responses", b"", (), None, b"", home)
    return PendingRequest(args=[request], kwargs={}, metadata=metadata)


def test_requests_count_from_when_they_are_sent_until_they_end() -> None:
    async def main() -> None:
        router = AdapterRouter(
            REPLICAS[0].deployment_id, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        router.initialize_state(queue_slack=1)
        router.update_replicas([FakeReplica(name, groups) for name, groups in holding(REPLICAS[0]).items()])

        async def send() -> ReplicaID:
            replica = (await router.choose_replicas(router._replicas_list, pending("g")))[0][0].replica_id
            router.on_send_request(replica)
            return replica

        assert [await send() for _ in range(2)] == REPLICAS[:1] * 2
        elsewhere = await send()
        assert elsewhere != REPLICAS[0]
        router.on_request_completed(REPLICAS[0], "i")
        assert await send() == REPLICAS[0]
        chosen = await router._choose_replica_for_request(pending("g"))
        assert chosen.replica_id == elsewhere
        assert len(await router.choose_replicas(router._replicas_list, None)) == len(REPLICAS)

    asyncio.run(main())


def test_a_request_about_a_stored_response_goes_only_to_its_replica() -> None:
    async def main() -> None:
        router = AdapterRouter(
            REPLICAS[0].deployment_id, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        router.initialize_state(queue_slack=0)
        router.update_replicas([FakeReplica(name, groups) for name, groups in holding(REPLICAS[0]).items()])
        for home in REPLICAS:
            for _ in range(3):
                asked = pending("g", home_of(home.unique_id))
                ((chosen,),) = await router.choose_replicas(router._replicas_list, asked)
                assert chosen.replica_id == home
                router.on_send_request(home)
        assert len(await router.choose_replicas(router._replicas_list, pending("g", "0" * 8))) == len(REPLICAS)

    asyncio.run(main())


def test_the_application_has_the_router_with_the_slack_that_is_asked_for() -> None:
    for fields, expected in (({}, DEFAULT_QUEUE_SLACK), ({"adapter_queue_slack": 9}, 9)):
        endpoint = application({"model": "m", "num_threads": 1, **fields})
        replicas = endpoint._bound_deployment.init_args[0]._bound_deployment
        config = replicas._deployment_config.request_router_config
        assert config.get_request_router_class() is AdapterRouter
        assert config.request_router_kwargs == {"queue_slack": expected}


def test_a_request_is_in_only_one_access_log() -> None:
    endpoint = application({"model": "m", "num_threads": 1})._bound_deployment
    replicas = endpoint.init_args[0]._bound_deployment
    coordinator = replicas.init_args[1]._bound_deployment
    for deployment in (replicas, coordinator):
        assert deployment._deployment_config.logging_config["enable_access_log"] is False
    assert endpoint._deployment_config.logging_config is None


def test_a_replica_logs_what_the_server_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[dict[str, Any]] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **settings: logs.append(settings))
    made = Replica.__new__(Replica)
    coordinator: Any = None
    with pytest.raises(RayServeException):  # outside of Ray Serve
        asyncio.run(made.__init__({"model": "m", "num_threads": 1}, coordinator, 4))  # type: ignore[func-returns-value,misc]
    assert logs == [{"level": logging.INFO, "format": "%(asctime)s %(name)s %(message)s"}]
