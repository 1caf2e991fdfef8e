"""The graph's inputs: the tokens of one step, the KV pools and the adapters' tables."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from ...plugins.adapter_tables import NUM_MODULES
from ..checkpoint.config import CheckpointConfig
from .graph import GraphBuilder, Value
from .network import Network
from .ops import AttentionShape


@dataclass(frozen=True)
class LoraInputs:
    """The tables of the adapters that a step may use."""

    adapter_slots: Value  # [S]
    ranks: Value  # [slots, layers, modules]
    pointers: Value  # [slots, layers, modules, 3]


@dataclass(frozen=True)
class StepInputs:
    """T tokens of S sequences back to back, and the R tokens whose logits are wanted."""

    input_ids: Value  # [T]
    positions: Value  # [T]
    sequence_offsets: Value  # [S + 1]
    prompt_lengths: Value | None  # [S]; where the rotary embedding depends on it
    block_tables: Value  # [S, max_blocks]
    logit_rows: Value  # [R]
    kv_pools: tuple[Value, ...]  # one a layer, [blocks, 2, kv_heads, tokens_per_block, head_dim]
    lora: LoraInputs | None


def kv_pool_name(layer: int) -> str:
    """The input that is a layer's KV pool."""
    return f"kv_pool.{layer}"


def kv_pool_out_name(layer: int) -> str:
    """The output that is the same pool, written in place."""
    return f"kv_pool_out.{layer}"


def kv_pool_shape(shape: AttentionShape, tokens_per_block: int) -> tuple[int | str, ...]:
    """Shape of a layer's KV pool."""
    return ("num_blocks", 2, shape.num_key_value_heads, tokens_per_block, shape.head_dim)


def declare_inputs(
    graph: GraphBuilder, network: Network, *, tokens_per_block: int, prompt_lengths: bool, lora: bool
) -> StepInputs:
    """Declares the inputs of a decoder."""

    def integers(name: str, *shape: int | str) -> Value:
        return graph.input(name, TensorProto.INT32, shape)

    return StepInputs(
        input_ids=integers("input_ids", "num_tokens"),
        positions=integers("positions", "num_tokens"),
        sequence_offsets=integers("sequence_offsets", "num_sequences_plus_1"),
        prompt_lengths=integers("prompt_lengths", "num_sequences") if prompt_lengths else None,
        block_tables=integers("block_tables", "num_sequences", "max_blocks"),
        logit_rows=integers("logit_rows", "num_logit_rows"),
        kv_pools=tuple(
            graph.input(kv_pool_name(op.layer), graph.engine_type, kv_pool_shape(op.shape, tokens_per_block))
            for op in network.attentions
        ),
        lora=_declare_lora(graph, network.config) if lora else None,
    )


def _declare_lora(graph: GraphBuilder, config: CheckpointConfig) -> LoraInputs:
    table = ("num_slots", config.num_hidden_layers, NUM_MODULES)
    return LoraInputs(
        adapter_slots=graph.input("adapter_slots", TensorProto.INT32, ("num_sequences",)),
        ranks=graph.input("lora_ranks", TensorProto.INT32, table),
        pointers=graph.input("lora_pointers", TensorProto.INT64, (*table, 3)),
    )
