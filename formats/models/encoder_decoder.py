"""Config and cross attention of families with an encoder before the decoder."""

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
    """Config of an encoder-decoder; num_hidden_layers counts the decoder's layers."""

    encoder_layers: int = 1
    decoder_start_ids: tuple[int, ...] = ()
    """Tokens that start the decoder when text is generated; empty: the model does not say.

    These are decoder_start_token_id and then forced_bos_token_id, which would be the first generated token.
    """

    @property
    def num_encoder_layers(self) -> int:
        """Number of the encoder's layers."""
        return self.encoder_layers

    def describe_layers(self) -> str:
        """Text for people."""
        return f"{self.encoder_layers} of the encoder and {super().describe_layers()}"

    def mapping_inconsistencies(self) -> list[str]:
        """Lists reasons why this model cannot be cut by its mapping."""
        problems = super().mapping_inconsistencies()
        pp_size = self.mapping.pp_size
        if pp_size > self.encoder_layers:
            problems.append(f"pp_size is {pp_size}; expected at most encoder_layers {self.encoder_layers}")
        return problems


def decoder_start_ids(fields: JsonFields) -> tuple[int, ...]:
    """Reads decoder_start_token_id and forced_bos_token_id."""
    start, forced = (
        fields.optional_integer(name, minimum=0) for name in ("decoder_start_token_id", "forced_bos_token_id")
    )
    if start is None:
        return ()
    return (start,) if forced is None else (start, forced)


def keep_cross_keys(net: Network, encoded: Value, layer_path: str, names: Sequence[str], *, bias: bool) -> None:
    """Declares each decoder layer's keys and values of the encoder's output.

    layer_path: path in the Hugging Face model, with {} for the layer's number.
    names: names of the linear layers of k and v below that path.
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
