"""Checks of the kernels that read active neurons: against float64, and bit by bit against whole matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from machine import Machine
from product_step import same_bits
from results import Check
from sparse_step import SparseShape, SparseStep

DTYPES = (torch.float16, torch.bfloat16)
_TOLERANCE = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def sparse_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Runs all checks, or a `subset` small enough for compute-sanitizer and the emulation."""
    generator = torch.Generator(machine.device)
    seed = generator.seed()
    for dtype in DTYPES:
        for hidden, neurons in ((72, 200),) if subset else ((64, 64), (72, 200), (1032, 328)):
            for tokens in (1, 5) if subset else (1, 2, 3, 8):
                for percent in (0, 10, 100) if subset else (0, 1, 10, 50, 100):
                    for resident in (0, 50) if subset else (0, 50, 100):
                        shape = SparseShape(dtype, tokens, hidden, neurons, percent, resident)
                        yield from _mlp(machine, shape, generator, seed)
        for hidden, neurons in () if subset else ((4096, 11008), (4096, 14336)):
            for tokens in (1, 8):
                yield from _mlp(machine, SparseShape(dtype, tokens, hidden, neurons, 10, 50), generator, seed)
        if machine.is_gpu:
            yield _graph(machine, SparseShape(dtype, 2, 512, 1024, 10, 50), generator)


def _mlp(machine: Machine, shape: SparseShape, generator: torch.Generator, seed: int) -> Iterator[Check]:
    step = SparseStep(machine, shape, generator)
    y = step.run()
    for portable in (False, True):
        equal = same_bits(y, step.run_whole(portable=portable))
        name = f"sparse {shape}: bits of whole matrices{', portable' if portable else ''}"
        yield Check(name, equal, f"they differ with seed {seed}")
    linear = step.x.double() @ step.up.double().T
    expected = step.gated(linear.to(shape.dtype)).double() @ step.down.double().T
    error = float((y.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
    yield Check(f"sparse {shape}", error <= _TOLERANCE[shape.dtype], f"error {error:.1e} with seed {seed}")


def _graph(machine: Machine, shape: SparseShape, generator: torch.Generator) -> Check:
    """Checks captured launches with gates that differ from those at the capture."""
    step = SparseStep(machine, shape, generator)
    y = machine.poisoned((shape.tokens, shape.hidden), shape.dtype)
    graph = machine.capture(lambda: step.enqueue(y))
    step.gate.neg_()
    graph.replay()
    machine.synchronize()
    equal = same_bits(y, step.run_whole(portable=True))
    return Check(f"sparse {shape}: a graph with other gates", equal, "it reads the neurons of the capture")
