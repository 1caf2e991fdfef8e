"""Measures the cost of a message between two ranks: `mpirun -n 2 python bench/ranks/ping.py`.

Both ranks repeatedly send each other messages of several sizes at the same time, as in an all-reduce, over the engine's
MPI. Rank 0 prints the seconds of an exchange by size in bytes, as JSON. Each time is the average of several consecutive
exchanges. A single exchange would be misleading: for the later rank the message has already arrived, and the other rank
waits for twice the delay.
"""

from __future__ import annotations

import json
import statistics
import time

from mpi4py import MPI

SIZES = (8, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
EXCHANGES, REPEATS = 10, 5


def main() -> None:
    """Prints medians."""
    ranks = MPI.COMM_WORLD
    peer = 1 - ranks.Get_rank()
    seconds = {}
    for size in SIZES:
        sent, received = bytearray(size), bytearray(size)
        _exchange(ranks, peer, sent, received)  # Warm-up.
        seconds[size] = statistics.median(_exchange(ranks, peer, sent, received) for _ in range(REPEATS))
    if ranks.Get_rank() == 0:
        print(json.dumps(seconds))


def _exchange(ranks: MPI.Intracomm, peer: int, sent: bytearray, received: bytearray) -> float:
    """Seconds per exchange, averaged over several."""
    ranks.Barrier()
    began = time.perf_counter()
    for _ in range(EXCHANGES):
        requests = [ranks.Irecv(received, source=peer), ranks.Isend(sent, dest=peer)]
        while not MPI.Request.Testall(requests):
            time.sleep(0)  # Like the engine's wait: yields the CPU.
    return (time.perf_counter() - began) / EXCHANGES


if __name__ == "__main__":
    main()
