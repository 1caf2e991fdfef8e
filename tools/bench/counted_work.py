"""The work of a step, counted from an engine's program: engines on a GPU do not record their steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..._core import LoraConfig, LoraLayout, dtype_name
from ...formats.engine.plan import AttentionOp, ExpertsOp, LinearOp, LinearPart, Op, Program
from ...runtime.compiled_engine import CompiledEngine
from .profile import Work

_SCALE_BYTES = 4
"""The scale of an int8 key or value."""


@dataclass(frozen=True)
class CountedStep:
    """Tokens of a step: for each sequence, its first position and number of tokens."""

    chunks: Sequence[tuple[int, int]]
    adapters: Sequence[LoraConfig | None] = ()
    """The adapter of each sequence, with weights; (): none has any."""
    logit_rows: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(count for _, count in self.chunks)


@dataclass
class _Sum:
    num_bytes: float = 0.0
    flops: float = 0.0
    read: set[str] = field(default_factory=set)
    """Tensors that are read whole; two ops may share one."""


def counted_work(engine: CompiledEngine, steps: Iterable[CountedStep]) -> Work:
    """Counts weights, adapters, keys and values, each once per step, and the FLOPs of products, of all steps.

    A mixture of experts reads the expected number of different experts if all are chosen equally often.
    """
    num_bytes, flops = 0.0, 0.0
    program = engine.storage.program
    sizes = {name: array.nbytes for name, array in engine.storage.tensors.items()}
    for step in steps:
        total = _Sum()
        for section, rows in ((program.body, step.tokens), (program.head, step.logit_rows)):
            for op in section:
                _add_op(op, rows, step, program, sizes, total)
        _add_adapters(step, engine.program.lora, total)
        num_bytes += total.num_bytes
        flops += total.flops
    return Work(round(num_bytes), round(flops))


def _add_op(op: Op, rows: int, step: CountedStep, program: Program, sizes: Mapping[str, int], total: _Sum) -> None:
    if isinstance(op, LinearOp):
        for part in op.parts:
            if part.weight.tensor not in total.read:
                total.read.add(part.weight.tensor)
                total.num_bytes += sizes[part.weight.tensor]
            total.flops += 2 * rows * part.weight.n * part.weight.k
    elif isinstance(op, ExpertsOp):
        share = op.routing.top_k / len(op.down)
        parts: tuple[LinearPart, ...] = (*op.gate_up, *op.down)
        of_all = sum(2 * part.weight.n * part.weight.k for part in parts)
        total.num_bytes += sum(sizes[part.weight.tensor] for part in parts) * (1 - (1 - share) ** rows)
        total.flops += rows * of_all * share
    elif isinstance(op, AttentionOp):
        _add_attention(op, step, program, total)


def _add_attention(op: AttentionOp, step: CountedStep, program: Program, total: _Sum) -> None:
    shape = op.shape
    element = 1 if program.int8_kv_cache else np.dtype(dtype_name(program.dtype)).itemsize
    scale = _SCALE_BYTES if program.int8_kv_cache else 0
    of_token = 2 * shape.num_key_value_heads * (shape.head_dim * element + scale)
    window = op.sliding_window or math.inf
    for first, count in step.chunks:
        keys = first + count - max(0, first + 1 - window)
        written = count if op.shared_layer < 0 else 0
        total.num_bytes += of_token * (keys + written)
        pairs = sum(min(position + 1, window) for position in range(first, first + count))
        total.flops += 4 * shape.num_attention_heads * shape.head_dim * pairs


def _add_adapters(step: CountedStep, layout: LoraLayout, total: _Sum) -> None:
    tokens: dict[int, int] = {}
    configs: dict[int, LoraConfig] = {}
    for lora, (_, count) in zip(step.adapters, step.chunks, strict=False):
        if lora is not None:
            tokens[lora.task_id] = tokens.get(lora.task_id, 0) + count
            configs[lora.task_id] = lora
    element = np.dtype(dtype_name(layout.dtype)).itemsize
    for task, lora in configs.items():
        for module, layer, rank, _ in np.asarray(lora.config)[0].tolist():
            sizes = layout.sizes_of(layer, module)
            if sizes is not None:
                elements = rank * (sizes.in_size + sizes.out_size)
                total.num_bytes += elements * element
                total.flops += 2 * elements * tokens[task]
