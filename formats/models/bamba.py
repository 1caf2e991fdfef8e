"""BambaForCausalLM: Mamba layers, and layers whose attention rotates half of each head."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.json_fields import JsonFields
from ..network.network import Network
from ..network.operands import Value
from .decoder import MODEL, declare_llama_like, dense_mlp
from .family import Features, ModelFamily, PartialRotaryConfig
from .mamba import MambaConfig, mamba_layer, read_mamba_features


@dataclass(frozen=True, kw_only=True)
class BambaConfig(MambaConfig, PartialRotaryConfig):
    """Fields of Bamba, in addition to those of Mamba layers."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    attended = fields.integers("attn_layer_indices")
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        **read_mamba_features(fields, tuple(layer for layer in range(num_hidden_layers) if layer not in attended)),
    }


def _declare(net: Network, c: BambaConfig) -> None:
    def mlp(layer: int, h: Value, x: Value) -> Value:
        return dense_mlp(net, c, h, x, f"{MODEL}.layers.{layer}.feed_forward")

    def mamba(layer: int, h: Value, x: Value) -> Value:
        return mamba_layer(net, c, h, x, f"{MODEL}.layers.{layer}.mamba")

    declare_llama_like(
        net,
        c,
        mlp=mlp,
        mixers=dict.fromkeys(c.mamba_layers, mamba),
        layer_norms=("input_layernorm", "pre_ff_layernorm"),
        last_norm="final_layernorm",
    )


BAMBA = ModelFamily(
    architecture="BambaForCausalLM",
    config_class=BambaConfig,
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    partial_rotary_factor=0.5,
    # Fields of training and of kernels; transformers does not read attn_rotary_emb.
    harmless_fields=frozenset({"attn_rotary_emb", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"}),
)
