"""Makes a program of lowered ops: buffers with their places in the arena, limits and the adapters' layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..._core import DType, EngineError, RowKind, dtype_name
from .arena import Arena, Lifetime, plan_arena
from .lower import LoweredProgram
from .lowered import LoweredOp
from .plan import Buffer, BufferName, LoraLayout, ModelShape, Op, Program


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """Sizes that an engine is built for."""

    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    max_seq_len: int
    max_beam_width: int
    tokens_per_block: int


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """What an engine with LoRA accepts of adapters."""

    max_rank: int
    dora_enabled: bool
    target_modules: tuple[int, ...]


def assemble(
    lowered: LoweredProgram,
    *,
    dtype: DType,
    shape: ModelShape,
    num_layers: int,
    int8_kv_cache: bool,
    limits: ProgramLimits,
    lora: LoraOptions | None,
) -> tuple[Program, Arena]:
    """The program, and how its arena was planned."""
    _check_adaptation(lowered, lora)
    roots = _buffer_roots(lowered)
    if lowered.logits not in roots:
        raise EngineError(f"the network's logits '{lowered.logits}' are made by no op")
    lifetimes, buffers = _buffers(lowered, roots, limits)
    arena = plan_arena(lifetimes)
    layout = None
    if lora is not None:
        layout = LoraLayout(
            dtype=dtype,
            num_layers=num_layers,
            max_rank=lora.max_rank,
            dora_enabled=lora.dora_enabled,
            shape=shape,
            target_modules=lora.target_modules,
            sites=lowered.sites,
        )
    program = Program(
        dtype=dtype,
        vocab_size=lowered.index.width(lowered.logits),
        num_layers=num_layers,
        shape=shape,
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_input_len=limits.max_input_len,
        max_seq_len=limits.max_seq_len,
        max_beam_width=limits.max_beam_width,
        tokens_per_block=limits.tokens_per_block,
        int8_kv_cache=int8_kv_cache,
        arena_bytes=arena.num_bytes,
        buffers=tuple(
            Buffer(name=name, dtype=op.dtype, rows=op.rows, width=width, offset=arena.offsets[name])
            for name, (op, width) in buffers.items()
        ),
        body=tuple(_renamed(op, roots) for op in lowered.body),
        head=tuple(_renamed(op, roots) for op in lowered.head),
        logits=BufferName(roots[lowered.logits]),
        lora=layout,
    )
    return program, arena


def _check_adaptation(lowered: LoweredProgram, lora: LoraOptions | None) -> None:
    """The graph has the adapter nodes that the options ask for."""
    adaptation = lowered.adaptation
    if lora is None or adaptation is None:
        if lora is not None or adaptation is not None:
            raise EngineError(
                "the network has adapter nodes exactly when the engine is built with LoRA; here it is not so"
            )
        return
    if lora.dora_enabled != adaptation.dora:
        raise EngineError("the network has Dora nodes exactly when the engine is built with DoRA; here it is not so")
    if lora.max_rank != adaptation.max_rank:
        raise EngineError(f"the network's max_rank is {adaptation.max_rank}, the engine's {lora.max_rank}")


def _buffer_roots(lowered: LoweredProgram) -> dict[str, str]:
    """The buffer of each value: that of the value it was written over, or its own."""
    roots: dict[str, str] = {}
    for op in (*lowered.body, *lowered.head):
        for value in op.writes:
            roots[value] = value if op.in_place is None else roots[op.in_place]
    return roots


def _buffers(
    lowered: LoweredProgram, roots: Mapping[str, str], limits: ProgramLimits
) -> tuple[list[Lifetime], dict[str, tuple[LoweredOp, int]]]:
    """The life of each buffer, and by its name the op that first writes it and its width."""
    ops: Sequence[LoweredOp] = (*lowered.body, *lowered.head)
    head = len(lowered.body)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    buffers: dict[str, tuple[LoweredOp, int]] = {}
    for at, op in enumerate(ops):
        for value in op.reads:
            # The head runs once a slice of rows, so what it reads of the body must outlive all of it.
            from_body = at >= head and first[roots[value]] < head
            last[roots[value]] = len(ops) if from_body else at
        for value in op.writes:
            name = roots[value]
            if name not in first:
                first[name] = at
                buffers[name] = (op, lowered.index.width(value))
            last[name] = max(last.get(name, at), at)
    last[roots[lowered.logits]] = len(ops)
    lifetimes = [
        Lifetime(name, _num_bytes(op, width, limits), first[name], last[name]) for name, (op, width) in buffers.items()
    ]
    return lifetimes, buffers


def _num_bytes(op: LoweredOp, width: int, limits: ProgramLimits) -> int:
    rows = limits.max_num_tokens if op.rows is RowKind.TOKENS else limits.max_batch_size
    return rows * width * int(np.dtype(dtype_name(op.dtype)).itemsize)


def _renamed(lowered: LoweredOp, roots: Mapping[str, str]) -> Op:
    """The op with buffers for values."""
    names: dict[str, Any] = {}
    for field in fields(lowered.op):
        value = getattr(lowered.op, field.name)
        if field.type == "BufferName":
            names[field.name] = BufferName(roots[value])
        elif field.type == "tuple[BufferName, ...]":
            names[field.name] = tuple(BufferName(roots[item]) for item in value)
    return replace(lowered.op, **names)
