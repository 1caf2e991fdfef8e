"""What a message costs two ranks, beside the network: `mpirun -n 2 python bench/ranks/ping.py`.

Both send each other messages of several sizes at once, as ranks do that add up a layer, over the MPI that the engine
uses. Rank 0 prints the seconds of each size in bytes as JSON.
"""

from __future__ import annotations

import json
import statistics
import time

from mpi4py import MPI

SIZES = (8, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
WARM_UP, REPEATS = 5, 25


def main() -> None:
    """Prints medians."""
    ranks = MPI.COMM_WORLD
    peer = 1 - ranks.Get_rank()
    seconds = {}
    for size in SIZES:
        sent, received = bytearray(size), bytearray(size)
        times = []
        for _ in range(WARM_UP + REPEATS):
            ranks.Barrier()
            began = time.perf_counter()
            requests = [ranks.Irecv(received, source=peer), ranks.Isend(sent, dest=peer)]
            while not MPI.Request.Testall(requests):
                time.sleep(0)  # as the engine waits: others may have the CPU
            times.append(time.perf_counter() - began)
        seconds[size] = statistics.median(times[WARM_UP:])
    if ranks.Get_rank() == 0:
        print(json.dumps(seconds))


if __name__ == "__main__":
    main()
