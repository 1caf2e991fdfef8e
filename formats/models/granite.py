"""GraniteForCausalLM (Granite 3 and 3.x, dense): Llama with additional multipliers."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from .decoder import Multipliers, declare_llama_like
from .family import Features, ModelFamily


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(CheckpointConfig):
    """Fields of Granite, in addition to Llama's."""

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    """Factor of the scores."""
    logits_scaling: float = 1.0
    """Divisor of the logits."""


def read_granite_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    """Reads Granite's own fields."""
    attention_bias = fields.boolean("attention_bias", default=False)
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        **read_granite_multipliers(fields),
    }


def read_granite_multipliers(fields: JsonFields) -> Features:
    """Reads the fields that GraniteConfig adds; by default they are 1."""
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    return {name: fields.number(name, above=True, default=1.0) for name in names}


def granite_multipliers(c: GraniteConfig) -> Multipliers:
    """Returns the factors of a config."""
    return Multipliers(
        embedding=c.embedding_multiplier,
        inputs_embeds=c.embedding_multiplier,
        residual=c.residual_multiplier,
        scores=c.attention_multiplier,
        logits=1.0 / c.logits_scaling,
    )


def _declare(net: Network, c: GraniteConfig) -> None:
    declare_llama_like(net, c, granite_multipliers(c))


GRANITE = ModelFamily(
    architecture="GraniteForCausalLM",
    config_class=GraniteConfig,
    read_features=read_granite_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
)
