"""Gemma 3: Gemma 2 with head norms, and another rotary base for windows; text models and vision models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ...common.json_fields import JsonFields
from ..network.network import Network
from .decoder import MODEL
from .family import Features, ModelFamily, VisionTower, read_rope_of_kinds
from .gemma2 import GEMMA_ACTIVATIONS, GemmaConfig, declare_gemma, read_gemma_features
from .llava import LLAVA_DECODER, LLAVA_OLDER_NAMES, LLAVA_TOWERS


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """Fields of Gemma 3, in addition to Gemma 2's."""

    rotary_local_base: float = 10000.0
    """Rotary base of layers with a window; the others have rotary_base and rotary_scaling."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    given = [fields.optional_integer(name) for name in ("sliding_window_pattern", "_sliding_window_pattern")]
    pattern = next((number for number in given if number is not None), 6)
    return {**read_gemma_features(fields, num_hidden_layers, pattern), "qk_layernorm": True}


def _read_rope(fields: JsonFields, max_position_embeddings: int) -> Features:
    return read_rope_of_kinds(fields, max_position_embeddings, base=1e6, local_base=1e4)


def _declare(net: Network, c: Gemma3Config, *, decoder: str) -> None:
    tables = {False: net.rotary(), True: net.rotary(base=c.rotary_local_base, scope="local_rotary")}
    declare_gemma(net, c, tables, decoder)


GEMMA3 = ModelFamily(
    architecture="Gemma3ForCausalLM",
    config_class=Gemma3Config,
    read_features=_read_features,
    read_rope=_read_rope,
    declare=partial(_declare, decoder=MODEL),
    activations=GEMMA_ACTIVATIONS,
    field_names={"hidden_act": "hidden_activation"},
    tied_by_default=True,
    neutral_fields={"use_bidirectional_attention": False},
    harmless_fields=frozenset({"cache_implementation"}),
)

GEMMA3_VISION = replace(
    GEMMA3,
    architecture="Gemma3ForConditionalGeneration",
    declare=partial(_declare, decoder=LLAVA_DECODER),
    older_names=LLAVA_OLDER_NAMES,
    vision=VisionTower(
        tensor_prefixes=LLAVA_TOWERS,
        fields=frozenset(
            "vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index".split()  # noqa: SIM905
        ),
        text_model_types=frozenset({"gemma3_text"}),
        text_defaults={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
        },
    ),
)
"""Gemma 3 from 4B up. Images would attend in both directions; text does not."""
