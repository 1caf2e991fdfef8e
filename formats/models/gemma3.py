"""Gemma 3: Gemma 2 with head norms, and another rotary base for windows; text models and vision models.

Models without lm_head may attend in both directions (EmbeddingGemma).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ...common.json_fields import JsonFields
from ..checkpoint.config import added_later
from ..network.network import Network
from .decoder import MODEL
from .family import Features, ModelFamily, VisionTower, read_rope_of_kinds
from .gemma2 import GEMMA_ACTIVATIONS, GemmaConfig, declare_gemma, read_gemma_features
from .gemma3_tower import GEMMA3_TOWER, tower_fields
from .llava import CLIP_OLDER_NAMES, CONNECTOR_PATH, LLAVA_DECODER, LLAVA_TOWERS, TOWER_PATH
from .seeing import SeeingConfig


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """Fields of Gemma 3, in addition to Gemma 2's."""

    rotary_local_base: float = 10000.0
    """Rotary base of layers with a window; the others have rotary_base and rotary_scaling."""
    is_bidirectional: bool = added_later(False)
    """True if tokens also attend to later tokens."""

    @property
    def is_encoder_only(self) -> bool:
        """True if tokens also attend to later tokens, and the model generates none."""
        return self.is_bidirectional


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    is_bidirectional = fields.raw("use_bidirectional_attention") is not None and fields.boolean(
        "use_bidirectional_attention"
    )
    given = [fields.optional_integer(name) for name in ("sliding_window_pattern", "_sliding_window_pattern")]
    pattern = next((number for number in given if number is not None), 6)
    features = read_gemma_features(fields, num_hidden_layers, pattern)
    if is_bidirectional and (window := features["sliding_window"]) is not None:
        # A token attends to half of the window before it, and half after it.
        features["sliding_window"] = window // 2 + 1
    return {**features, "qk_layernorm": True, "is_bidirectional": is_bidirectional}


def _read_rope(fields: JsonFields, max_position_embeddings: int) -> Features:
    return read_rope_of_kinds(fields, max_position_embeddings, base=1e6, local_base=1e4)


@dataclass(frozen=True, kw_only=True)
class Gemma3SeeingConfig(Gemma3Config, SeeingConfig):
    """Config of Gemma 3's vision-language models."""


def _declare(net: Network, c: Gemma3Config, *, decoder: str) -> None:
    takes_images = isinstance(c, SeeingConfig) and c.has_tower
    for path in (TOWER_PATH, CONNECTOR_PATH) if takes_images else ():
        net.leave_to_other(path)
    tables = {False: net.rotary(), True: net.rotary(base=c.rotary_local_base, scope="local_rotary")}
    declare_gemma(net, c, tables, decoder, takes_images=takes_images)


GEMMA3 = ModelFamily(
    architecture="Gemma3ForCausalLM",
    bare_architectures=frozenset({"Gemma3TextModel"}),
    config_class=Gemma3Config,
    read_features=_read_features,
    read_rope=_read_rope,
    declare=partial(_declare, decoder=MODEL),
    activations=GEMMA_ACTIVATIONS,
    field_names={"hidden_act": "hidden_activation"},
    tied_by_default=True,
    harmless_fields=frozenset({"cache_implementation"}),
)

GEMMA3_VISION = replace(
    GEMMA3,
    architecture="Gemma3ForConditionalGeneration",
    bare_architectures=frozenset(),
    config_class=Gemma3SeeingConfig,
    declare=partial(_declare, decoder=LLAVA_DECODER),
    older_names=CLIP_OLDER_NAMES,
    vision=VisionTower(
        tensor_prefixes=LLAVA_TOWERS,
        fields=frozenset("vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index".split()),
        text_model_types=frozenset({"gemma3_text"}),
        family=GEMMA3_TOWER,
        tower_fields=tower_fields,
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
"""Gemma 3 from 4B up. The rows of an image attend to each other in both directions; text does not."""
