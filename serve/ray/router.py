"""Chooses the replica of a request: the one that stores the response that it is about, or else one that has its
adapter, unless too many other requests wait there.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ray.serve.request_router import (
    FIFOMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from ..response_store import home_of
from .forwarding import ForwardedRequest


class AdapterRouter(FIFOMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """The router that Serve uses in each process with a handle of the replicas, on the loop of that handle."""

    def initialize_state(self, *, queue_slack: int) -> None:
        """queue_slack: an adapter's replica may have so many requests more than the least loaded replica."""
        self._queue_slack = queue_slack
        self._ongoing: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns one rank per replica, best first. Serve tries the next rank if a replica is full."""
        group = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        if pending_request is not None:
            # The ranks contain all replicas. So if all refuse, Serve must wait before it asks again.
            pending_request.routing_context.should_backoff = True
            # Only one replica has the response. If it has ended, another one answers that it is not stored.
            home = next((arg.home for arg in pending_request.args if isinstance(arg, ForwardedRequest)), "")
            at_home = [one for one in candidate_replicas if home_of(one.replica_id.unique_id) == home]
            if at_home:
                return [at_home]
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        groups = {name: replica.multiplexed_model_ids for name, replica in by_id.items()}
        return [[by_id[name]] for name in ranked(group, groups, self._ongoing, self._queue_slack)]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called once for each request that is sent; on_request_completed() is called once when it has ended."""
        super().on_send_request(replica_id)
        self._ongoing[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called at the end of an answer, after a refusal, and when the replica dies."""
        super().on_request_completed(replica_id, internal_request_id)
        self._ongoing[replica_id] -= 1
        if not self._ongoing[replica_id]:
            del self._ongoing[replica_id]


def ranked(
    group: str, groups: Mapping[ReplicaID, Collection[str]], ongoing: Mapping[ReplicaID, int], queue_slack: int
) -> Sequence[ReplicaID]:
    """Returns the replicas in the order in which a request should try them.

    group: the adapter's group; empty without an adapter, for which the shortest queue is best. groups: by replica, the
    groups whose adapters it has. ongoing: by replica, its number of requests; 0 if it is missing.
    """
    shortest = min((ongoing.get(name, 0) for name in groups), default=0)

    def key(name: ReplicaID) -> tuple[bool, int, bool, float]:
        queue = ongoing.get(name, 0)
        if not group or queue > shortest + queue_slack:
            return (True, queue, True, random.random())
        return (False, 0, group not in groups[name], _weight(group, name))

    return sorted(groups, key=key)


def _weight(group: str, name: ReplicaID) -> float:
    """Returns a weight that is the same in every process. So each group has a preferred replica, even if no replica has
    its adapters yet.

    Rendezvous hashing: Thaler and Ravishankar, Using Name-Based Mappings to Increase Hit Rates, 1998.
    """
    digest = hashlib.blake2b(f"{group}/{name.unique_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
