"""What a message costs two ranks, beside the network: `mpirun -n 2 python bench/ranks/ping.py`.

Both send each other messages of several sizes at once, again and again, as ranks do that add up layers, over the MPI
that the engine uses. Rank 0 prints the seconds of an exchange of each size in bytes as JSON. They are those of several
exchanges behind each other: of a single one, the rank that is behind finds what was sent to it there already, and
the other one waits for twice the delay.
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
        _exchange(ranks, peer, sent, received)  # the warm-up
        seconds[size] = statistics.median(_exchange(ranks, peer, sent, received) for _ in range(REPEATS))
    if ranks.Get_rank() == 0:
        print(json.dumps(seconds))


def _exchange(ranks: MPI.Intracomm, peer: int, sent: bytearray, received: bytearray) -> float:
    """Seconds of one of several."""
    ranks.Barrier()
    began = time.perf_counter()
    for _ in range(EXCHANGES):
        requests = [ranks.Irecv(received, source=peer), ranks.Isend(sent, dest=peer)]
        while not MPI.Request.Testall(requests):
            time.sleep(0)  # as the engine waits: others may have the CPU
    return (time.perf_counter() - began) / EXCHANGES


if __name__ == "__main__":
    main()
