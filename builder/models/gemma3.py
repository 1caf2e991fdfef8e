"""Gemma3ForCausalLM (Gemma 3's text models): Gemma 2 with norms of heads, and another rotary base for windows."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.rotary import read_rotary_scaling
from ..json_fields import JsonFields
from ..network.network import Network
from .family import FULL_ATTENTION, SLIDING_ATTENTION, Features, ModelFamily
from .gemma2 import GEMMA_ACTIVATIONS, GemmaConfig, declare_gemma, read_gemma_features


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """The fields of Gemma 3 beyond Gemma 2's."""

    rotary_local_base: float = 10000.0
    """Of layers with a window; those without have rotary_base and rotary_scaling."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    given = [fields.optional_integer(name) for name in ("sliding_window_pattern", "_sliding_window_pattern")]
    pattern = next((number for number in given if number is not None), 6)
    return {**read_gemma_features(fields, num_hidden_layers, pattern), "qk_layernorm": True}


def _read_rope(fields: JsonFields, max_position_embeddings: int) -> Features:
    """transformers 5 has parameters for each kind of layer, versions before it a base for each and one scaling."""
    theta = fields.optional_number("rope_theta", above=True) or 1e6
    local = fields.optional_number("rope_local_base_freq", above=True) or 1e4
    scaling = fields.object("rope_scaling", optional=True)
    parameters = fields.object("rope_parameters", optional=True)
    if parameters is not None:
        whole = parameters.object(FULL_ATTENTION)
        windowed = parameters.object(SLIDING_ATTENTION)
        if whole is not None and windowed is not None:
            theta = whole.number("rope_theta", above=True)
            local = windowed.number("rope_theta", above=True)
            scaling = whole
            if read_rotary_scaling(windowed, max_position_embeddings) is not None:
                windowed.problem("rope_type", "is not default, which is all that layers with a window can have")
    return {
        "rotary_base": theta,
        "rotary_local_base": local,
        "rotary_scaling": None if scaling is None else read_rotary_scaling(scaling, max_position_embeddings),
    }


def _declare(net: Network, c: Gemma3Config) -> None:
    declare_gemma(net, c, {False: net.rotary(), True: net.rotary(base=c.rotary_local_base, scope="local_rotary")})


GEMMA3 = ModelFamily(
    architecture="Gemma3ForCausalLM",
    config_class=Gemma3Config,
    read_features=_read_features,
    read_rope=_read_rope,
    declare=_declare,
    activations=GEMMA_ACTIVATIONS,
    field_names={"hidden_act": "hidden_activation"},
    tied_by_default=True,
    neutral_fields={"use_bidirectional_attention": False},
    harmless_fields=frozenset({"cache_implementation"}),
)
