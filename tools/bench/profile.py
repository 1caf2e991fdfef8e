"""Recorded steps of an engine: the roofline of a scenario, and the time that a step spends in each op."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..._core import RankWork, StepRecord, StepSection, lora_modules
from ...formats.engine.plan import (
    AddGivenColumnsOp,
    AllHeadsNormOp,
    AllReduceOp,
    AttentionOp,
    BroadcastOp,
    CastOp,
    CausalConvolutionOp,
    CrossAttentionOp,
    CrossKeysOp,
    EmbeddingOp,
    ExpertsOp,
    GatedAddOp,
    GatedColumnsOp,
    GatedConvolutionOp,
    GatedDeltaOp,
    GatedRmsNormOp,
    GatherOp,
    JoinColumnsOp,
    JoinNeighboursOp,
    KeepLogitRowsOp,
    LatentQueriesOp,
    LatentValuesOp,
    LayerNormOp,
    LinearOp,
    Op,
    Program,
    ReceiveOp,
    RmsNormOp,
    RopeTableOp,
    SelectiveScanOp,
    SendOp,
    SigmoidGateOp,
    XieluOp,
)

SINK: Final = "sampling"


@dataclass(frozen=True)
class Work:
    """Minimum number of bytes and operations of a step."""

    num_bytes: int
    """Weights, adapters, keys and values, each counted once. Activations are not counted, because they stay in CPU
    caches."""
    flops: int
    """FLOPs of matrix products; a multiply-add counts as two."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes

    def least_seconds(self, bandwidth: float, flops: float) -> float:
        """Roofline time: the longer of memory time and compute time, for the machine's bytes and FLOPs per second."""
        return max(self.num_bytes / bandwidth, self.flops / flops)


def work_of(*steps: StepRecord) -> Work:
    """Sum over all ops of the steps."""
    costs = [op.cost for step in steps for op in step.ops]
    return Work(
        sum(cost.weight_bytes + cost.adapter_bytes + cost.kv_bytes for cost in costs),
        sum(cost.flops + cost.adapter_flops for cost in costs),
    )


def median_step(steps: Iterable[StepRecord]) -> StepRecord:
    """The step with the median duration (the shorter of two)."""
    ordered = sorted(steps, key=lambda step: step.end - step.begin)
    return ordered[(len(ordered) - 1) // 2]


def op_names(program: Program) -> dict[tuple[StepSection, int], str]:
    """Name of each op in tables: its kind, or the modules of its weights. All layers share names."""
    names = {(StepSection.SINK, 0): SINK, **{(StepSection.RANKS, work.value): work.name.lower() for work in RankWork}}
    for section, ops in (
        (StepSection.ENCODER, program.encoder),
        (StepSection.BODY, program.body),
        (StepSection.HEAD, program.head),
    ):
        for index, op in enumerate(ops):
            names[section, index] = _name_of(op, program)
            if section is StepSection.HEAD and isinstance(op, LinearOp):
                names[section, index] = "lm_head"
    return names


_KIND_NAMES: Final[dict[type, str]] = {
    EmbeddingOp: "embedding",
    RmsNormOp: "rms_norm",
    LayerNormOp: "layer_norm",
    CastOp: "cast",
    ExpertsOp: "experts",
    GatedAddOp: "gated_add",
    SigmoidGateOp: "sigmoid_gate",
    GatedRmsNormOp: "gated_rms_norm",
    CausalConvolutionOp: "causal_convolution",
    GatedConvolutionOp: "gated_convolution",
    GatedDeltaOp: "gated_delta",
    SelectiveScanOp: "selective_scan",
    XieluOp: "xielu",
    GatedColumnsOp: "gated_columns",
    AddGivenColumnsOp: "add_given_columns",
    JoinColumnsOp: "join_columns",
    JoinNeighboursOp: "join_neighbours",
    LatentQueriesOp: "latent_queries",
    LatentValuesOp: "latent_values",
    RopeTableOp: "rope_table",
    AttentionOp: "attention",
    KeepLogitRowsOp: "keep_logit_rows",
    CrossKeysOp: "cross_keys",
    CrossAttentionOp: "cross_attention",
    AllReduceOp: "all_reduce",
    AllHeadsNormOp: "all_heads_norm",
    GatherOp: "gather",
    ReceiveOp: "receive",
    SendOp: "send",
    BroadcastOp: "broadcast",
}

BETWEEN_RANKS: Final = frozenset(
    {_KIND_NAMES[kind] for kind in (AllReduceOp, AllHeadsNormOp, GatherOp, ReceiveOp, SendOp, BroadcastOp)}
    | {work.name.lower() for work in RankWork}
)
"""Names of ops in which ranks communicate, or wait for it."""


def _name_of(op: Op, program: Program) -> str:
    if not isinstance(op, LinearOp):
        return _KIND_NAMES[type(op)]
    if program.lora is not None and op.lora_site >= 0:
        modules = {module.id: module.name for module in lora_modules()}
        return " + ".join(modules[part.module] for part in program.lora.sites[op.lora_site].parts)
    # Engines without adapters have no module names.
    return f"{_of_any_layer(op.input)} to {_of_any_layer(op.output)}"


def _of_any_layer(buffer: str) -> str:
    """The buffer's name without layer number and its own number: layers.5/mlp/normed_41 becomes mlp/normed."""
    return re.sub(r"_\d+$", "", re.sub(r"\blayers\.\d+/", "", buffer))


@dataclass(frozen=True)
class OpSummary:
    """All ops of one name, averaged over the steps of a table."""

    name: str
    count: float
    seconds: float
    busy_share: float
    """Share of the threads' time while the ops ran."""
    work: Work
    adapter_bytes: int
    activation_bytes: int


def summarise(steps: Sequence[StepRecord], program: Program) -> list[OpSummary]:
    """Summaries by name, longest first."""
    names = op_names(program)
    groups: dict[str, list[Any]] = defaultdict(list)
    for step in steps:
        for op in step.ops:
            groups[names[op.section, op.index]].append(op)
    summaries = []
    for name, ops in groups.items():
        seconds = sum(op.end - op.begin for op in ops)
        threads = len(ops[0].busy_seconds)  # Transfers to other ranks before and after the ops have no threads.
        busy = sum(sum(op.busy_seconds) for op in ops)
        summaries.append(
            OpSummary(
                name=name,
                count=sum(not op.is_continued for op in ops) / len(steps),
                seconds=seconds / len(steps),
                busy_share=busy / (seconds * threads) if seconds and threads else 0.0,
                work=Work(
                    sum(op.cost.weight_bytes + op.cost.adapter_bytes + op.cost.kv_bytes for op in ops) // len(steps),
                    sum(op.cost.flops + op.cost.adapter_flops for op in ops) // len(steps),
                ),
                adapter_bytes=sum(op.cost.adapter_bytes for op in ops) // len(steps),
                activation_bytes=sum(op.cost.activation_bytes for op in ops) // len(steps),
            )
        )
    return sorted(summaries, key=lambda summary: -summary.seconds)


def seconds_between_ranks(summaries: Iterable[OpSummary]) -> float:
    """Seconds of a step."""
    return sum(summary.seconds for summary in summaries if summary.name in BETWEEN_RANKS)


def chrome_trace(steps: Sequence[StepRecord], program: Program, title: str) -> dict[str, Any]:
    """Steps and ops as complete events of the Chrome trace format, with each thread's share of each op.

    Open it in chrome://tracing or ui.perfetto.dev. Times are microseconds.
    """
    names = op_names(program)
    events: list[dict[str, Any]] = [_named("process_name", 0, title), _named("thread_name", 0, "steps and ops")]
    threads = max((len(op.busy_seconds) for step in steps[:1] for op in step.ops), default=0)
    events += [_named("thread_name", 1 + thread, f"thread {thread}, busy in op") for thread in range(threads)]
    for step in steps:
        arguments = {
            "tokens": step.num_tokens,
            "sequences": step.num_sequences,
            "adapters": step.num_adapters,
            "logit rows": step.num_logit_rows,
        }
        events.append(_event("step", 0, step.begin, step.end, arguments))
        for op in step.ops:
            name = names[op.section, op.index]
            events.append(_event(name, 0, op.begin, op.end, _arguments(op)))
            # A thread works on an op in many short pieces, which are drawn as one.
            events += [
                _event(name, 1 + thread, op.begin, op.begin + busy, {})
                for thread, busy in enumerate(op.busy_seconds)
                if busy > 0
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, trace: dict[str, Any]) -> None:
    """Writes the trace as one line of JSON."""
    path.write_text(json.dumps(trace, separators=(",", ":")))


def _arguments(op: Any) -> dict[str, Any]:
    cost, seconds = op.cost, op.end - op.begin
    moved = cost.weight_bytes + cost.adapter_bytes + cost.kv_bytes
    flops = cost.flops + cost.adapter_flops
    return {
        "op": op.index,
        "weight bytes": cost.weight_bytes,
        "adapter bytes": cost.adapter_bytes,
        "kv bytes": cost.kv_bytes,
        "activation bytes": cost.activation_bytes,
        "flops": cost.flops,
        "adapter flops": cost.adapter_flops,
        "GB/s": round(moved / seconds / 1e9, 3) if seconds else 0,
        "GFLOP/s": round(flops / seconds / 1e9, 3) if seconds else 0,
    }


def _event(name: str, track: int, begin: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": 0, "tid": track, "ts": 1e6 * begin, "dur": 1e6 * (end - begin),
            "args": arguments}  # fmt: skip


def _named(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}


def step_seconds(steps: Sequence[StepRecord]) -> float:
    """Median duration of steps."""
    return statistics.median(step.end - step.begin for step in steps)
