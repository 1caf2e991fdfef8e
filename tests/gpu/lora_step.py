"""A step of LoraKernel with random inputs, and its float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from machine import KERNEL_DTYPES, Machine

from adaptrt._core import NUM_TABLE_MODULES

LAYERS, LAYER = 2, 1
# An address that no kernel may read.
_NO_ADDRESS = 0x10
# Tensor cores may truncate where float32 addition would round.
_SUM_ROUNDING = 2.0**-23
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class LoraShape:
    """Sizes of a step; its content is random."""

    dtype: torch.dtype
    in_size: int
    out_sizes: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    """Ranks by adapter and part; 0: the part is not adapted."""
    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    """`lengths` and `slots` are, for each sequence, the number of tokens and the adapter; -1: no adapter."""
    max_rank: int = 256
    dora: bool = False
    shifts: bool = False
    """True: two of three adapters have shifts."""
    many_tokens_from: int | None = None
    """Steps with at least this many tokens use tiles of many tokens; None: the kernel's default."""
    decode_tokens: int | None = None
    """Steps of up to this many tokens use the kernels for decode steps; None: the kernel's default."""
    odd_addresses: bool = False
    integers: bool = False
    """True: inputs are small integers. Every sum is exact then, so the result must be exact too."""
    cancelling: bool = False
    """True: the two halves of the inputs cancel each other. The result then is the rounding error, which depends on the
    order of the sum."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(self.lengths)

    @property
    def out_size(self) -> int:
        """Total width of all parts."""
        return sum(self.out_sizes)


@dataclass
class Factors:
    """An adapter's update of a part."""

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None
    shift: torch.Tensor | None


@dataclass
class LoraStep:
    """Tensors of a step on a machine."""

    machine: Machine
    shape: LoraShape
    x: torch.Tensor
    base: torch.Tensor
    factors: list[list[Factors | None]]
    offsets: torch.Tensor
    slots: torch.Tensor
    ranks: torch.Tensor
    pointers: torch.Tensor
    shifts: torch.Tensor
    workspace: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Creates the kernel and its workspace."""
        module_ids = [3 * part + 1 for part in range(len(self.shape.out_sizes))]
        thresholds = {"many_tokens_from": self.shape.many_tokens_from, "decode_tokens": self.shape.decode_tokens}
        self.kernel = self.machine.kernels.LoraKernel(
            KERNEL_DTYPES[self.shape.dtype].value,
            LAYER,
            module_ids,
            list(self.shape.out_sizes),
            self.shape.max_rank,
            self.shape.dora,
            **{name: tokens for name, tokens in thresholds.items() if tokens is not None},
        )
        self.workspace = self.machine.poisoned((self.kernel.workspace_bytes(self.shape.tokens),), torch.uint8)

    @classmethod
    def random(cls, machine: Machine, shape: LoraShape, generator: torch.Generator) -> LoraStep:
        """Returns a step with random inputs."""
        slots = len(shape.ranks)
        ranks = torch.zeros(max(1, slots), LAYERS, NUM_TABLE_MODULES, dtype=torch.int32)
        pointers = torch.full((max(1, slots), LAYERS, NUM_TABLE_MODULES, 3), _NO_ADDRESS, dtype=torch.int64)
        shifts = torch.full((max(1, slots), LAYERS, NUM_TABLE_MODULES), _NO_ADDRESS, dtype=torch.int64)
        factors: list[list[Factors | None]] = []
        for slot, ranks_of_parts in enumerate(shape.ranks):
            factors.append([])
            for part, (rank, out_size) in enumerate(zip(ranks_of_parts, shape.out_sizes, strict=True)):
                if rank == 0:
                    factors[-1].append(None)
                    continue
                made = Factors(
                    _random_rows(machine, shape, rank, generator, sign=1),
                    _random(machine, shape, (out_size, rank), generator),
                    # Every other adapter has magnitudes.
                    _magnitude(machine, shape, out_size, generator) if slot % 2 == 0 else None,
                    _shift(machine, shape, out_size, generator) if shape.shifts and slot % 3 != 1 else None,
                )
                factors[-1].append(made)
                module = 3 * part + 1
                ranks[slot, LAYER, module] = rank
                magnitude = 0 if made.magnitude is None else made.magnitude.data_ptr()
                pointers[slot, LAYER, module] = torch.tensor([made.a.data_ptr(), made.b.data_ptr(), magnitude])
                shifts[slot, LAYER, module] = 0 if made.shift is None else made.shift.data_ptr()
        offsets = torch.tensor([0, *shape.lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
        return cls(
            machine=machine,
            shape=shape,
            x=_random_rows(machine, shape, shape.tokens, generator, sign=-1),
            base=_random(machine, shape, (shape.tokens, shape.out_size), generator),
            factors=factors,
            offsets=offsets.to(machine.device),
            slots=torch.tensor(shape.slots, dtype=torch.int32).to(machine.device),
            ranks=ranks.to(machine.device),
            pointers=pointers.to(machine.device),
            shifts=shifts.to(machine.device),
        )

    def tiled(self, many_tokens_from: int) -> LoraStep:
        """Returns the same step with another threshold for tiles of many tokens."""
        return replace(self, shape=replace(self.shape, many_tokens_from=many_tokens_from))

    def as_long_step(self) -> LoraStep:
        """Returns the same step without the kernels for decode steps."""
        return replace(self, shape=replace(self.shape, decode_tokens=0))

    def alone(self, sequence: int) -> LoraStep:
        """Returns a step with only one sequence of this step."""
        begin, end = (int(offset) for offset in self.offsets[sequence : sequence + 2])
        return LoraStep(
            machine=self.machine,
            shape=replace(self.shape, lengths=(end - begin,), slots=(self.shape.slots[sequence],)),
            x=self.x[begin:end],
            base=self.base[begin:end],
            factors=self.factors,
            offsets=torch.tensor([0, end - begin], dtype=torch.int32, device=self.machine.device),
            slots=self.slots[sequence : sequence + 1],
            ranks=self.ranks,
            pointers=self.pointers,
            shifts=self.shifts,
        )

    def enqueue(self, y: torch.Tensor) -> None:
        """Launches the kernel on torch's current stream."""
        inputs = (self.x, self.base, self.offsets, self.slots, self.ranks, self.pointers)
        self.kernel.enqueue(
            self.shape.tokens,
            self.shape.in_size,
            len(self.shape.lengths),
            LAYERS,
            [tensor.data_ptr() for tensor in inputs],
            [y.data_ptr()],
            self.workspace.data_ptr(),
            self.machine.stream(),
            shifts=self.shifts.data_ptr() if self.shape.shifts else 0,
        )

    def empty_result(self) -> torch.Tensor:
        """Returns a y filled with NaN."""
        return _placed(self.machine, self.shape, self.machine.poisoned(self.base.shape, self.shape.dtype))

    def run(self) -> torch.Tensor:
        """Runs the kernel and returns y."""
        y = self.empty_result()
        self.enqueue(y)
        self.machine.synchronize()
        return y

    def wrong_elements(self, y: torch.Tensor) -> int:
        """Returns the number of elements whose error is larger than rounding allows; with integers, of unequal
        elements.
        """
        wrong = 0
        offsets = self.offsets.tolist()
        for sequence, slot in enumerate(self.slots.tolist()):
            tokens = slice(offsets[sequence], offsets[sequence + 1])
            start = 0
            for part, out_size in enumerate(self.shape.out_sizes):
                columns = slice(start, start + out_size)
                start += out_size
                factors = self.factors[slot][part] if slot >= 0 else None
                got, base = y[tokens, columns], self.base[tokens, columns]
                if factors is None:
                    wrong += int((got.view(torch.int16) != base.view(torch.int16)).sum())
                else:
                    wrong += self._wrong_part(self.x[tokens], base, factors, got)
        return wrong

    def _wrong_part(self, x: torch.Tensor, base: torch.Tensor, factors: Factors, got: torch.Tensor) -> int:
        dtype, rank = self.shape.dtype, factors.a.shape[0]
        x64, base64, a64, b64 = (tensor.double() for tensor in (x, base, factors.a, factors.b))
        shrunk = (x64 @ a64.T).float().to(dtype).double()
        expected = base64 + shrunk @ b64.T
        magnitude = factors.magnitude.double() if self.shape.dora and factors.magnitude is not None else 1.0
        shift = 0.0 if factors.shift is None else factors.shift.double()
        expected = expected * magnitude + shift
        if self.shape.integers:
            return int((got != expected.float().to(dtype)).sum())
        terms = base64.abs() + shrunk.abs() @ b64.abs().T
        # float32 and float64 may round the shrink's result to neighbouring values.
        of_shrink = (self.shape.in_size + 2) * _SUM_ROUNDING * (x64.abs() @ a64.abs().T)
        of_shrunk = (of_shrink + 2 * _ROUNDING[dtype] * shrunk.abs()) @ b64.abs().T
        bound = ((rank + 3) * _SUM_ROUNDING * terms + of_shrunk) * magnitude + _ROUNDING[dtype] * expected.abs()
        bound = bound + _SUM_ROUNDING * abs(shift)
        # A comparison with NaN is false, so NaN counts as wrong.
        return int((~((got.double() - expected).abs() <= bound)).sum())


def _random(machine: Machine, shape: LoraShape, size: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    if shape.integers:
        values = torch.randint(-1, 2, tuple(size), generator=generator, device=machine.device).to(shape.dtype)
    else:
        values = (torch.rand(tuple(size), generator=generator, device=machine.device) * 2 - 1).to(shape.dtype)
    return _placed(machine, shape, values)


def _random_rows(
    machine: Machine, shape: LoraShape, rows: int, generator: torch.Generator, *, sign: int
) -> torch.Tensor:
    """Returns rows of x or A. With cancelling halves, the second half is `sign` times the first."""
    values = _random(machine, shape, (rows, shape.in_size), generator)
    if shape.cancelling:
        half = shape.in_size // 2
        powers = torch.randint(0, 6, values.shape, generator=generator, device=machine.device)
        values *= torch.exp2(powers).to(values.dtype)
        values[:, half : 2 * half] = sign * values[:, :half]
    return values


def _placed(machine: Machine, shape: LoraShape, values: torch.Tensor) -> torch.Tensor:
    """Returns the same values; with odd_addresses, at an address that is one element off any alignment."""
    if not shape.odd_addresses:
        return values
    memory = machine.poisoned((values.numel() + 1,), values.dtype)
    moved = memory[1:].view(values.shape)
    moved.view(torch.int16).copy_(values.view(torch.int16))
    return moved


def _magnitude(machine: Machine, shape: LoraShape, size: int, generator: torch.Generator) -> torch.Tensor:
    if shape.integers:
        return torch.randint(1, 3, (size,), generator=generator, device=machine.device).float()
    return torch.rand(size, generator=generator, device=machine.device) + 0.5


def _shift(machine: Machine, shape: LoraShape, size: int, generator: torch.Generator) -> torch.Tensor:
    if shape.integers:
        return torch.randint(-2, 3, (size,), generator=generator, device=machine.device).float()
    return torch.rand(size, generator=generator, device=machine.device) * 2 - 1
