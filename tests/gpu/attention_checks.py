"""Checks of PagedAttentionKernel: against float64, chunked against whole prompts, and replayed from a CUDA graph."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from attention_step import AttentionShape, AttentionStep
from machine import NAN_BITS, Machine
from results import Check

DTYPES = (torch.float16, torch.bfloat16)
# Head sizes with tensor core kernels.
HEAD_DIMS = (64, 80, 96, 128, 256)
# Sizes of heads with a prefill kernel for compute capability 9.0.
HOPPER_HEAD_DIMS = (64, 96, 128)


def attention_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Runs all checks, or a `subset` small enough for compute-sanitizer and the emulation."""
    for shape in _subset() if subset else _matrix():
        generator = torch.Generator(machine.device)
        seed = generator.seed()
        step = AttentionStep.random(machine, shape, generator)
        before = step.pool.clone()
        wrong = step.wrong_elements(step.run(), before)
        yield Check(f"attention {_describe(shape)}", wrong == 0, f"{wrong} wrong elements with seed {seed}")
    if machine.has_hopper_instructions:
        yield from _hopper_checks(machine, subset=subset)
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS[:1] if subset else HEAD_DIMS:
            for window in (0, 100):
                yield _chunks(machine, _of(dtype, head_dim, (70,), (200 if subset else 1500,), sliding_window=window))
            yield _alone(machine, _mixed(dtype, head_dim, interleaved=True, has_sinks=True))
            for window in (0, 700):
                yield _alone(machine, _of(dtype, head_dim, (700, 300, 5), (1, 1, 1), sliding_window=window))
                yield _decoded(machine, dtype, head_dim, 1000 if subset else 9000, window)
                for past in ((310,), (700, 3)) if subset else ((310,), (511,), (4000,), (20000, 600, 3)):
                    yield _repeated(machine, _of(dtype, head_dim, past, (1,) * len(past), sliding_window=window))
            if not subset:
                past = tuple(random.randrange(4000) for _ in range(60))
                yield _alone(machine, _of(dtype, head_dim, past, (1,) * len(past)))
            if machine.is_gpu:
                yield _decode_graph(machine, dtype, head_dim)
                yield _mixed_graph(machine, dtype, head_dim)


def _hopper_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Checks the prefill kernel for compute capability 9.0: right, and with the bits of the other kernels."""
    shapes = _subset() if subset else _matrix()
    for shape in shapes:
        if shape.head_dim in HOPPER_HEAD_DIMS and shape.tokens_per_block % 16 == 0 and max(shape.lengths) > 1:
            yield _both_prefills(machine, shape)
    for dtype in DTYPES:
        for head_dim in HOPPER_HEAD_DIMS[:1] if subset else HOPPER_HEAD_DIMS:
            for window in (0, 100):
                shape = _of(dtype, head_dim, (70,), (200 if subset else 1500,), sliding_window=window)
                yield _chunks(machine, replace(shape, hopper_prefill=True))
            yield _alone(machine, _mixed(dtype, head_dim, has_sinks=True, hopper_prefill=True))
            for window in (0, 700):
                yield _decoded(machine, dtype, head_dim, 1000 if subset else 9000, window, hopper_prefill=True)
            if machine.is_gpu:
                yield _mixed_graph(machine, dtype, head_dim, hopper_prefill=True)


def _both_prefills(machine: Machine, shape: AttentionShape) -> Check:
    """Checks a step's results against float64, and their bits against those of the other kernel."""
    generator = torch.Generator(machine.device)
    seed = generator.seed()
    portable = AttentionStep.random(machine, shape, generator)
    hopper = portable.with_prefill(hopper=True)
    before = portable.pool.clone()
    attended = hopper.run()
    wrong = hopper.wrong_elements(attended, before)
    different = int((attended.view(torch.int16) != portable.run().view(torch.int16)).sum())
    return Check(
        f"attention {_describe(hopper.shape)}: right, and bits of both kernels",
        wrong == 0 and different == 0,
        f"{wrong} wrong elements, {different} differ, with seed {seed}",
    )


def _describe(shape: AttentionShape) -> str:
    longest = max(past + length for past, length in zip(shape.past, shape.lengths, strict=True))
    return (
        f"{str(shape.dtype).removeprefix('torch.')} heads {shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim} "
        f"tokens {shape.tokens} sequences {len(shape.lengths)} longest {longest} "
        f"blocks of {shape.tokens_per_block} window {shape.sliding_window} cap {shape.softcap:g}"
        f"{' neighbours rotate' if shape.interleaved else ''}{' sinks' if shape.has_sinks else ''}"
        f"{' hopper prefill' if shape.hopper_prefill else ''}"
    )


def _of(
    dtype: torch.dtype, head_dim: int, past: tuple[int, ...], lengths: tuple[int, ...], **others: Any
) -> AttentionShape:
    heads = {"num_heads": 8, "num_kv_heads": 2}
    return AttentionShape(dtype=dtype, head_dim=head_dim, past=past, lengths=lengths, **{**heads, **others})


def _mixed(dtype: torch.dtype, head_dim: int, **others: Any) -> AttentionShape:
    """Returns prompts, chunks after a context, decodes, and both kinds of padding."""
    past = (0, 70, 61, 0, 0, 15, 128, 0, 127)
    lengths = (37, 1, 50, 1, 1, 2, 3, 5, 1)
    return replace(_of(dtype, head_dim, past, lengths, **others), padding=(3, 7))


def _matrix() -> Iterator[AttentionShape]:
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for tokens_per_block in (16, 32, 48, 64, 128):
                yield _mixed(dtype, head_dim, tokens_per_block=tokens_per_block)
            for window in (1, 16, 17, 100, 1000):
                yield _mixed(dtype, head_dim, sliding_window=window)
                yield _of(dtype, head_dim, (1200, 3, 500, 90), (1, 1, 1, 300), sliding_window=window)
            for cap in (0.25, 3.0, 50.0):
                yield _mixed(dtype, head_dim, softcap=cap)
                yield _of(dtype, head_dim, (1200, 3, 500, 90), (1, 1, 1, 300), softcap=cap)
            for heads, kv_heads in ((1, 1), (12, 12), (6, 2), (14, 2), (32, 4), (16, 1), (17, 1), (40, 1)):
                yield _mixed(dtype, head_dim, num_heads=heads, num_kv_heads=kv_heads)
            # Decodes whose keys are split into every possible number of parts, or not split.
            for past in (0, 1, 255, 256, 257, 511, 4000, 20000):
                yield _of(dtype, head_dim, (past, past // 2, 17), (1, 1, 1))
            yield _of(dtype, head_dim, tuple(range(1, 400, 3)), (1,) * 133)
            for length in (2, 63, 64, 65, 500, 2048):
                yield _of(dtype, head_dim, (0, 333), (length, length))
        for half in (1, 4, 16, 20, 32, 40):
            yield _mixed(dtype, 80, rotary_half=half)
        for head_dim in HEAD_DIMS:
            yield _mixed(dtype, head_dim, has_sinks=True)
            yield _of(dtype, head_dim, (1200, 3, 500, 90), (1, 1, 1, 300), has_sinks=True, sliding_window=100)
            yield _mixed(dtype, head_dim, interleaved=True)
            yield _of(dtype, head_dim, (70, 3), (1, 1), interleaved=True, rotary_half=16)
            for chunk in (1, 17, 100, 1000):
                yield _mixed(dtype, head_dim, chunk=chunk, query_scaling_beta=0.7, query_scaling_length=20)
                yield _of(dtype, head_dim, (1200, 3, 500, 90), (1, 1, 1, 300), chunk=chunk)
        for head_dim in (2, 12, 16, 40, 72, 200):
            yield _mixed(dtype, head_dim)
            yield _mixed(dtype, head_dim, sliding_window=20, softcap=1.5)
        for tokens_per_block in (1, 8, 20):
            yield _mixed(dtype, 64, tokens_per_block=tokens_per_block)
        for _ in range(20):
            yield _random(dtype)


def _random(dtype: torch.dtype) -> AttentionShape:
    sequences = random.randint(1, 40)
    kv_heads = random.randint(1, 8)
    shape = _of(
        dtype,
        random.choice(HEAD_DIMS),
        tuple(random.choice((0, random.randrange(40), random.randrange(3000))) for _ in range(sequences)),
        tuple(random.choice((1, 1, 1, random.randint(2, 20), random.randint(2, 400))) for _ in range(sequences)),
        num_heads=kv_heads * random.randint(1, 9),
        num_kv_heads=kv_heads,
        tokens_per_block=random.choice((16, 32, 64, 128)),
        sliding_window=random.choice((0, 0, random.randint(1, 500))),
    )
    return replace(shape, padding=tuple(index for index in range(sequences) if random.random() < 0.1))


def _subset() -> Iterator[AttentionShape]:
    for dtype in DTYPES:
        for head_dim in (*HEAD_DIMS, 12):
            yield _mixed(dtype, head_dim, tokens_per_block=16)
        yield _mixed(dtype, 64, sliding_window=33)
        yield _mixed(dtype, 64, softcap=1.5)
        yield _mixed(dtype, 64, chunk=33, query_scaling_beta=0.7, query_scaling_length=20)
        yield _mixed(dtype, 64, interleaved=True, has_sinks=True)
        yield _of(dtype, 64, (700, 300, 5), (1, 1, 1))


def _chunks(machine: Machine, shape: AttentionShape) -> Check:
    """Checks that a prompt has the same bits in chunks and as a whole."""
    whole = AttentionStep.random(machine, shape, torch.Generator(machine.device))
    chunked = whole.part(0, 0, shape.lengths[0])
    chunked.pool = whole.pool.clone()
    expected = whole.run()
    different = 0
    begin = 0
    while begin < shape.lengths[0]:
        # A chunk of one token is a decode.
        end = min(shape.lengths[0], begin + random.choice((1, random.randint(2, 130))))
        got = chunked.part(0, begin, end).run()
        different += int((got.view(torch.int16) != expected[begin:end].view(torch.int16)).sum())
        begin = end
    different += int((chunked.pool.view(torch.int16) != whole.pool.view(torch.int16)).sum())
    return Check(f"attention {_describe(shape)}: bits in chunks and whole", different == 0, f"{different} differ")


def _alone(machine: Machine, shape: AttentionShape) -> Check:
    """Checks that each sequence has the same bits in its own step and with others."""
    together = AttentionStep.random(machine, shape, torch.Generator(machine.device))
    before = together.pool.clone()
    expected = together.run()
    different = []
    for sequence, length in enumerate(shape.lengths):
        alone = together.part(sequence, 0, length)
        alone.pool = before.clone()
        begin = int(together.offsets[sequence])
        if not torch.equal(alone.run().view(torch.int16), expected[begin : begin + length].view(torch.int16)):
            different.append(sequence)
    name = f"attention {_describe(shape)}: bits alone and together"
    return Check(name, not different, f"sequences {different} differ")


def _decoded(machine: Machine, dtype: torch.dtype, head_dim: int, longest: int, window: int, **others: Any) -> Check:
    """Checks that tokens have the same bits in a prompt and as decodes, and in chunks of two."""
    past = random.randrange(longest // 2, longest)
    tokens = 8
    shape = _of(dtype, head_dim, (past,), (tokens,), sliding_window=window, **others)
    prompt = AttentionStep.random(machine, shape, torch.Generator(machine.device))
    before = prompt.pool.clone()
    expected = prompt.run().view(torch.int16)
    different = 0
    for count in (1, 2):
        decoded = prompt.part(0, 0, tokens)
        decoded.pool = before.clone()
        for begin in range(0, tokens, count):
            got = decoded.part(0, begin, begin + count).run().view(torch.int16)
            different += int((got != expected[begin : begin + count]).sum())
    name = f"attention {_describe(prompt.shape)}: bits in a prompt and as decodes"
    return Check(name, different == 0, f"{different} differ")


def _repeated(machine: Machine, shape: AttentionShape) -> Check:
    """Checks that many launches with the same counters have the bits of one with counters in the workspace."""
    first = AttentionStep.random(machine, replace(shape, has_counters=False), torch.Generator(machine.device))
    expected = first.run().view(torch.int16)
    step = replace(first, shape=shape)
    results = [step.empty_result() for _ in range(50 if machine.is_gpu else 2)]

    def work() -> None:
        for attended in results:
            step.enqueue(attended)

    if machine.is_gpu:
        graph = machine.capture(work)
        for attended in results:
            attended.view(torch.uint8).fill_(NAN_BITS)
        graph.replay()
    else:
        work()
    machine.synchronize()
    different = sum(int((attended.view(torch.int16) != expected).sum()) for attended in results)
    different += int(step.counters.count_nonzero())
    name = f"attention {_describe(shape)}: bits in {len(results)} launches"
    return Check(name, different == 0, f"{different} differ")


def _decode_graph(machine: Machine, dtype: torch.dtype, head_dim: int) -> Check:
    """Checks that a graph captured with padding is correct for later decodes."""
    shape = _of(dtype, head_dim, (900, 0, 30, 257, 512), (1,) * 5, max_blocks=64)
    return _replayed(machine, replace(shape, padding=(1,)), replace(shape, padding=(0, 1, 2, 3, 4)))


def _mixed_graph(machine: Machine, dtype: torch.dtype, head_dim: int, **others: Any) -> Check:
    """Checks that a graph is correct for another distribution of its tokens over the sequences."""
    later = _of(dtype, head_dim, (0, 600, 3, 77), (50, 1, 100, 9), max_blocks=64, **others)
    return _replayed(machine, later, replace(later, past=(5, 100, 0, 1), lengths=(1, 156, 2, 1)))


def _replayed(machine: Machine, later: AttentionShape, captured: AttentionShape) -> Check:
    """Captures one step, fills its tensors with another step of the same sizes, and replays it."""
    generator = torch.Generator(machine.device)
    step = AttentionStep.random(machine, later, generator)
    other = AttentionStep.random(machine, captured, generator)
    content = {name: getattr(step, name).clone() for name in ("tables", "offsets", "positions")}
    for name in content:
        getattr(step, name).copy_(getattr(other, name))
    own = step.pool
    step.pool = machine.poisoned((max(own.shape[0], other.pool.shape[0]), *own.shape[1:]), own.dtype)
    attended = step.empty_result()
    graph = machine.capture(lambda: step.enqueue(attended))
    for name, tensor in content.items():
        getattr(step, name).copy_(tensor)
    step.pool.view(torch.uint8).fill_(NAN_BITS)
    step.pool[: own.shape[0]].view(torch.int16).copy_(own.view(torch.int16))
    before = step.pool.clone()
    attended.view(torch.uint8).fill_(NAN_BITS)
    graph.replay()
    machine.synchronize()
    wrong = step.wrong_elements(attended, before)
    return Check(f"attention {_describe(later)}: captured with other content", wrong == 0, f"{wrong} wrong elements")
