"""A ReLU-gated MLP whose neurons are on the device or in pinned host memory, and the same with whole matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from machine import KERNEL_DTYPES, Machine

_GROUP = 16


@dataclass(frozen=True)
class SparseShape:
    """Sizes of an MLP, and how many gates are open and neurons on the device, in percent."""

    dtype: torch.dtype
    tokens: int
    hidden: int
    neurons: int
    open: int
    resident: int

    def __str__(self) -> str:
        """Returns the sizes, for the names of checks."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{dtype} hidden {self.hidden} neurons {self.neurons} tokens {self.tokens} open {self.open} % "
            f"resident {self.resident} %"
        )


class SparseStep:
    """The launches after the gate: masks, up, the product with the gate, and down."""

    def __init__(self, machine: Machine, shape: SparseShape, generator: torch.Generator) -> None:
        self._machine = machine
        self.shape = shape
        self._dtype = KERNEL_DTYPES[shape.dtype].value
        self.x = self._random(shape.tokens, shape.hidden)
        is_open = torch.rand((shape.tokens, shape.neurons), device=machine.device) * 100 < shape.open
        gate = self._random(shape.tokens, shape.neurons).abs()
        self.gate = torch.where(is_open, gate, -gate)
        self.up = self._random(shape.neurons, shape.hidden)
        self.down = self._random(shape.hidden, shape.neurons)
        self.masks = torch.zeros(-(-shape.neurons // _GROUP), dtype=torch.int16, device=machine.device)
        is_resident = torch.rand(shape.neurons, device=machine.device, generator=generator) * 100 < shape.resident
        kept = is_resident.nonzero().flatten()
        self.slots = torch.full((shape.neurons,), -1, dtype=torch.int32, device=machine.device)
        self.slots[kept] = torch.arange(len(kept), dtype=torch.int32, device=machine.device)
        # Elements that a place does not have are NaN, so they must not be read.
        self._resident = [matrix[kept].contiguous() for matrix in (self.up, self.down.T)]
        self.pinned = [self._host(matrix, kept) for matrix in (self.up, self.down.T)]
        self._linear = machine.poisoned((shape.tokens, shape.neurons), shape.dtype)
        machine.synchronize()

    @property
    def num_active(self) -> int:
        """Number of neurons whose gates are open in some row."""
        return int((self.gate > 0).any(0).sum())

    def mark(self) -> None:
        """Enqueues the masks."""
        self._machine.kernels.enqueue_mark_active(
            dtype=self._dtype, tokens=self.shape.tokens, neurons=self.shape.neurons, gate=self.gate.data_ptr(),
            masks=self.masks.data_ptr(), stream=self._machine.stream(),
        )  # fmt: skip

    def enqueue(self, y: torch.Tensor) -> None:
        """Enqueues all launches, with torch's product of the gate and up."""
        self.mark()
        self._machine.kernels.enqueue_sparse_up(
            in_size=self.shape.hidden, x=self.x.data_ptr(), y=self._linear.data_ptr(), **self._arguments(0)
        )
        gated = self.gated(self._linear)
        self._machine.kernels.enqueue_sparse_down(
            out_size=self.shape.hidden, x=gated.data_ptr(), y=y.data_ptr(), **self._arguments(1)
        )

    def run(self) -> torch.Tensor:
        """Returns the MLP's output."""
        y = self._machine.poisoned((self.shape.tokens, self.shape.hidden), self.shape.dtype)
        self.enqueue(y)
        self._machine.synchronize()
        return y

    def run_whole(self, *, portable: bool) -> torch.Tensor:
        """Returns the same with whole matrices, by ProductKernel."""
        return self._product(self.gated(self._product(self.x, self.up, portable)), self.down, portable)

    def gated(self, linear: torch.Tensor) -> torch.Tensor:
        """Returns relu(gate) * linear, with zeros for closed gates whatever linear is."""
        return torch.where(self.gate > 0, self.gate * linear, torch.zeros_like(linear))

    def _product(self, x: torch.Tensor, weights: torch.Tensor, portable: bool) -> torch.Tensor:
        y = self._machine.poisoned((x.shape[0], weights.shape[0]), x.dtype)
        kernel = self._machine.kernels.ProductKernel(self._dtype, x.shape[1], weights.shape[0], portable=portable)
        self._machine.synchronize()
        kernel.enqueue(x.shape[0], [x.data_ptr(), weights.data_ptr()], [y.data_ptr()], self._machine.stream())
        self._machine.synchronize()
        return y

    def _arguments(self, matrix: int) -> dict[str, Any]:
        return {
            "dtype": self._dtype,
            "tokens": self.shape.tokens,
            "neurons": self.shape.neurons,
            "masks": self.masks.data_ptr(),
            "slots": self.slots.data_ptr(),
            "resident": self._resident[matrix].data_ptr(),
            "pinned": self.pinned[matrix].data_ptr(),
            "stream": self._machine.stream(),
        }

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self._machine.device).to(self.shape.dtype)

    def _host(self, matrix: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        copied = matrix.clone()
        copied[kept] = float("nan")
        host = copied.cpu().contiguous()
        return host.pin_memory() if self._machine.is_gpu else host
