"""Which replica a request goes to: one that has its adapter, unless too many others wait there."""

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


class AdapterRouter(FIFOMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """Serve asks it, in each process that has a handle of the replicas, on the loop of that handle."""

    def initialize_state(self, *, queue_slack: int) -> None:
        """`queue_slack`: requests that a replica may have more than the one with the fewest, and still get others."""
        self._queue_slack = queue_slack
        self._ongoing: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """A rank each, the first the one to ask; the others are for when it has as many requests as it may have."""
        group = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        if pending_request is not None:
            # All replicas are among the ranks: when all refuse, there is nothing else to try at once.
            pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        groups = {name: replica.multiplexed_model_ids for name, replica in by_id.items()}
        return [[by_id[name]] for name in ranked(group, groups, self._ongoing, self._queue_slack)]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Serve calls it once for each request that is sent, and on_request_completed() once when that has ended."""
        super().on_send_request(replica_id)
        self._ongoing[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The answer's end, a refusal, or the replica's death."""
        super().on_request_completed(replica_id, internal_request_id)
        self._ongoing[replica_id] -= 1
        if not self._ongoing[replica_id]:
            del self._ongoing[replica_id]


def ranked(
    group: str, groups: Mapping[ReplicaID, Collection[str]], ongoing: Mapping[ReplicaID, int], queue_slack: int
) -> Sequence[ReplicaID]:
    """Replicas in the order in which a request of a group of adapters should try them.

    group: empty without an adapter, for which the shortest queue is best.
    groups: by replica, those whose adapters it has.
    ongoing: the requests of each; none where it is not named.
    """
    shortest = min((ongoing.get(name, 0) for name in groups), default=0)

    def key(name: ReplicaID) -> tuple[bool, int, bool, float]:
        queue = ongoing.get(name, 0)
        if not group or queue > shortest + queue_slack:
            return (True, queue, True, random.random())
        return (False, 0, group not in groups[name], _weight(group, name))

    return sorted(groups, key=key)


def _weight(group: str, name: ReplicaID) -> float:
    """The same in every process: so each group has a replica of its own before any replica has its adapters.

    Rendezvous hashing: Thaler and Ravishankar, Using Name-Based Mappings to Increase Hit Rates, 1998.
    """
    digest = hashlib.blake2b(f"{group}/{name.unique_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
