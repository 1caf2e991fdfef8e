"""GraniteMoeHybridForCausalLM (Granite 4): Granite with a fused MLP, and with Mamba layers, experts or both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from ..._core import RouterScores
from ...common.json_fields import JsonFields, describe
from ..checkpoint.activation import Activation
from ..checkpoint.config import CheckpointConfig, added_later
from ..network.network import Network
from ..network.operands import Value
from ..network.weights import Split, whole
from .decoder import MODEL, declare_llama_like, fused_gated_mlp
from .family import FULL_ATTENTION, Features, ModelFamily
from .granite import GraniteConfig, granite_multipliers, read_granite_multipliers
from .granite_moe import EXPERT_BLOCK, EXPERT_NAMES, GRANITE_MOE
from .mamba import MambaConfig, mamba_layer, read_mamba_features
from .mixture import ROUTER_FIELDS, MixtureConfig, add_experts

_ROPE: Final = "rope"
_NO_POSITIONS: Final = "nope"
_ATTENTION: Final = (FULL_ATTENTION, "attention")
"""Values of layer_types for layers with attention, from transformers 5 and from earlier releases."""
_MAMBA: Final = ("linear_attention", "mamba")
"""The same for Mamba layers."""


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(MambaConfig, MixtureConfig, GraniteConfig):
    """Fields of Granite 4, in addition to those of Granite 3, of Mamba layers and of experts."""

    mamba_layers: tuple[int, ...] = ()
    has_positions: bool = True
    """False if attention does not depend on positions."""
    has_experts: bool = added_later(False)

    @property
    def num_experts(self) -> int:
        """Number of experts in each layer; 0: none."""
        return self.moe_num_experts if self.has_experts else 0

    def describe_layers(self) -> str:
        """Text for people: 28 of hidden size 1024, mlp 4096."""
        return super().describe_layers() if self.has_experts else CheckpointConfig.describe_layers(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, subject: str) -> CheckpointConfig:
        """Reads what to_dict() returned. Older checkpoints lack all fields of Mamba layers and of experts."""
        if "mamba_layers" not in data:
            common = {each.name for each in fields(CheckpointConfig)}
            own = {each.name: each.default for part in (MambaConfig, MixtureConfig) for each in fields(part)}
            data = {**{name: value for name, value in own.items() if name not in common}, **data}
            data = {**data, "mamba_layers": [], "dense_layers": []}
        return super().from_dict(data, subject=subject)


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    positions = None
    if fields.raw("position_embedding_type") is not None:
        positions = fields.string("position_embedding_type", choices=(_ROPE, _NO_POSITIONS))
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "has_positions": positions == _ROPE,
        **read_mamba_features(fields, _mamba_layers(fields, num_hidden_layers)),
        **_read_experts(fields),
        **read_granite_multipliers(fields),
    }


def _read_experts(fields: JsonFields) -> Features:
    number = fields.integer("num_local_experts", minimum=0, default=8)
    if number == 0:
        fields.discard(("intermediate_size", "num_experts_per_tok"))
        return {}
    return {
        "has_experts": True,
        "moe_num_experts": number,
        "moe_top_k": fields.integer("num_experts_per_tok", default=2),
        "moe_intermediate_size": fields.integer("intermediate_size", default=11008),
    }


def _mamba_layers(fields: JsonFields, num_hidden_layers: int) -> tuple[int, ...]:
    """Reads layer_types, or its older name; by default all layers are Mamba layers."""
    kinds = fields.raw("layer_types") if "layer_types" in fields else fields.raw("layers_block_type")
    fields.discard(("layers_block_type",))
    if kinds is None:
        return tuple(range(num_hidden_layers))
    if (
        isinstance(kinds, list)
        and len(kinds) == num_hidden_layers
        and all(kind in (*_ATTENTION, *_MAMBA) for kind in kinds)
    ):
        return tuple(layer for layer, kind in enumerate(kinds) if kind in _MAMBA)
    found = f"is {describe(kinds)}"
    if isinstance(kinds, list):
        found = "has " + ", ".join(f"{count} {kind}" for kind, count in Counter(map(str, kinds)).items())
    fields.problem("layer_types", f"{found}; expected {num_hidden_layers} times {FULL_ATTENTION} or {_MAMBA[0]}")
    return ()


def _declare(net: Network, c: GraniteHybridConfig) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        p = f"{MODEL}.layers.{layer}"
        if c.has_experts:
            routing = replace(c.routing(RouterScores.SOFTMAX_OF_CHOSEN), scale=c.residual_multiplier)
            x = add_experts(net, c, h, x, f"{p}.{EXPERT_BLOCK}", routing, EXPERT_NAMES)
        made = fused_gated_mlp(net, c, h, f"{p}.shared_mlp.input_linear", Activation(c.hidden_act))
        down = whole(f"{p}.shared_mlp.output_linear", "mlp_4h_to_h", c.hidden_size)
        return net.linear(made, "mlp.proj", [down], split=Split.ROW, add_to=x, scale=c.residual_multiplier)

    def mamba(layer: int, h: Value, x: Value) -> Value:
        return mamba_layer(net, c, h, x, f"{MODEL}.layers.{layer}.mamba", c.residual_multiplier)

    unrotated = () if c.has_positions else range(c.num_hidden_layers)
    mixers = dict.fromkeys(c.mamba_layers, mamba)
    declare_llama_like(net, c, granite_multipliers(c), unrotated, mlp=mlp, mixers=mixers)


GRANITE_HYBRID = ModelFamily(
    architecture="GraniteMoeHybridForCausalLM",
    config_class=GraniteHybridConfig,
    read_features=_read_features,
    declare=_declare,
    field_names={"intermediate_size": "shared_intermediate_size"},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    neutral_fields={"normalization_function": "rmsnorm"},
    older_endings=GRANITE_MOE.older_endings,
    stacked_experts=GRANITE_MOE.stacked_experts,
    # The width of chunks, and fields of initialisation.
    harmless_fields=ROUTER_FIELDS | {"init_method", "mamba_chunk_size"},
)
