"""Times of PagedAttentionKernel, compared with the machine's limits and torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from attention_step import AttentionShape, AttentionStep
from machine import Machine
from rates import limit_microseconds, steps_in_a_row
from results import Timing
from torch.nn.functional import scaled_dot_product_attention

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
# Number of sequences, and their tokens in the pool.
_DECODES = (
    *((1, 128), (1, 512), (1, 800), (1, 4096), (1, 32768)),
    *((4, 512), (8, 1024), (8, 8192), (64, 512), (64, 4096), (256, 1024)),
)
# Tokens of a prompt in the step, and already in the pool.
_PREFILLS = ((128, 0), (512, 0), (2048, 0), (8192, 0), (512, 7680))
_MOST_IN_A_ROW = 64


def attention_timings(machine: Machine, rates: dict[str, float]) -> Iterator[Timing]:
    """Measures in bfloat16, with an 8B model's heads. Only AdaptRT's times include RoPE and the write to the pool."""
    for sequences, past in _DECODES:
        shape = _shape((past - 1,) * sequences, (1,) * sequences)
        yield _timing(machine, rates, shape, f"attention decode sequences {sequences} keys {past}")
    for tokens, past in _PREFILLS:
        shape, name = _shape((past,), (tokens,)), f"attention prefill tokens {tokens} behind {past}"
        yield _timing(machine, rates, shape, name)
        if machine.has_hopper_instructions:
            yield _timing(machine, rates, replace(shape, hopper_prefill=True), f"{name}, hopper_prefill")


def _shape(past: tuple[int, ...], lengths: tuple[int, ...]) -> AttentionShape:
    return AttentionShape(
        dtype=torch.bfloat16,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        past=past,
        lengths=lengths,
        tokens_per_block=64,
    )


def _timing(machine: Machine, rates: dict[str, float], shape: AttentionShape, name: str) -> Timing:
    bytes_moved, flops = _needs(shape)
    in_a_row = steps_in_a_row(bytes_moved, _MOST_IN_A_ROW)
    return Timing(
        name=name,
        microseconds=_our_seconds(machine, shape, in_a_row) * 1e6,
        bytes=bytes_moved,
        flops=flops,
        limit_microseconds=limit_microseconds(rates, bytes_moved, flops),
        other="torch sdpa, contiguous keys",
        other_microseconds=_torch_seconds(machine, shape, in_a_row) * 1e6,
    )


def _our_seconds(machine: Machine, shape: AttentionShape, in_a_row: int) -> float:
    generator = torch.Generator(machine.device)
    steps = [AttentionStep.random(machine, shape, generator) for _ in range(in_a_row)]
    results = [step.empty_result() for step in steps]

    def work() -> None:
        for step, attended in zip(steps, results, strict=True):
            step.enqueue(attended)

    return machine.seconds(work, 5) / in_a_row


def _torch_seconds(machine: Machine, shape: AttentionShape, in_a_row: int) -> float:
    inputs = [_contiguous(machine, shape) for _ in range(in_a_row)]

    def work() -> None:
        for query, key, value, mask in inputs:
            scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=_is_whole_prompt(shape), enable_gqa=True
            )

    return machine.seconds(work, 5) / in_a_row


def _is_whole_prompt(shape: AttentionShape) -> bool:
    return shape.lengths[0] > 1 and shape.past[0] == 0


def _contiguous(
    machine: Machine, shape: AttentionShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns queries, keys, values and a mask (or None) of a step whose sequences have equal lengths."""
    sequences, length, past = len(shape.lengths), shape.lengths[0], shape.past[0]

    def normal(heads: int, rows: int) -> torch.Tensor:
        return torch.randn((sequences, heads, rows, HEAD_DIM), device=machine.device).to(shape.dtype)

    mask = None
    if length > 1 and past > 0:
        mask = torch.ones((length, past + length), dtype=torch.bool, device=machine.device).tril(past)
    return normal(HEADS, length), normal(KV_HEADS, past + length), normal(KV_HEADS, past + length), mask


def _needs(shape: AttentionShape) -> tuple[float, float]:
    """Returns the bytes of keys, values, q, k, v and the result, and the operations of the scores and sums."""
    size = shape.dtype.itemsize
    moved = shape.tokens * 2 * (HEADS + KV_HEADS) * HEAD_DIM
    pairs = 0
    for past, length in zip(shape.past, shape.lengths, strict=True):
        moved += (past + length) * 2 * KV_HEADS * HEAD_DIM
        pairs += length * past + length * (length + 1) // 2
    return float(size * moved), 4.0 * pairs * HEADS * HEAD_DIM
