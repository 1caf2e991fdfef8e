"""Times of LoraKernel, compared with the machine's limits and with torch's matrix products, adapter by adapter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lora_step import LoraShape, LoraStep
from machine import Machine
from rates import limit_microseconds, steps_in_a_row
from results import Timing

IN_SIZE = 4096
QKV = (4096, 1024, 1024)
# The other linear layers of an 8B model: name, input width, and widths of the parts.
_OTHER_SITES = (("o", 4096, (4096,)), ("gate|up", 4096, (14336, 14336)), ("down", 14336, (4096,)))
_DECODE_STEPS = ((1, 1), (8, 8), (64, 64))
_MAX_RANK = 64
# Number of tokens, and of adapters over which they are distributed evenly.
_STEPS = ((1, 1), (8, 1), (8, 8), (64, 1), (64, 8), (64, 64), (512, 1), (512, 64), (2048, 1), (2048, 8), (8192, 4))
_RANKS = (8, 16, 64)
_MOST_IN_A_ROW = 256


def lora_timings(machine: Machine, rates: dict[str, float]) -> Iterator[Timing]:
    """Measures in bfloat16, for q, k and v of an 8B model, and decode steps of rank 16 for its other layers."""
    for tokens, adapters in _STEPS:
        for rank in _RANKS:
            shape = _shape(IN_SIZE, QKV, tokens, adapters, rank)
            yield _timing(machine, rates, shape, f"lora qkv tokens {tokens} adapters {adapters} rank {rank}")
    for site, in_size, out_sizes in _OTHER_SITES:
        for tokens, adapters in _DECODE_STEPS:
            shape = _shape(in_size, out_sizes, tokens, adapters, 16)
            yield _timing(machine, rates, shape, f"lora {site} tokens {tokens} adapters {adapters} rank 16")


def _shape(in_size: int, out_sizes: tuple[int, ...], tokens: int, adapters: int, rank: int) -> LoraShape:
    return LoraShape(
        dtype=torch.bfloat16,
        in_size=in_size,
        out_sizes=out_sizes,
        ranks=((rank,) * len(out_sizes),) * adapters,
        lengths=(tokens // adapters,) * adapters,
        slots=tuple(range(adapters)),
        max_rank=_MAX_RANK,
    )


def _timing(machine: Machine, rates: dict[str, float], shape: LoraShape, name: str) -> Timing:
    bytes_moved, flops = _needs(shape)
    in_a_row = steps_in_a_row(bytes_moved, _MOST_IN_A_ROW)
    generator = torch.Generator(machine.device)
    steps = [LoraStep.random(machine, shape, generator) for _ in range(in_a_row)]
    results = [step.empty_result() for step in steps]

    def ours() -> None:
        for step, y in zip(steps, results, strict=True):
            step.enqueue(y)

    def torchs() -> None:
        for step, y in zip(steps, results, strict=True):
            _with_torch(step, y)

    return Timing(
        name=name,
        microseconds=machine.seconds(ours, 5) / in_a_row * 1e6,
        bytes=bytes_moved,
        flops=flops,
        limit_microseconds=limit_microseconds(rates, bytes_moved, flops),
        other="torch per adapter",
        other_microseconds=machine.seconds(torchs, 5) / in_a_row * 1e6,
    )


def _needs(shape: LoraShape) -> tuple[float, float]:
    """Returns the bytes of A, B, x, base and y, and the operations, for adapters with one rank."""
    rank = shape.ranks[0][0]
    factors = sum(rank * (shape.in_size + out_size) for out_size in shape.out_sizes)
    elements = len(shape.ranks) * factors + shape.tokens * (shape.in_size + 2 * shape.out_size)
    return 2.0 * elements, 2.0 * shape.tokens * factors


def _with_torch(step: LoraStep, y: torch.Tensor) -> None:
    """Computes y = base + (x A^T) B^T for each adapter's tokens and each part."""
    first = 0
    for length, slot in zip(step.shape.lengths, step.shape.slots, strict=True):
        tokens = slice(first, first + length)
        first += length
        start = 0
        for part, out_size in enumerate(step.shape.out_sizes):
            columns = slice(start, start + out_size)
            start += out_size
            factors = step.factors[slot][part]
            if factors is not None:
                shrunk = step.x[tokens] @ factors.a.T
                torch.addmm(step.base[tokens, columns], shrunk, factors.b.T, out=y[tokens, columns])
