"""Assembles a program from emitted ops: buffer offsets in the arena, limits, and the adapters' layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ..._core import RowKind, dtype_name, stage_layers
from ...formats.checkpoint.config import CheckpointConfig
from ...formats.engine.build_config import LIMITS, BuildConfig
from ...formats.engine.plan import Buffer, BufferName, LoraLayout, Op, Program
from .arena import Arena, Lifetime, plan_arena
from .emit import EmittedProgram
from .emitted import EmittedOp
from .storage import Storage


def assemble(
    emitted: EmittedProgram, checkpoint: CheckpointConfig, config: BuildConfig, rank: int, storage: Storage
) -> tuple[Program, Arena]:
    """Returns the program of a rank and its arena. `config` is complete, see BuildConfig.with_defaults()."""
    roots = _buffer_roots(emitted)
    lifetimes, buffers = _buffers(emitted, roots, config)
    arena = plan_arena(lifetimes)
    num_layers, num_encoder_layers = checkpoint.num_hidden_layers, checkpoint.num_encoder_layers
    num_ranks, num_stages = checkpoint.mapping.world_size, checkpoint.mapping.pp_size
    stage = rank * num_stages // num_ranks
    lora, layout = config.accepted_adapters, None
    if lora is not None:
        factors = lora.long_lora_scaling_factors
        layout = LoraLayout(
            dtype=checkpoint.dtype,
            num_layers=num_layers + num_encoder_layers,
            max_rank=lora.max_lora_rank,
            dora_enabled=config.dora_enabled,
            target_modules=tuple(lora.target_module_ids()),
            num_stages=num_stages,
            stage=stage,
            sites=emitted.sites,
            max_extra_tokens=lora.max_extra_tokens,
            rotary_factors=factors,
            max_base_positions=checkpoint.max_position_embeddings if factors else 0,
            num_encoder_layers=num_encoder_layers,
        )
    program = Program(
        dtype=checkpoint.dtype,
        vocab_size=checkpoint.vocab_size,
        num_layers=stage_layers(num_layers, num_stages, stage)[1],
        num_encoder_layers=stage_layers(num_encoder_layers, num_stages, stage)[1],
        **{name: getattr(config, name) or 0 for name in LIMITS},
        matrix_layout=storage.layout,
        int8_kv_cache=checkpoint.int8_kv_cache,
        num_ranks=num_ranks,
        num_stages=num_stages,
        rank=rank,
        arena_bytes=arena.num_bytes,
        buffers=tuple(
            Buffer(name=name, dtype=op.dtype, rows=op.rows, width=width, offset=arena.offsets[name])
            for name, (op, width) in buffers.items()
        ),
        encoder=tuple(_renamed(op, roots) for op in emitted.encoder),
        body=tuple(_renamed(op, roots) for op in emitted.body),
        head=tuple(_renamed(op, roots) for op in emitted.head),
        logits=None if emitted.logits is None else BufferName(roots[emitted.logits.name]),
        hidden=None if emitted.hidden is None else BufferName(roots[emitted.hidden.name]),
        encoder_output=None if emitted.encoder_output is None else BufferName(roots[emitted.encoder_output.name]),
        lora=layout,
    )
    return program, arena


def _buffer_roots(emitted: EmittedProgram) -> dict[str, str]:
    """The buffer of each value: its own, or that of the value it overwrites."""
    roots: dict[str, str] = {}
    for op in emitted.ops:
        for value in op.writes:
            roots[value.name] = value.name if op.in_place is None else roots[op.in_place.name]
    return roots


def _buffers(
    emitted: EmittedProgram, roots: Mapping[str, str], config: BuildConfig
) -> tuple[list[Lifetime], dict[str, tuple[EmittedOp, int]]]:
    """The lifetime of each buffer. Also, by buffer name, the op that first writes it and its width."""
    ops = emitted.ops
    head = len(emitted.encoder) + len(emitted.body)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    buffers: dict[str, tuple[EmittedOp, int]] = {}
    for at, op in enumerate(ops):
        for value in op.reads:
            # The head runs once per slice of rows, so its inputs from the body must live until its last op.
            from_body = at >= head and first[roots[value.name]] < head
            last[roots[value.name]] = len(ops) if from_body else at
        for value in op.writes:
            name = roots[value.name]
            if name not in first:
                first[name] = at
                buffers[name] = (op, value.width)
            last[name] = max(last.get(name, at), at)
    if emitted.logits is not None:
        last[roots[emitted.logits.name]] = len(ops)
    if emitted.encoder_output is not None:  # The encoder's output is read after the encoder has run.
        last[roots[emitted.encoder_output.name]] = len(emitted.encoder)
    lifetimes = [
        Lifetime(name, _num_bytes(op, width, config), first[name], last[name]) for name, (op, width) in buffers.items()
    ]
    return lifetimes, buffers


def _num_bytes(op: EmittedOp, width: int, config: BuildConfig) -> int:
    rows = config.max_batch_size if op.rows is RowKind.LOGITS else config.max_num_tokens
    return rows * width * int(np.dtype(dtype_name(op.dtype)).itemsize)


def _renamed(emitted: EmittedOp, roots: Mapping[str, str]) -> Op:
    """The op with buffer names in place of values."""
    names: dict[str, Any] = {}
    for field in fields(emitted.op):
        value = getattr(emitted.op, field.name)
        if field.type == "BufferName" or (field.type == "BufferName | None" and value is not None):
            names[field.name] = BufferName(roots[value])
        elif field.type == "tuple[BufferName, ...]":
            names[field.name] = tuple(BufferName(roots[item]) for item in value)
    return replace(emitted.op, **names)
