"""Models a step of two ranks arithmetically: the computation of each, and the messages that it waits for.

The ranks are simulated message by message, in the engine's order. A rank with less work, or one that learns of the step
later, waits at the next exchange. An all-reduce that overlaps with its own computation costs only the remaining time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FLOAT_BYTES = 4
COMMAND_BYTES_PER_TOKEN = 16
"""Bytes per token with which rank 0 announces a step to the other ranks: id, position, and index."""
LEAST_FLOATS, MOST_CHUNKS, PANEL = 1 << 16, 8, 64
"""The engine's constants of overlapped all-reduces (overlapped_sum.cpp)."""
PIECE = 64
"""Minimum tokens of a micro-batch in a pipeline; steps shorter than two micro-batches are not split."""


def chunks_of(rows: int, width: int, ranks: int) -> int:
    """Approximate number of chunks of an all-reduce of [rows, width] floats; 1: it does not overlap."""
    floats_of_message = rows * width // (1 if ranks == 2 else ranks)
    return max(1, min(MOST_CHUNKS, -(-width // PANEL), floats_of_message // LEAST_FLOATS))


@dataclass(frozen=True)
class Wire:
    """Time of a message of n bytes: latency + n * byte_seconds. Only the second term keeps the wire busy."""

    latency: float
    byte_seconds: float


@dataclass(frozen=True)
class Shape:
    """Relevant sizes of a dense decoder."""

    hidden: int
    layers: int
    intermediate: int
    attention: int
    """Number of outputs of q, k and v."""
    heads: int
    """Number of outputs of attention."""
    vocabulary: int

    @staticmethod
    def of(config: dict[str, int]) -> Shape:
        """Shape from a Hugging Face config.json."""
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        key_values = config.get("num_key_value_heads") or heads
        return Shape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            intermediate=config["intermediate_size"],
            attention=(heads + 2 * key_values) * head_dim,
            heads=heads * head_dim,
            vocabulary=config["vocab_size"],
        )


@dataclass
class _TwoRanks:
    """The clocks of two ranks, and the time from which each one's end of the wire is free."""

    wire: Wire
    now: list[float] = field(default_factory=lambda: [0.0, 0.0])
    free: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def compute(self, seconds: float) -> None:
        self.now = [at + seconds for at in self.now]

    def send(self, rank: int, num_bytes: int) -> float:
        """Sends a message; returns its arrival time."""
        self.free[rank] = max(self.free[rank], self.now[rank]) + num_bytes * self.wire.byte_seconds
        return self.free[rank] + self.wire.latency

    def tell(self, rank: int, num_bytes: int) -> None:
        """Sends a message that the other rank waits for."""
        other = 1 - rank
        self.now[other] = max(self.now[other], self.send(rank, num_bytes))

    def exchange(self, num_bytes: int) -> None:
        arrivals = [self.send(1, num_bytes), self.send(0, num_bytes)]
        self.now = [max(at, arrival) for at, arrival in zip(self.now, arrivals, strict=True)]

    def add_up(self, seconds: float, rows: int, width: int, *, overlaps: bool) -> None:
        """Adds a layer that computes for this many seconds, and the all-reduce of its [rows, width] floats."""
        panels = -(-width // PANEL)
        chunks = chunks_of(rows, width, 2) if overlaps else 1
        columns = -(-panels // chunks) * PANEL if chunks > 1 else width
        arrivals = [0.0, 0.0]
        for first in range(0, width, columns):
            of_chunk = min(columns, width - first)
            self.compute(seconds * of_chunk / width)
            num_bytes = FLOAT_BYTES * rows * of_chunk
            arrivals = [self.send(1, num_bytes), self.send(0, num_bytes)]
        self.now = [max(at, arrival) for at, arrival in zip(self.now, arrivals, strict=True)]


@dataclass(frozen=True)
class Step:
    """A step of `rows` tokens, some of which get logits."""

    shape: Shape
    rows: int
    logit_rows: int
    stages: int
    """1: tensor parallelism of two ranks."""
    overlaps: bool = True

    def seconds(self, work: float, wire: Wire) -> float:
        """Duration of a step with `work` seconds of computation: per rank if ranks split layers, in total if they are
        stages."""
        ranks = _TwoRanks(wire)
        ranks.tell(0, COMMAND_BYTES_PER_TOKEN * self.rows)
        if self.stages == 2:
            self._pass_through(ranks, work)
        else:
            self._share(ranks, work)
        return ranks.now[0]

    def work(self, measured: float, wire: Wire) -> float:
        """Seconds of computation in a step that takes `measured` seconds over this wire."""
        low, high = 0.0, 2 * measured  # The work of two stages, which may run at the same time.
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.seconds(middle, wire) < measured else (low, middle)
        return low

    def _share(self, ranks: _TwoRanks, work: float) -> None:
        shape = self.shape
        sizes: list[tuple[float, ...]] = []
        for layer in range(shape.layers):
            # After the last attention, only the rows with logits remain.
            rows = self.logit_rows if layer + 1 == shape.layers else self.rows
            sizes.append(
                (
                    self.rows * shape.hidden * shape.attention,
                    rows * shape.heads * shape.hidden,
                    rows * 2 * shape.hidden * shape.intermediate,
                    rows * shape.intermediate * shape.hidden,
                )
            )
        head = self.logit_rows * shape.hidden * shape.vocabulary
        second = work / (sum(map(sum, sizes)) + head)
        for layer, (attention, dense, gate_up, down) in enumerate(sizes):
            rows = self.logit_rows if layer + 1 == shape.layers else self.rows
            ranks.compute(attention * second)
            ranks.add_up(dense * second, rows, shape.hidden, overlaps=self.overlaps)
            ranks.compute(gate_up * second)
            ranks.add_up(down * second, rows, shape.hidden, overlaps=self.overlaps)
        ranks.compute(head * second)
        ranks.tell(1, FLOAT_BYTES * self.logit_rows * shape.vocabulary // 2)

    def _pass_through(self, ranks: _TwoRanks, work: float) -> None:
        pieces = self.rows // PIECE if self.rows >= 2 * PIECE else 1
        for _ in range(pieces):
            ranks.now[0] += work / 2 / pieces
            ranks.tell(0, FLOAT_BYTES * self.rows // pieces * self.shape.hidden)
            ranks.now[1] += work / 2 / pieces
        ranks.tell(1, FLOAT_BYTES * self.logit_rows * self.shape.vocabulary)
