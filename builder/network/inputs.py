"""The graph's inputs: tokens of one step, KV pools, states, and the adapters' tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import TensorProto

from ..._core import RowKind
from ...formats.checkpoint.config import CheckpointConfig
from ...formats.engine.tensorrt.plan_config import kv_pool_name
from ...formats.network.operands import AttentionShape
from ...formats.network.ops import Attention, CausalConvolution, GatedConvolution, GatedDelta, Op, SelectiveScan
from ...plugins.adapter_tables import NUM_MODULES
from .graph import GraphBuilder, Value


@dataclass(frozen=True)
class LoraInputs:
    """Tables of the adapters that a step may use."""

    adapter_slots: Value  # [S]
    ranks: Value  # [slots, layers, modules]
    pointers: Value  # [slots, layers, modules, 3]


@dataclass(frozen=True)
class TokenInputs:
    """T tokens of S sequences, concatenated."""

    input_ids: Value  # [T]
    positions: Value  # [T]
    sequence_offsets: Value  # [S + 1]


@dataclass(frozen=True)
class StepInputs:
    """T tokens of S sequences, concatenated, and the R tokens that get logits.

    With an encoder, each sequence is complete, and there are no KV pools.
    """

    input_ids: Value  # [T]
    positions: Value  # [T]
    sequence_offsets: Value  # [S + 1]
    encoder: TokenInputs | None  # The sequences' encoder inputs; None: the network has no encoder.
    prompt_lengths: Value | None  # [S]; None: the rotary embedding does not depend on it.
    block_tables: Value | None  # [S, max_blocks]; None: there are no KV pools.
    logit_rows: Value  # [R]
    kv_pools: Mapping[int, Value]  # By layer: [blocks, 2, kv_heads, tokens_per_block, head_dim].
    lora: LoraInputs | None
    state_slots: Value | None  # [S]; None: there are no states.
    states: Mapping[str, Value]  # By name: float32 [slots, ...].

    def tokens(self, rows: RowKind) -> TokenInputs:
        """The token inputs with rows of this kind."""
        if rows is not RowKind.ENCODER_TOKENS:
            return TokenInputs(self.input_ids, self.positions, self.sequence_offsets)
        assert self.encoder is not None
        return self.encoder


def kv_pool_shape(shape: AttentionShape, tokens_per_block: int) -> tuple[int | str, ...]:
    """Shape of a layer's KV pool."""
    return ("num_blocks", 2, shape.num_key_value_heads, tokens_per_block, shape.head_dim)


def state_of(op: Op) -> tuple[str, tuple[int | str, ...]] | None:
    """Name and shape of the states [slots, ...] that an op keeps for sequences; None: it keeps none."""
    if isinstance(op, (CausalConvolution, GatedConvolution)):
        columns, _, taps = op.weight.shape
        return f"convolution_state.{op.layer}", ("num_slots", taps - 1, columns)
    if isinstance(op, GatedDelta):
        of_head = (op.shape.num_value_heads, op.shape.key_dim, op.shape.value_dim)
        return f"recurrent_state.{op.layer}", ("num_slots", *of_head)
    if isinstance(op, SelectiveScan):
        of_head = (op.shape.num_heads, op.shape.state_dim, op.shape.head_dim)
        return f"recurrent_state.{op.layer}", ("num_slots", *of_head)
    return None


def state_out_name(name: str) -> str:
    """Name of the output with the states after the step."""
    kind, layer = name.split(".")
    return f"{kind}_out.{layer}"


def declare_inputs(
    graph: GraphBuilder,
    config: CheckpointConfig,
    *,
    paged: Sequence[Attention],
    states: Mapping[str, Sequence[int | str]],
    encoder: bool,
    tokens_per_block: int,
    prompt_lengths: bool,
    lora: bool,
) -> StepInputs:
    """Declares the inputs of a network with or without an `encoder`.

    Each layer of `paged` has a KV pool. `states` are shapes by name.
    """

    def integers(name: str, *shape: int | str) -> Value:
        return graph.input(name, TensorProto.INT32, shape)

    return StepInputs(
        input_ids=integers("input_ids", "num_tokens"),
        positions=integers("positions", "num_tokens"),
        sequence_offsets=integers("sequence_offsets", "num_sequences_plus_1"),
        encoder=TokenInputs(
            input_ids=integers("encoder_input_ids", "num_encoder_tokens"),
            positions=integers("encoder_positions", "num_encoder_tokens"),
            sequence_offsets=integers("encoder_sequence_offsets", "num_sequences_plus_1"),
        )
        if encoder
        else None,
        prompt_lengths=integers("prompt_lengths", "num_sequences") if prompt_lengths else None,
        block_tables=integers("block_tables", "num_sequences", "max_blocks") if paged else None,
        logit_rows=integers("logit_rows", "num_logit_rows"),
        kv_pools={
            op.layer: graph.input(kv_pool_name(op.layer), graph.engine_type, kv_pool_shape(op.shape, tokens_per_block))
            for op in paged
        },
        lora=_declare_lora(graph, config) if lora else None,
        state_slots=integers("state_slots", "num_sequences") if states else None,
        states={name: graph.input(name, TensorProto.FLOAT, shape) for name, shape in states.items()},
    )


def _declare_lora(graph: GraphBuilder, config: CheckpointConfig) -> LoraInputs:
    table = ("num_slots", config.num_adapted_layers, NUM_MODULES)
    return LoraInputs(
        adapter_slots=graph.input("adapter_slots", TensorProto.INT32, ("num_sequences",)),
        ranks=graph.input("lora_ranks", TensorProto.INT32, table),
        pointers=graph.input("lora_pointers", TensorProto.INT64, (*table, 3)),
    )
