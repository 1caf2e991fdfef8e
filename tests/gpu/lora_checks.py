"""Checks of LoraKernel: against float64, separate sequences against batches, and replayed from a CUDA graph."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from lora_step import LAYER, LoraShape, LoraStep
from machine import Machine
from results import Check

DTYPES = (torch.float16, torch.bfloat16)
QKV = (4096, 1024, 1024)
# A lower threshold for tiles of many tokens than the kernels' default.
_MANY_TOKENS = 256


def lora_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Runs all checks, or a `subset` small enough for compute-sanitizer and the emulation."""
    for shape in _subset() if subset else _matrix():
        generator = torch.Generator(machine.device)
        seed = generator.seed()
        step = LoraStep.random(machine, shape, generator)
        wrong = step.wrong_elements(step.run())
        yield Check(f"lora {_describe(shape)}", wrong == 0, f"{wrong} wrong elements with seed {seed}")
    for dtype in DTYPES:
        shape = _mixed(dtype, small=subset)
        yield from _invariance(machine, shape)
        if machine.is_gpu:
            yield _graph(machine, shape)


def _describe(shape: LoraShape) -> str:
    ranks = sorted({rank for ranks in shape.ranks for rank in ranks})
    flags = [name for name in ("dora", "shifts", "odd_addresses", "integers", "cancelling") if getattr(shape, name)]
    return (
        f"{str(shape.dtype).removeprefix('torch.')} in {shape.in_size} out {list(shape.out_sizes)} "
        f"tokens {shape.tokens} sequences {len(shape.lengths)} adapters {len(shape.ranks)} ranks {ranks} "
        f"{' '.join(flags)}".rstrip()
    )


def _one_each(
    dtype: torch.dtype, adapters: int, rank: int, length: int, in_size: int, out: tuple[int, ...]
) -> LoraShape:
    """Returns a sequence of `length` tokens for each adapter."""
    return LoraShape(
        dtype=dtype,
        in_size=in_size,
        out_sizes=out,
        ranks=((rank,) * len(out),) * adapters,
        lengths=(length,) * adapters,
        slots=tuple(range(adapters)),
    )


def _matrix() -> Iterator[LoraShape]:
    for dtype in DTYPES:
        for integers in (False, True):
            for rank in (1, 2, 3, 4, 7, 8, 12, 16, 24, 32, 33, 64, 100, 128, 200, 256):
                for length in (1, 5, 16, 17, 64, 300, 512):
                    shape = replace(_one_each(dtype, 1, rank, length, 1024, (512,)), integers=integers)
                    yield shape
                    if length >= _MANY_TOKENS:
                        yield replace(shape, many_tokens_from=_MANY_TOKENS)
            for adapters in (1, 2, 3, 8, 17, 32, 64):
                for length in (1, 4, 8):
                    yield replace(_one_each(dtype, adapters, 16, length, 4096, QKV), integers=integers, dora=True)
            for in_size in (1, 8, 31, 64, 97, 520, 1031, 11008):
                shape = _one_each(dtype, 3, 20, 7, in_size, (71, 1, 33))
                yield replace(shape, integers=integers)
                yield replace(shape, integers=integers, odd_addresses=True)
            for small in (False, True):
                yield replace(_mixed(dtype, small=small), integers=integers)
                yield replace(_mixed(dtype, small=small), integers=integers, shifts=True)
            yield replace(_one_each(dtype, 8, 16, 1, 4096, QKV), integers=integers, dora=True, shifts=True)
            yield replace(_one_each(dtype, 4, 64, 4096, 2048, (2048,)), integers=integers)


def _subset() -> Iterator[LoraShape]:
    for dtype in DTYPES:
        for integers in (False, True):
            yield replace(_one_each(dtype, 3, 12, 1, 200, (72, 24, 16)), integers=integers)
            yield replace(_one_each(dtype, 1, 40, 70, 136, (48,)), integers=integers, many_tokens_from=64)
            yield replace(_one_each(dtype, 2, 5, 3, 31, (7, 9, 1)), integers=integers, odd_addresses=True)
            yield replace(_mixed(dtype, small=True), integers=integers, shifts=True)


def _mixed(dtype: torch.dtype, *, small: bool) -> LoraShape:
    """Returns sequences with and without adapters, empty sequences, and ranks that differ by part or are 0."""
    adapters = 5 if small else 48
    sequences = 9 if small else 90
    longest = 40 if small else 260
    ranks = [tuple(random.choice((0, 1, 8, 16, 33, 64)) for _ in range(3)) for _ in range(adapters)]
    lengths = [random.choice((0, 1, 1, 1, 9, 17, longest)) for _ in range(sequences)]
    # A prompt, so that the step uses the path for many tokens.
    lengths[sequences // 2] = 280
    return LoraShape(
        dtype=dtype,
        in_size=192 if small else 2048,
        out_sizes=(72, 24, 32) if small else (1024, 512, 520),
        ranks=tuple(ranks),
        lengths=tuple(lengths),
        slots=tuple(sorted(random.randrange(-1, adapters) for _ in range(sequences))),
        max_rank=64,
        dora=True,
        many_tokens_from=_MANY_TOKENS,
    )


def _invariance(machine: Machine, shape: LoraShape) -> Iterator[Check]:
    """Checks that a sequence's bits are the same in its own step, with others, in other tiles, and with y over base."""
    step = LoraStep.random(machine, replace(shape, cancelling=True, shifts=True), torch.Generator(machine.device))
    together = step.run()
    offsets = step.offsets.tolist()
    different = []
    for sequence, (begin, end) in enumerate(pairwise(offsets)):
        if begin == end:
            continue
        alone = step.alone(sequence).run()
        if not torch.equal(alone.view(torch.int16), together[begin:end].view(torch.int16)):
            different.append(sequence)
    name = f"lora {_describe(shape)}"
    yield Check(f"{name}: bits alone and together", not different, f"sequences {different} differ")
    otherwise = step.tiled(step.shape.tokens + 1).run()
    equal = torch.equal(otherwise.view(torch.int16), together.view(torch.int16))
    yield Check(f"{name}: bits in tiles of few tokens and of many", equal)
    decode = replace(shape, cancelling=True, lengths=(1,) * len(shape.slots), many_tokens_from=None)
    short = LoraStep.random(machine, decode, torch.Generator(machine.device))
    equal = torch.equal(short.run().view(torch.int16), short.as_long_step().run().view(torch.int16))
    yield Check(f"lora {_describe(decode)}: bits of decode steps and of long steps", equal)
    in_place = step.base.clone()
    step.base = in_place
    step.enqueue(in_place)
    machine.synchronize()
    yield Check(f"{name}: y over base", torch.equal(in_place.view(torch.int16), together.view(torch.int16)))


def _graph(machine: Machine, shape: LoraShape) -> Check:
    """Checks that a captured launch is correct for adapters and slots that are set later."""
    step = LoraStep.random(machine, shape, torch.Generator(machine.device))
    y = step.empty_result()
    graph = machine.capture(lambda: step.enqueue(y))
    step.slots.copy_(step.slots.flip(0))
    step.ranks[0] = 0
    step.factors[0] = [None] * len(shape.out_sizes)
    # The first part of adapter 1 becomes that of adapter 2.
    step.ranks[1, LAYER, 1] = step.ranks[2, LAYER, 1]
    step.pointers[1, LAYER, 1] = step.pointers[2, LAYER, 1]
    step.factors[1][0] = step.factors[2][0]
    y.view(torch.uint8).fill_(0xFF)
    graph.replay()
    machine.synchronize()
    wrong = step.wrong_elements(y)
    return Check(f"lora {_describe(shape)}: captured before adapters were set", wrong == 0, f"{wrong} wrong elements")
