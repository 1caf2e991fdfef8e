# ruff: noqa: D101
"""A program as the engine file holds it: _core.Program, with tensors and buffers by name.

Every class except Matrix, Vector and NeuronTable has the name and the fields of its counterpart in adaptrt._core, which
documents them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NewType, get_args

from ..._core import AttentionKind, DType, LinearEpilogue, QuantAlgo, RopeKind, RouterScores, RowKind, WeightCode
from ..network.operands import AttentionShape

BufferName = NewType("BufferName", str)
"""Name of one of Program.buffers."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    algo: QuantAlgo
    group_size: int
    zero_points: bool
    scale_type: DType = DType.BFLOAT16
    code: WeightCode = WeightCode.INTEGER
    value_type: DType = DType.FLOAT32
    bits: int = 4
    reordered: bool = False


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Panels of W[n, k] in the engine's dtype, quantised or compressed; a tensor of the engine file.

    See cpp/include/adaptrt/core/panels.h, quantized_panels.h and compressed_panels.h.
    """

    tensor: str
    n: int
    k: int
    quantization: Quantization | None = None
    exceptions: int | None = None
    """Compressed matrices: number of outliers that each panel has room for."""
    has_rows: bool = False
    """True if the rows follow the panels."""
    has_columns: bool = False
    """True if the columns follow the panels."""

    @property
    def is_stored_twice(self) -> bool:
        """True if rows or columns follow the panels."""
        return self.has_rows or self.has_columns


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A float32 tensor of the engine file."""

    tensor: str
    size: int


@dataclass(frozen=True, kw_only=True)
class NeuronTable:
    """A tensor of the engine file; see cpp/include/adaptrt/core/neuron_table.h."""

    tensor: str
    count: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Buffer:
    name: str
    dtype: DType
    rows: RowKind
    width: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class EmbeddingOp:
    table: Matrix
    output: BufferName
    scale: float
    positions: Matrix | None
    lora_site: int
    types: Matrix | None = None


@dataclass(frozen=True, kw_only=True)
class RmsNormOp:
    input: BufferName
    output: BufferName
    weight: Vector
    epsilon: float
    gather_logit_rows: bool
    add: bool


@dataclass(frozen=True, kw_only=True)
class LayerNormOp:
    input: BufferName
    output: BufferName
    weight: Vector
    bias: Vector | None
    epsilon: float
    gather_logit_rows: bool
    lora_site: int = -1


@dataclass(frozen=True, kw_only=True)
class CastOp:
    input: BufferName
    output: BufferName


@dataclass(frozen=True, kw_only=True)
class RopeTableOp:
    kind: RopeKind
    inverse_frequencies: Vector
    attention_scaling: float
    base: float
    factor: float
    original_max_position: int
    cosine: BufferName
    sine: BufferName
    long_inverse_frequencies: Vector | None


@dataclass(frozen=True, kw_only=True)
class AttentionOp:
    kind: AttentionKind
    layer: int
    shape: AttentionShape
    qkv: BufferName
    cosine: BufferName
    sine: BufferName
    output: BufferName
    query_norm: Vector | None
    key_norm: Vector | None
    norm_epsilon: float
    scale: float
    sliding_window: int
    softcap: float
    interleaved: bool
    position_bias: Vector | None
    sinks: Vector | None = None


@dataclass(frozen=True, kw_only=True)
class CrossKeysOp:
    layer: int
    shape: AttentionShape
    kv: BufferName


@dataclass(frozen=True, kw_only=True)
class CrossAttentionOp:
    layer: int
    shape: AttentionShape
    q: BufferName
    output: BufferName
    scale: float


@dataclass(frozen=True, kw_only=True)
class LinearPart:
    weight: Matrix
    bias: Vector | None


@dataclass(frozen=True, kw_only=True)
class LinearOp:
    input: BufferName
    output: BufferName
    epilogue: LinearEpilogue
    parts: tuple[LinearPart, ...]
    lora_site: int
    scale: float
    softcap: float
    threshold: float = 0.0
    has_sparse_input: bool = False
    scores: BufferName | None = None
    least_score: float = 0.0
    neurons: NeuronTable | None = None


@dataclass(frozen=True, kw_only=True)
class Routing:
    scores: RouterScores
    top_k: int
    num_groups: int
    groups_taken: int
    normalised: bool
    scale: float
    bias: Vector | None


@dataclass(frozen=True, kw_only=True)
class ExpertsOp:
    input: BufferName
    router_logits: BufferName
    output: BufferName
    routing: Routing
    activation: LinearEpilogue
    gate_up: tuple[LinearPart, ...]
    down: tuple[LinearPart, ...]
    gate_up_site: int
    down_site: int
    stores: bool
    first_expert: int = 0
    experts_elsewhere: int = 0


@dataclass(frozen=True, kw_only=True)
class GatedAddOp:
    input: BufferName
    gate: BufferName
    output: BufferName


@dataclass(frozen=True, kw_only=True)
class AllReduceOp:
    input: BufferName
    output: BufferName
    add: bool


@dataclass(frozen=True, kw_only=True)
class AllHeadsNormOp:
    qkv: BufferName
    query_norm: Vector
    key_norm: Vector
    whole_query_size: int
    whole_key_size: int
    counts_keys: bool
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class GatherOp:
    input: BufferName
    output: BufferName


@dataclass(frozen=True, kw_only=True)
class ReceiveOp:
    output: BufferName


@dataclass(frozen=True, kw_only=True)
class SendOp:
    input: BufferName


@dataclass(frozen=True, kw_only=True)
class BroadcastOp:
    buffer: BufferName


@dataclass(frozen=True, kw_only=True)
class KeepLogitRowsOp:
    buffers: tuple[BufferName, ...]


Op = (
    EmbeddingOp
    | RmsNormOp
    | LayerNormOp
    | CastOp
    | RopeTableOp
    | AttentionOp
    | LinearOp
    | ExpertsOp
    | GatedAddOp
    | KeepLogitRowsOp
    | CrossKeysOp
    | CrossAttentionOp
    | AllReduceOp
    | AllHeadsNormOp
    | GatherOp
    | ReceiveOp
    | SendOp
    | BroadcastOp
)


def _op_name(kind: type[Op]) -> str:
    """RmsNormOp is "rms_norm"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__.removesuffix("Op")).lower()


OP_NAMES: Final[dict[str, type[Op]]] = {_op_name(kind): kind for kind in get_args(Op)}
"""Names of ops in their field `op`."""


@dataclass(frozen=True, kw_only=True)
class LoraPart:
    module: int
    out_size: int
    first_output: int
    outputs_elsewhere: int


@dataclass(frozen=True, kw_only=True)
class LoraSite:
    layer: int
    in_size: int
    parts: tuple[LoraPart, ...]
    expert: int
    first_input: int
    inputs_elsewhere: int
    adds_shifts: bool
    experts_for_each: int = 1
    num_shares: int = 1
    share: int = 0


@dataclass(frozen=True, kw_only=True)
class LoraLayout:
    dtype: DType
    num_layers: int
    max_rank: int
    dora_enabled: bool
    target_modules: tuple[int, ...]
    num_stages: int
    stage: int
    sites: tuple[LoraSite, ...]
    max_extra_tokens: int = 0
    rotary_factors: tuple[int, ...] = ()
    max_base_positions: int = 0
    num_encoder_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class Program:
    dtype: DType
    vocab_size: int
    num_layers: int
    num_encoder_layers: int
    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    max_seq_len: int
    max_beam_width: int
    max_encoder_input_len: int
    tokens_per_block: int
    int8_kv_cache: bool
    num_ranks: int
    num_stages: int
    rank: int
    arena_bytes: int
    buffers: tuple[Buffer, ...]
    encoder: tuple[Op, ...]
    body: tuple[Op, ...]
    head: tuple[Op, ...]
    logits: BufferName | None
    hidden: BufferName | None
    encoder_output: BufferName | None
    lora: LoraLayout | None

    @property
    def ops(self) -> tuple[Op, ...]:
        """Ops of all sections."""
        return (*self.encoder, *self.body, *self.head)
