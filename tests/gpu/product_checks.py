"""Checks of ProductKernel: against float64, single tokens against batches, and the bits of its two kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from machine import Machine
from product_step import ProductShape, ProductStep, same_bits
from results import Check

DTYPES = (torch.float16, torch.bfloat16)
# Maximum exponents for which sums stay finite in the type.
_EXPONENTS = {torch.float16: 3, torch.bfloat16: 25}
_OTHERS = ("normal", "large", "infinity", "nan")
_ROWS = 4


def product_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Runs all checks, or a `subset` small enough for compute-sanitizer and the emulation."""
    for dtype in DTYPES:
        for in_size, out_size in _sizes(subset):
            for tokens in _tokens(subset):
                yield from _product(machine, ProductShape(dtype, tokens, in_size, out_size))
        yield from _invariance(machine, dtype, subset=subset)
        if machine.is_gpu:
            yield _graph(machine, ProductShape(dtype, 5, 512, 256))


def _sizes(subset: bool) -> tuple[tuple[int, int], ...]:
    if subset:
        return ((72, 136), (200, 64))
    return ((8, 8), (64, 64), (328, 1032), (4104, 264), (4096, 4096), (2048, 3072), (14336, 4096), (4096, 28672))


def _tokens(subset: bool) -> tuple[int, ...]:
    return (1, 33, 70) if subset else (1, 3, 8, 9, 16, 31, 64, 65, 100, 128, 200, 256, 300, 512, 1000, 2048)


def _product(machine: Machine, shape: ProductShape) -> Iterator[Check]:
    """Checks both kernels' results, and that they are equal even if the order of a sum matters."""
    generator = torch.Generator(machine.device)
    seed = generator.seed()
    step = ProductStep.random(machine, shape, generator)
    wrong = step.wrong_elements(step.run())
    yield Check(f"product {shape}", wrong == 0, f"{wrong} wrong elements with seed {seed}")
    wide = ProductStep.random(machine, shape, generator, _EXPONENTS[shape.dtype])
    rounded = wide.run()
    equal = same_bits(rounded, replace(wide, portable=True).run())
    yield Check(f"product {shape}: bits of the portable kernel", equal, f"they differ with seed {seed}")
    for portable in (False, True):
        unrounded = replace(wide, portable=portable, float32_output=True).run()
        equal = same_bits(rounded, unrounded.to(shape.dtype))
        name = f"product {shape}: float32 output{' of the portable kernel' if portable else ''}, rounded"
        yield Check(name, equal, f"bits differ with seed {seed}")
    step = replace(step, float32_output=True)
    wrong = step.wrong_elements(step.run())
    yield Check(f"product {shape}: float32 output", wrong == 0, f"{wrong} wrong elements with seed {seed}")


def _invariance(machine: Machine, dtype: torch.dtype, *, subset: bool) -> Iterator[Check]:
    """Checks that a token has the same bits in its own step, and at any place among other tokens."""
    in_size, out_size = (136, 72) if subset else (4096, 4096)
    generator = torch.Generator(machine.device)
    generator.seed()
    shape = ProductShape(dtype, _ROWS, in_size, out_size)
    rows = ProductStep.random(machine, shape, generator, _EXPONENTS[dtype])
    alone = [rows.with_x(rows.x[row : row + 1]).run() for row in range(_ROWS)]
    most = 80 if subset else 4096
    for tokens in (count for count in (4, 8, 9, 17, 33, 65, 80, 129, 256, 300, 512, 1000, 4096) if count <= most):
        different = []
        for others in _OTHERS:
            x = _filled(machine, ProductShape(dtype, tokens, in_size, out_size), others, generator)
            places = torch.randperm(tokens, device=machine.device, generator=generator)[:_ROWS].tolist()
            for row, place in enumerate(places):
                x[place] = rows.x[row]
            y = rows.with_x(x).run()
            if not all(same_bits(y[place], alone[row][0]) for row, place in enumerate(places)):
                different.append(others)
        name = str(dtype).removeprefix("torch.")
        yield Check(f"product {name}: bits alone and among {tokens}", not different, f"differ among {different}")


def _filled(machine: Machine, shape: ProductShape, others: str, generator: torch.Generator) -> torch.Tensor:
    size = (shape.tokens, shape.in_size)
    if others == "nan":
        return machine.poisoned(size, shape.dtype)
    if others == "infinity":
        return torch.full(size, float("inf"), dtype=shape.dtype, device=machine.device)
    scale = 1000.0 if others == "large" else 1.0
    return (torch.randn(size, device=machine.device, generator=generator) * scale).to(shape.dtype)


def _graph(machine: Machine, shape: ProductShape) -> Check:
    """Checks captured launches, each of which waits for the x that the previous launch writes."""
    generator = torch.Generator(machine.device)
    first = ProductStep.random(machine, shape, generator)
    second = ProductStep.random(
        machine, ProductShape(shape.dtype, shape.tokens, shape.out_size, shape.in_size), generator
    )
    middle, last = first.empty_result(), second.empty_result()
    second = second.with_x(middle)

    def work() -> None:
        first.enqueue(middle)
        second.enqueue(last)

    graph = machine.capture(work)
    first.x.copy_(torch.randn(first.x.shape, device=machine.device, generator=generator))
    middle.fill_(0)
    graph.replay()
    machine.synchronize()
    expected = second.with_x(first.run()).run()
    return Check(f"product {shape}: two in a graph", same_bits(last, expected), "the second read another x")
