"""Checks of QuantizedProductKernel: against float64, and single tokens against batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from machine import KERNEL_DTYPES, Machine
from results import Check

DTYPES = (torch.float16, torch.bfloat16)
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
# Tensor cores may truncate where float32 addition would round.
_SUM_ROUNDING = 2.0**-20
_SMALLEST = 2.0**-24


def quantized_product_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Runs all checks, or a `subset` small enough for compute-sanitizer and the emulation."""
    generator = torch.Generator(machine.device)
    seed = generator.seed()
    for dtype in DTYPES:
        for bits in (8, 4):
            for in_size, out_size in ((96, 136),) if subset else ((64, 64), (2048, 3072), (4096, 4096), (14336, 4096)):
                for group_size, has_zeros in ((0, False), (32, True)) if subset else _GROUPS:
                    weights = _Weights(machine, generator, bits, in_size, out_size, group_size, has_zeros)
                    for tokens in (1, 33) if subset else (1, 3, 16, 33, 64, 300, 2048):
                        yield from _product(machine, weights, dtype, tokens, generator, seed)


_GROUPS = ((0, False), (0, True), (16, True), (64, False), (128, True))


@dataclass
class _Weights:
    """Random integers with scales and zero points."""

    machine: Machine
    generator: torch.Generator
    bits: int
    in_size: int
    out_size: int
    group_size: int
    has_zeros: bool

    def __post_init__(self) -> None:
        device = self.machine.device
        groups = -(-self.in_size // self.group_size) if self.group_size else 1
        self.integers = torch.randint(
            1 << self.bits, (self.out_size, self.in_size), device=device, generator=self.generator
        )
        self.scales = torch.rand((self.out_size, groups), device=device, generator=self.generator)
        self.zeros = torch.randint(
            1 << self.bits, (self.out_size, groups), dtype=torch.uint8, device=device, generator=self.generator
        )
        if self.bits == 8:
            self.stored = (self.integers - 128).to(torch.int8)
        else:
            self.stored = (self.integers[:, 0::2] | self.integers[:, 1::2] << 4).to(torch.uint8)

    def values(self) -> torch.Tensor:
        """Returns the float64 values of the weights."""
        group = torch.arange(self.in_size, device=self.machine.device) // (self.group_size or self.in_size)
        zeros = self.zeros[:, group].double() if self.has_zeros else 2.0 ** (self.bits - 1)
        return self.scales[:, group].double() * (self.integers.double() - zeros)

    def product(self, x: torch.Tensor, *, float32_output: bool = False) -> torch.Tensor:
        """Runs the kernel and returns y when it is complete."""
        kernel = self.machine.kernels.QuantizedProductKernel(
            KERNEL_DTYPES[x.dtype].value,
            self.bits,
            self.in_size,
            self.out_size,
            self.group_size,
            float32_output=float32_output,
        )
        y = self.machine.poisoned((len(x), self.out_size), torch.float32 if float32_output else x.dtype)
        zeros = self.zeros.data_ptr() if self.has_zeros else 0
        inputs = [x.data_ptr(), self.stored.data_ptr(), self.scales.data_ptr(), zeros]
        kernel.enqueue(len(x), inputs, [y.data_ptr()], self.machine.stream())
        self.machine.synchronize()
        return y


def _product(
    machine: Machine, weights: _Weights, dtype: torch.dtype, tokens: int, generator: torch.Generator, seed: int
) -> Iterator[Check]:
    x = torch.randn((tokens, weights.in_size), device=machine.device, generator=generator).to(dtype)
    name = (
        f"product {str(dtype).removeprefix('torch.')} of {weights.bits} bits in {weights.in_size} out "
        f"{weights.out_size} tokens {tokens} groups of {weights.group_size}{' with zeros' if weights.has_zeros else ''}"
    )
    values = weights.values()
    expected, terms = x.double() @ values.T, x.double().abs() @ values.abs().T
    for float32_output in (False, True):
        y = weights.product(x, float32_output=float32_output)
        bound = expected.abs() * _ROUNDING[y.dtype] + terms * _SUM_ROUNDING + _SMALLEST
        wrong = int((~((y.double() - expected).abs() <= bound)).sum())
        yield Check(f"{name}{' float32' if float32_output else ''}", wrong == 0, f"{wrong} wrong with seed {seed}")
    place = int(torch.randint(tokens, (1,), device=machine.device, generator=generator))
    others = machine.poisoned((tokens, weights.in_size), dtype)
    others[place] = x[place]
    alone, among = weights.product(x[place : place + 1].clone()), weights.product(others)
    same = torch.equal(alone[0].view(torch.int16), among[place].view(torch.int16))
    yield Check(f"{name}: bits alone and among NaN", same, f"they differ with seed {seed}")
