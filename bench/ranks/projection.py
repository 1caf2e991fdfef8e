"""Estimates the speed on more machines arithmetically: `python bench/ranks/projection.py [--bandwidth 200e9] ...`.

All machines together read every weight once and multiply it with every row in a step. They wait for messages as in
message_model.py, where an overlapping all-reduce costs only its remaining time. Only that model of messages was checked
by measurements, between two ranks.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from message_model import FLOAT_BYTES, PIECE, chunks_of

WEIGHT_BYTES = 2
SENT_WHOLE = 1 << 15
"""Maximum floats that a rank sends to all other ranks. In larger all-reduces, each rank sums a share."""


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama."""

    name: str
    parameters: float
    hidden: int
    intermediate: int
    layers: int
    heads: int


@dataclass(frozen=True)
class Machine:
    """One of many equal machines, and the network between any two of them."""

    bandwidth: float
    flops: float
    delay: float
    rate: float

    def seconds_of(self, parameters: float, rows: int) -> float:
        """Seconds of a step's computation on one machine."""
        return max(WEIGHT_BYTES * parameters / self.bandwidth, 2 * parameters * rows / self.flops)


SHAPES = (Shape("8B", 8.0e9, 4096, 14336, 32, 32), Shape("70B", 70.6e9, 8192, 28672, 80, 64))
CUTS = ((1, 1), (8, 1), (1, 8), (16, 1), (8, 2), (1, 16), (64, 1), (16, 4), (8, 8))
"""Pairs (tp_size, pp_size)."""


def left_of_sum(work: float, floats: int, width: int, tp_size: int, machine: Machine) -> float:
    """Remaining seconds of an all-reduce after the `work` that it overlaps with, if all ranks run in step."""
    others = tp_size - 1
    in_shares = tp_size > 2 and floats * others > SENT_WHOLE
    chunks = chunks_of(floats // width, width, tp_size)
    num_bytes = FLOAT_BYTES * floats * others / chunks / (tp_size if in_shares else 1)
    free = 0.0

    def send(at: float) -> float:
        nonlocal free
        free = max(free, at) + num_bytes / machine.rate
        return free + machine.delay

    arrivals: list[float] = []
    last = 0.0
    for chunk in range(chunks):
        made = work * (chunk + 1) / chunks
        arrivals.append(send(made))
        if in_shares and chunk > 0:
            last = send(max(made, arrivals[chunk - 1]))
    last = send(max(work, arrivals[-1])) if in_shares else arrivals[-1]
    return last - work


def of_tensor_parallelism(shape: Shape, tp_size: int, pp_size: int, machine: Machine, rows: int) -> float:
    """Seconds of one stage for `rows` tokens."""
    seconds = machine.seconds_of(shape.parameters / pp_size, rows) / tp_size
    if tp_size == 1:
        return seconds
    sums = 0.0
    for inputs in (shape.hidden, shape.intermediate):  # Attention's last layer, and the MLP's.
        work = seconds * inputs * shape.hidden / (shape.parameters / pp_size)
        sums += left_of_sum(work, rows * shape.hidden, shape.hidden, tp_size, machine)
    return seconds + shape.layers / pp_size * sums


def step_seconds(shape: Shape, tp_size: int, pp_size: int, machine: Machine, rows: int) -> float:
    """Seconds of a step through all stages, in micro-batches if it is long enough."""
    pieces = max(1, rows // PIECE) if pp_size > 1 else 1
    of_piece = of_tensor_parallelism(shape, tp_size, pp_size, machine, rows // pieces)
    passed = machine.delay + FLOAT_BYTES * shape.hidden * (rows // pieces) / machine.rate
    return (pieces + pp_size - 1) * of_piece + (pp_size - 1) * passed


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=200e9, help="bytes a second that a machine reads")
    parser.add_argument("--flops", type=float, default=2e12, help="of bfloat16, a machine's")
    parser.add_argument("--delay", type=float, default=3e-5, help="seconds of a message, one way")
    parser.add_argument("--rate", type=float, default=3.1e9, help="bytes a second of a link")
    options = parser.parse_args()
    machine = Machine(options.bandwidth, options.flops, options.delay, options.rate)
    print("| model | machines | tp_size | pp_size | 1 request | 16 requests | prompt of 512 tokens |")
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for tp_size, pp_size in CUTS:
            if shape.heads % tp_size or shape.layers % pp_size:
                continue
            steps = " | ".join(
                f"{1e3 * step_seconds(shape, tp_size, pp_size, machine, rows):.0f} ms" for rows in (1, 16, 512)
            )
            print(f"| {shape.name} | {tp_size * pp_size} | {tp_size} | {pp_size} | {steps} |")


if __name__ == "__main__":
    main()
