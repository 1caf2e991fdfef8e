"""SmolLM3ForCausalLM: Llama without rotary positions in some layers."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.json_fields import JsonFields, describe
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from .decoder import declare_llama_like
from .family import Features, ModelFamily, sliding_window_by_layer


@dataclass(frozen=True, kw_only=True)
class SmolLm3Config(CheckpointConfig):
    """Fields of SmolLM3, in addition to Llama's."""

    unrotated_layers: tuple[int, ...] = ()
    """Layers whose attention does not depend on positions."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    interval = fields.integer("no_rope_layer_interval", default=4)
    rotated = fields.raw("no_rope_layers")  # 1: the layer has rotary positions
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(num_hidden_layers)]
    if (
        not isinstance(rotated, list)
        or len(rotated) != num_hidden_layers
        or any(item not in (0, 1) for item in rotated)
    ):
        fields.problem("no_rope_layers", f"is {describe(rotated)}; expected {num_hidden_layers} times 0 or 1")
        rotated = [1] * num_hidden_layers
    return {
        **sliding_window_by_layer(fields, num_hidden_layers, lambda layer: not rotated[layer]),
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "unrotated_layers": tuple(layer for layer, is_rotated in enumerate(rotated) if not is_rotated),
    }


def _declare(net: Network, c: SmolLm3Config) -> None:
    declare_llama_like(net, c, unrotated=c.unrotated_layers)


SMOLLM3 = ModelFamily(
    architecture="SmolLM3ForCausalLM",
    config_class=SmolLm3Config,
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"head_dim"}),
    tied_by_default=True,
    default_rope_theta=2000000.0,
)
