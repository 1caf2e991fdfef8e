"""Times of ProductKernel, compared with the machine's limits and torch's product, whose algorithm cuBLASLt chooses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from machine import Machine
from product_step import ProductShape, ProductStep
from rates import limit_microseconds, steps_in_a_row
from results import Timing

# (in, out) of o, qkv, gate and up, down and logits, for 8B and 1B models.
_SIZES = (
    *((4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096), (4096, 128256)),
    *((2048, 2048), (2048, 3072), (2048, 16384), (8192, 2048), (2048, 128256)),
)
_TOKENS = (1, 8, 64, 512, 4096)
_MOST_IN_A_ROW = 64
# A GPU lowers its clock after many consecutive operations.
_MOST_FLOPS_IN_A_ROW = 1e12


def product_timings(machine: Machine, rates: dict[str, float]) -> Iterator[Timing]:
    """Measures in bfloat16, with weights larger than any cache."""
    for in_size, out_size in _SIZES:
        for tokens in _TOKENS:
            yield _timing(machine, rates, ProductShape(torch.bfloat16, tokens, in_size, out_size))


def _timing(machine: Machine, rates: dict[str, float], shape: ProductShape) -> Timing:
    elements = shape.in_size * shape.out_size + shape.tokens * (shape.in_size + shape.out_size)
    flops = 2.0 * shape.tokens * shape.in_size * shape.out_size
    in_a_row = max(1, min(steps_in_a_row(2.0 * elements, _MOST_IN_A_ROW), round(_MOST_FLOPS_IN_A_ROW / flops)))
    generator = torch.Generator(machine.device)
    steps = [ProductStep.random(machine, shape, generator) for _ in range(in_a_row)]
    y = steps[0].empty_result()

    def ours() -> None:
        for step in steps:
            step.enqueue(y)

    def torchs() -> None:
        for step in steps:
            torch.matmul(step.x, step.weights.T, out=y)

    # The two alternate, so that the GPU's temperature and clock are similar for both.
    times = [(machine.seconds(ours, 3), machine.seconds(torchs, 3)) for _ in range(2)]
    own, other = (min(of_one) for of_one in zip(*times, strict=True))
    return Timing(
        name=f"product in {shape.in_size} out {shape.out_size} tokens {shape.tokens}",
        microseconds=own / in_a_row * 1e6,
        bytes=2.0 * elements,
        flops=flops,
        limit_microseconds=limit_microseconds(rates, 2.0 * elements, flops),
        other="torch.matmul (cuBLASLt)",
        other_microseconds=other / in_a_row * 1e6,
    )
