"""A step of two ranks as arithmetic: what each computes, and the messages that it waits for.

The ranks are simulated message by message, in the order in which the engine sends them. A rank that has less to do, or
hears of the step later, waits at the next exchange, and sums that go on while their terms are made cost what is left of
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FLOAT_BYTES = 4
COMMAND_BYTES_PER_TOKEN = 16
"""A token, its position and its place among others, as rank 0 tells the others of a step."""
LEAST_FLOATS, MOST_CHUNKS, PANEL = 1 << 16, 8, 64
"""Of sums that go on while their terms are made: the engine's (overlapped_sum.cpp)."""
PIECE = 64
"""Tokens of a step's piece that passes through a pipeline by itself; shorter steps than two of them are not cut."""


def chunks_of(rows: int, width: int, ranks: int) -> int:
    """Into how many parts a sum of [rows, width] floats is cut, about; 1: it is made behind its layer."""
    floats_of_message = rows * width // (1 if ranks == 2 else ranks)
    return max(1, min(MOST_CHUNKS, -(-width // PANEL), floats_of_message // LEAST_FLOATS))


@dataclass(frozen=True)
class Wire:
    """What a message of n bytes takes: latency + n * byte_seconds, of which the latter keeps the wire busy."""

    latency: float
    byte_seconds: float


@dataclass(frozen=True)
class Shape:
    """What matters of a dense decoder."""

    hidden: int
    layers: int
    intermediate: int
    attention: int
    """Outputs of q, k and v."""
    heads: int
    """Outputs of attention."""
    vocabulary: int

    @staticmethod
    def of(config: dict[str, int]) -> Shape:
        """Of a config.json of Hugging Face."""
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
    """Their clocks, and when each one's end of the wire is free."""

    wire: Wire
    now: list[float] = field(default_factory=lambda: [0.0, 0.0])
    free: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def compute(self, seconds: float) -> None:
        self.now = [at + seconds for at in self.now]

    def send(self, rank: int, num_bytes: int) -> float:
        """When it arrives."""
        self.free[rank] = max(self.free[rank], self.now[rank]) + num_bytes * self.wire.byte_seconds
        return self.free[rank] + self.wire.latency

    def tell(self, rank: int, num_bytes: int) -> None:
        """The other rank waits for it."""
        other = 1 - rank
        self.now[other] = max(self.now[other], self.send(rank, num_bytes))

    def exchange(self, num_bytes: int) -> None:
        arrivals = [self.send(1, num_bytes), self.send(0, num_bytes)]
        self.now = [max(at, arrival) for at, arrival in zip(self.now, arrivals, strict=True)]

    def add_up(self, seconds: float, rows: int, width: int, *, overlaps: bool) -> None:
        """A layer whose terms take so many seconds, and the sum of [rows, width] floats behind it."""
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
    """A step of so many tokens, of which some have logits."""

    shape: Shape
    rows: int
    logit_rows: int
    stages: int
    """1: tensor parallelism of two ranks."""
    overlaps: bool = True

    def seconds(self, work: float, wire: Wire) -> float:
        """Where `work` seconds are computed: by each of two ranks that share layers, by two stages together."""
        ranks = _TwoRanks(wire)
        ranks.tell(0, COMMAND_BYTES_PER_TOKEN * self.rows)
        if self.stages == 2:
            self._pass_through(ranks, work)
        else:
            self._share(ranks, work)
        return ranks.now[0]

    def work(self, measured: float, wire: Wire) -> float:
        """What is computed in a step that takes so many seconds over this wire."""
        low, high = 0.0, 2 * measured  # of two stages, which may work at the same time
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.seconds(middle, wire) < measured else (low, middle)
        return low

    def _share(self, ranks: _TwoRanks, work: float) -> None:
        shape = self.shape
        sizes: list[tuple[float, ...]] = []
        for layer in range(shape.layers):
            # Behind the last attention only rows of logits are left.
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
