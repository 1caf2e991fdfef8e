"""GraniteMoeHybridForCausalLM (Granite 4) without Mamba layers and experts: Granite with a fused MLP."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from ...common.json_fields import JsonFields, describe
from ..checkpoint.activation import Activation
from ..network.network import Network
from ..network.operands import Value
from ..network.weights import Split, whole
from .decoder import MODEL, declare_llama_like, fused_gated_mlp
from .family import FULL_ATTENTION, Features, ModelFamily
from .granite import GraniteConfig, granite_multipliers, read_granite_multipliers
from .mixture import ROUTER_FIELDS

_ROPE: Final = "rope"
_NO_POSITIONS: Final = "nope"
_ATTENTION: Final = (FULL_ATTENTION, "attention")
"""Values of layer_types for layers with attention, from transformers 5 and from earlier releases."""
_MAMBA_FIELDS: Final = frozenset(
    """
    mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads
    mamba_proj_bias time_step_limit
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(GraniteConfig):
    """Fields of Granite 4, in addition to Granite 3's."""

    has_positions: bool = True
    """False if attention does not depend on positions."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    _refuse_other_layers(fields, num_hidden_layers)
    if (experts := fields.integer("num_local_experts", minimum=0, default=8)) != 0:
        fields.problem("num_local_experts", f"is {experts}; expected 0, because models with experts are not supported")
    positions = None
    if fields.raw("position_embedding_type") is not None:
        positions = fields.string("position_embedding_type", choices=(_ROPE, _NO_POSITIONS))
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "has_positions": positions == _ROPE,
        **read_granite_multipliers(fields),
    }


def _refuse_other_layers(fields: JsonFields, num_hidden_layers: int) -> None:
    kinds = fields.raw("layer_types") if "layer_types" in fields else fields.raw("layers_block_type")
    fields.discard(("layers_block_type",))
    if not isinstance(kinds, list) or len(kinds) != num_hidden_layers or any(kind not in _ATTENTION for kind in kinds):
        found = f"is {describe(kinds)}"
        if isinstance(kinds, list):
            found = "has " + ", ".join(f"{count} {kind}" for kind, count in Counter(map(str, kinds)).items())
        fields.problem(
            "layer_types",
            f"{found}; expected {num_hidden_layers} times {FULL_ATTENTION}, because Mamba layers are not supported",
        )


def _declare(net: Network, c: GraniteHybridConfig) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        block = f"{MODEL}.layers.{layer}.shared_mlp"
        made = fused_gated_mlp(net, c, h, f"{block}.input_linear", Activation(c.hidden_act))
        down = whole(f"{block}.output_linear", "mlp_4h_to_h", c.hidden_size)
        return net.linear(made, "mlp.proj", [down], split=Split.ROW, add_to=x, scale=c.residual_multiplier)

    unrotated = () if c.has_positions else range(c.num_hidden_layers)
    declare_llama_like(net, c, granite_multipliers(c), unrotated, mlp=mlp)


GRANITE_HYBRID = ModelFamily(
    architecture="GraniteMoeHybridForCausalLM",
    config_class=GraniteHybridConfig,
    read_features=_read_features,
    declare=_declare,
    field_names={"intermediate_size": "shared_intermediate_size"},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    neutral_fields={"normalization_function": "rmsnorm"},
    # Fields of experts and Mamba layers, which these models do not have, and of initialisation.
    harmless_fields=ROUTER_FIELDS | _MAMBA_FIELDS | {"init_method", "intermediate_size", "num_experts_per_tok"},
)
