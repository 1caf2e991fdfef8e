"""A product of random matrices by ProductKernel, and its float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from machine import KERNEL_DTYPES, Machine

# Tensor cores may truncate where float32 addition would round.
_SUM_ROUNDING = 2.0**-20
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
_SMALLEST = 2.0**-24


@dataclass(frozen=True)
class ProductShape:
    """Sizes of a product."""

    dtype: torch.dtype
    tokens: int
    in_size: int
    out_size: int

    def __str__(self) -> str:
        """Returns the sizes, for the names of checks."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} in {self.in_size} out {self.out_size} tokens {self.tokens}"


@dataclass
class ProductStep:
    """x [tokens, in] and weights [out, in] on a machine."""

    machine: Machine
    x: torch.Tensor
    weights: torch.Tensor
    portable: bool = False
    float32_output: bool = False

    def __post_init__(self) -> None:
        """Creates the kernel."""
        out_size, in_size = self.weights.shape
        dtype = KERNEL_DTYPES[self.x.dtype].value
        self._kernel = self.machine.kernels.ProductKernel(
            dtype, in_size, out_size, portable=self.portable, float32_output=self.float32_output
        )

    @classmethod
    def random(
        cls, machine: Machine, shape: ProductShape, generator: torch.Generator, exponents: int = 0
    ) -> ProductStep:
        """Returns normal numbers, times powers of two up to `exponents`, so that sums depend on their order."""

        def matrix(rows: int) -> torch.Tensor:
            size = (rows, shape.in_size)
            numbers = torch.randn(size, device=machine.device, generator=generator)
            powers = torch.randint(-exponents, exponents + 1, size, device=machine.device, generator=generator)
            return (numbers * torch.exp2(powers)).to(shape.dtype)

        step = cls(machine, matrix(shape.tokens), matrix(shape.out_size))
        # The weights must be complete, because the kernel may prefetch them early.
        machine.synchronize()
        return step

    def with_x(self, x: torch.Tensor) -> ProductStep:
        """Returns the same weights with another x."""
        return replace(self, x=x.contiguous())

    def empty_result(self) -> torch.Tensor:
        """Returns a y filled with NaN."""
        dtype = torch.float32 if self.float32_output else self.x.dtype
        return self.machine.poisoned((self.x.shape[0], self.weights.shape[0]), dtype)

    def enqueue(self, y: torch.Tensor) -> None:
        """Enqueues the product on torch's stream."""
        inputs = [self.x.data_ptr(), self.weights.data_ptr()]
        self._kernel.enqueue(self.x.shape[0], inputs, [y.data_ptr()], self.machine.stream())

    def run(self) -> torch.Tensor:
        """Runs the product and returns y when it is complete."""
        y = self.empty_result()
        self.enqueue(y)
        self.machine.synchronize()
        return y

    def wrong_elements(self, y: torch.Tensor) -> int:
        """Returns the number of elements of y whose error is larger than rounding allows."""
        x, weights = self.x.double(), self.weights.double()
        expected = x @ weights.T
        bound = expected.abs() * _ROUNDING[y.dtype] + (x.abs() @ weights.abs().T) * _SUM_ROUNDING + _SMALLEST
        return int((~((y.double() - expected).abs() <= bound)).sum())


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors of 2-byte elements are equal bit for bit."""
    return bool(torch.equal(first.view(torch.int16), second.view(torch.int16)))
