"""What families with an encoder before the decoder have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.operands import Value
from ..network.weights import Split, whole


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(CheckpointConfig):
    """num_hidden_layers is the number of the decoder's layers."""

    encoder_layers: int = 1
    decoder_start_ids: tuple[int, ...] = ()
    """What generation from text gives to the decoder: decoder_start_token_id, and behind it forced_bos_token_id, which
    would be the first token that it makes. Empty: the model does not say."""

    @property
    def num_encoder_layers(self) -> int:
        """Layers of the encoder."""
        return self.encoder_layers

    def describe_layers(self) -> str:
        """What people read."""
        return f"{self.encoder_layers} of the encoder and {super().describe_layers()}"

    def mapping_inconsistencies(self) -> list[str]:
        """Why this model cannot be cut by its mapping."""
        problems = super().mapping_inconsistencies()
        pp_size = self.mapping.pp_size
        if pp_size > self.encoder_layers:
            problems.append(f"pp_size is {pp_size}; expected at most encoder_layers {self.encoder_layers}")
        return problems


def decoder_start_ids(fields: JsonFields) -> tuple[int, ...]:
    """Of decoder_start_token_id and forced_bos_token_id."""
    start, forced = (
        fields.optional_integer(name, minimum=0) for name in ("decoder_start_token_id", "forced_bos_token_id")
    )
    if start is None:
        return ()
    return (start,) if forced is None else (start, forced)


def keep_cross_keys(net: Network, encoded: Value, layer_path: str, names: Sequence[str], *, bias: bool) -> None:
    """Every decoder layer's keys and values of what the encoder makes, by its linear layers of k and v, `names`.

    `layer_path` of a layer is where they are in the Hugging Face model, with {} for its number.
    """
    config = net.config
    width = config.num_key_value_heads * config.head_size
    for layer in net.layers():
        with net.scope("cross_attention"):
            parts = [
                whole(f"{layer_path.format(layer)}.{name}", module, width, config.num_key_value_heads)
                for name, module in zip(names, ("cross_attn_k", "cross_attn_v"), strict=True)
            ]
            net.cross_keys(net.linear(encoded, "cross_attention.kv", parts, split=Split.COLUMN, bias=bias))
