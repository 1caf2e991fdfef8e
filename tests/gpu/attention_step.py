"""A step of PagedAttentionKernel with random inputs, and its float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from machine import KERNEL_DTYPES, Machine

_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Tolerance factor over the maximum error from rounding the weights and the result. It covers float32 sums, and queries
# that float32 and float64 round to neighbouring values.
_TOLERANCE = 2.0
# Distance of float16's numbers near 0.
_NEAR_ZERO = {torch.float16: 2.0**-24, torch.bfloat16: 0.0}
_UNUSED_BLOCKS = 3


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a step; its content is random."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    past: tuple[int, ...]
    lengths: tuple[int, ...]
    """`past` and `lengths` are, for each sequence, the positions already in the pool and the tokens in the step."""
    tokens_per_block: int = 32
    max_blocks: int = 0
    """0: enough for the longest sequence."""
    sliding_window: int = 0
    softcap: float = 0.0
    rotary_half: int = 0
    """0: half of the head."""
    interleaved: bool = False
    has_sinks: bool = False
    chunk: int = 0
    query_scaling_beta: float = 0.0
    query_scaling_length: int = 1
    padding: tuple[int, ...] = ()
    """Indices of the sequences without blocks."""
    hopper_prefill: bool = False
    """True: prefills use the kernel for compute capability 9.0."""
    has_counters: bool = True
    """False: the counters are in the workspace."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(self.lengths)

    @property
    def half(self) -> int:
        """Number of columns of cosine and sine."""
        return self.rotary_half or self.head_dim // 2

    def blocks_of(self, sequence: int) -> int:
        """Number of blocks of a sequence after the step."""
        return 0 if sequence in self.padding else self._entries_of(sequence)

    @property
    def columns(self) -> int:
        """Number of columns of the block tables; padding has entries for its positions too."""
        return self.max_blocks or max(self._entries_of(sequence) for sequence in range(len(self.lengths)))

    def _entries_of(self, sequence: int) -> int:
        return -(-(self.past[sequence] + self.lengths[sequence]) // self.tokens_per_block)


@dataclass
class AttentionStep:
    """Tensors of a step on a machine."""

    machine: Machine
    shape: AttentionShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pool: torch.Tensor
    tables: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    sinks: torch.Tensor | None
    workspace: torch.Tensor = field(init=False)
    counters: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Creates the kernel and its workspace."""
        shape = self.shape
        self.kernel = self.machine.kernels.PagedAttentionKernel(
            KERNEL_DTYPES[shape.dtype].value,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.head_dim**-0.5,
            shape.sliding_window,
            shape.softcap,
            shape.interleaved,
            chunk=shape.chunk,
            query_scaling_beta=shape.query_scaling_beta,
            query_scaling_length=shape.query_scaling_length,
            hopper_prefill=shape.hopper_prefill,
        )
        size = self.kernel.workspace_bytes(shape.tokens, len(shape.lengths))
        self.workspace = self.machine.poisoned((size,), torch.uint8)
        counter_bytes = self.kernel.counter_bytes(len(shape.lengths))
        self.counters = torch.zeros(counter_bytes // 4, dtype=torch.int32, device=self.machine.device)

    @classmethod
    def random(cls, machine: Machine, shape: AttentionShape, generator: torch.Generator) -> AttentionStep:
        """Returns a step with random inputs; unused slots of the pool are NaN."""

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=machine.device).to(shape.dtype)

        blocks = sum(shape.blocks_of(sequence) for sequence in range(len(shape.lengths))) + _UNUSED_BLOCKS
        pool = machine.poisoned((blocks, 2, shape.num_kv_heads, shape.tokens_per_block, shape.head_dim), shape.dtype)
        free = torch.randperm(blocks).tolist()
        tables = torch.full((len(shape.lengths), shape.columns), -1, dtype=torch.int32)
        for sequence, past in enumerate(shape.past):
            count = shape.blocks_of(sequence)
            own = [free.pop() for _ in range(count)]
            tables[sequence, :count] = torch.tensor(own, dtype=torch.int32)
            for index in range(-(-past // shape.tokens_per_block) if count else 0):
                filled = min(shape.tokens_per_block, past - index * shape.tokens_per_block)
                pool[own[index], :, :, :filled] = normal(2, shape.num_kv_heads, filled, shape.head_dim)
        sinks = torch.randn(shape.num_heads, generator=generator, device=machine.device) * 4
        angles = torch.rand((shape.tokens, shape.half), generator=generator, device=machine.device) * 6 - 3
        return cls(
            machine=machine,
            shape=shape,
            q=normal(shape.tokens, shape.num_heads * shape.head_dim),
            k=normal(shape.tokens, shape.num_kv_heads * shape.head_dim),
            v=normal(shape.tokens, shape.num_kv_heads * shape.head_dim),
            pool=pool,
            tables=tables.to(machine.device),
            offsets=torch.tensor((0, *shape.lengths)).cumsum(0).to(machine.device, torch.int32),
            positions=_positions(shape).to(machine.device),
            cosine=angles.cos(),
            sine=angles.sin(),
            sinks=sinks if shape.has_sinks else None,
        )

    def part(self, sequence: int, begin: int, end: int) -> AttentionStep:
        """Returns tokens [begin, end) of a sequence as a separate step with the same pool."""
        first = int(self.offsets[sequence])
        rows = slice(first + begin, first + end)
        return AttentionStep(
            machine=self.machine,
            shape=replace(
                self.shape,
                past=(self.shape.past[sequence] + begin,),
                lengths=(end - begin,),
                max_blocks=self.shape.columns,
                padding=(0,) if sequence in self.shape.padding else (),
            ),
            q=self.q[rows].clone(),
            k=self.k[rows].clone(),
            v=self.v[rows].clone(),
            pool=self.pool,
            tables=self.tables[sequence : sequence + 1].clone(),
            offsets=torch.tensor([0, end - begin], dtype=torch.int32, device=self.machine.device),
            positions=self.positions[rows].clone(),
            cosine=self.cosine[rows].clone(),
            sine=self.sine[rows].clone(),
            sinks=self.sinks,
        )

    def with_prefill(self, *, hopper: bool) -> AttentionStep:
        """Returns the same step for one of the kernels of prefills, with a copy of the pool."""
        tensors = {
            name: getattr(self, name)
            for name in ("q", "k", "v", "tables", "offsets", "positions", "cosine", "sine", "sinks")
        }
        shape = replace(self.shape, hopper_prefill=hopper)
        return AttentionStep(machine=self.machine, shape=shape, pool=self.pool.clone(), **tensors)

    def enqueue(self, attended: torch.Tensor) -> None:
        """Launches the kernels on torch's current stream."""
        inputs = (
            *(self.q, self.k, self.v, self.pool, self.tables, self.offsets),
            *(self.positions, self.cosine, self.sine),
        )
        self.kernel.enqueue(
            self.shape.tokens,
            len(self.shape.lengths),
            self.shape.columns,
            self.shape.tokens_per_block,
            self.shape.half,
            [tensor.data_ptr() for tensor in inputs],
            [attended.data_ptr(), self.pool.data_ptr()],
            self.workspace.data_ptr(),
            self.machine.stream(),
            0 if self.sinks is None else self.sinks.data_ptr(),
            self.counters.data_ptr() if self.shape.has_counters else 0,
        )

    def empty_result(self) -> torch.Tensor:
        """Returns a result filled with NaN."""
        return self.machine.poisoned(tuple(self.q.shape), self.shape.dtype)

    def run(self) -> torch.Tensor:
        """Runs the kernel, which adds the step's keys and values to the pool. Returns its result."""
        attended = self.empty_result()
        self.enqueue(attended)
        self.machine.synchronize()
        return attended

    def wrong_elements(self, attended: torch.Tensor, pool_before: torch.Tensor) -> int:
        """Returns the number of elements of the result and the pool whose error is larger than rounding allows.

        Adds the number of counters that are not zero.
        """
        wrong = int(self.counters.count_nonzero())
        written = torch.zeros(self.pool.shape[0], self.shape.tokens_per_block, dtype=torch.bool)
        offsets, tables = self.offsets.tolist(), self.tables.tolist()
        for sequence, table in enumerate(tables):
            rows = slice(offsets[sequence], offsets[sequence + 1])
            if rows.start == rows.stop:
                continue
            positions = self.positions[rows].tolist()
            if table[positions[-1] // self.shape.tokens_per_block] < 0:
                wrong += int((attended[rows].view(torch.int16) != 0).sum())
                continue
            blocks = [table[position // self.shape.tokens_per_block] for position in positions]
            slots = [position % self.shape.tokens_per_block for position in positions]
            written[blocks, slots] = True
            wrong += self._wrong_writes(rows, blocks, slots)
            wrong += self._wrong_results(rows, table, attended[rows])
        untouched = ~written.to(self.machine.device)[:, None, None, :, None]
        changed = self.pool.view(torch.int16) != pool_before.view(torch.int16)
        return wrong + int((changed & untouched).sum())

    def _wrong_writes(self, rows: slice, blocks: list[int], slots: list[int]) -> int:
        shape = self.shape
        keys, values = self.pool[blocks, 0, :, slots], self.pool[blocks, 1, :, slots]
        # Rounding may go the other way if the sums differ in their last bit.
        terms = self._rotated(self.k[rows].abs(), rows, absolute=True)
        expected = self._rotated(self.k[rows], rows)
        bound = 1.001 * _ROUNDING[shape.dtype] * expected.abs() + 1e-6 * terms + _NEAR_ZERO[shape.dtype]
        wrong = int((~((keys.double() - expected).abs() <= bound)).sum())
        own = self.v[rows].view(-1, shape.num_kv_heads, shape.head_dim)
        return wrong + int((values.view(torch.int16) != own.view(torch.int16)).sum())

    def _rotated(self, rows_of_heads: torch.Tensor, rows: slice, *, absolute: bool = False) -> torch.Tensor:
        """Applies RoPE in float64. With `absolute`, adds up the terms' absolute values instead."""
        half = self.shape.half
        heads = rows_of_heads.double().view(rows_of_heads.shape[0], -1, self.shape.head_dim)
        cosine, sine = self.cosine[rows].double()[:, None], self.sine[rows].double()[:, None]
        turned, rest = heads[..., : 2 * half], heads[..., 2 * half :]
        if self.shape.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned[..., :half], turned[..., half:]
        if absolute:
            cosine, sine = cosine.abs(), sine.abs()
        pairs = [first * cosine + second * (sine if absolute else -sine), second * cosine + first * sine]
        turned = torch.stack(pairs, dim=-1).flatten(-2) if self.shape.interleaved else torch.cat(pairs, dim=-1)
        return torch.cat([turned, rest], dim=-1)

    def _wrong_results(self, rows: slice, table: list[int], got: torch.Tensor) -> int:
        shape = self.shape
        positions = self.positions[rows].long()
        last = int(positions[-1])
        blocks = table[: last // shape.tokens_per_block + 1]
        # [blocks, 2, kv heads, slots, head_dim] -> [2, kv heads, keys, head_dim]
        cached = self.pool[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : last + 1].double()
        at = torch.arange(last + 1, device=self.machine.device)
        hidden = at[None] > positions[:, None]
        if shape.sliding_window:
            hidden |= at[None] <= positions[:, None] - shape.sliding_window
        if shape.chunk:
            hidden |= at[None] < positions[:, None] // shape.chunk * shape.chunk
        # Blocks before the window may have been freed.
        cached[:, :, hidden.all(dim=0)] = 0
        steps = (positions // shape.query_scaling_length).double()
        factors = 1 + shape.query_scaling_beta * steps.log1p()
        rotated = (self._rotated(self.q[rows], rows) * factors[:, None, None]).to(shape.dtype).double()
        queries = rotated.unflatten(1, (shape.num_kv_heads, -1)).permute(1, 2, 0, 3)
        scores = queries @ cached[0].transpose(1, 2)[:, None] * shape.head_dim**-0.5
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double().view(shape.num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., : last + 1]
        expected = weights @ cached[1][:, None]
        terms = weights @ cached[1].abs()[:, None]
        bound = _TOLERANCE * _ROUNDING[shape.dtype] * (terms + expected.abs())
        bound += _NEAR_ZERO[shape.dtype] * (last + 2)
        result = got.double().view(-1, shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)
        return int((~((result.permute(1, 2, 0, 3) - expected).abs() <= bound)).sum())


def _positions(shape: AttentionShape) -> torch.Tensor:
    ranges = [torch.arange(past, past + length) for past, length in zip(shape.past, shape.lengths, strict=True)]
    return torch.cat(ranges).to(torch.int32)
