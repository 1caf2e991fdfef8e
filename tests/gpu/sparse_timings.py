"""Times of a ReLU-gated MLP in host memory: active neurons that kernels read, beside copies of whole matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from machine import Machine
from results import Timing
from sparse_step import SparseShape, SparseStep

# (hidden, neurons) of ReLU Llama 7B and of Bamboo 7B.
_SIZES = ((4096, 11008), (4096, 14336))
_OPEN = 10


def sparse_timings(machine: Machine) -> Iterator[Timing]:
    """Measures in bfloat16, with 90 % of the gates of each row closed and 0, 50 and 100 % of the neurons resident.

    The limit is the time to copy as many bytes as the active neurons in host memory have, at the rate of the copy of
    the whole matrices.
    """
    generator = torch.Generator(machine.device)
    for hidden, neurons in _SIZES:
        for tokens in (1, 4, 8):
            for resident in (0, 50, 100):
                yield _timing(machine, SparseShape(torch.bfloat16, tokens, hidden, neurons, _OPEN, resident), generator)


def _timing(machine: Machine, shape: SparseShape, generator: torch.Generator) -> Timing:
    step = SparseStep(machine, shape, generator)
    y = machine.poisoned((shape.tokens, shape.hidden), shape.dtype)
    on_device = [torch.empty_like(matrix, device=machine.device) for matrix in step.pinned]

    def copy() -> None:
        for matrix, host in zip(on_device, step.pinned, strict=True):
            matrix.copy_(host, non_blocking=True)

    seconds, copying = machine.seconds(lambda: step.enqueue(y), 3), machine.seconds(copy, 1)
    matrix_bytes = float(sum(matrix.nbytes for matrix in step.pinned))
    cold = int(((step.gate > 0).any(0) & (step.slots < 0)).sum())
    share = cold / shape.neurons
    return Timing(
        name=f"sparse {shape}, {step.num_active} active",
        microseconds=seconds * 1e6,
        bytes=share * matrix_bytes,
        flops=2.0 * shape.tokens * matrix_bytes / 2 * step.num_active / shape.neurons,
        limit_microseconds=share * copying * 1e6,
        other="a copy of up and down",
        other_microseconds=copying * 1e6,
    )
