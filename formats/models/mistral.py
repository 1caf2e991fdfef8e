"""Mistral: no biases, and a sliding window in all layers or in none; text models and vision models.

Ministral 3 scales queries by their position, by a factor that is 1 up to original_max_position_embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig, added_later
from ..checkpoint.rotary import YarnScaling
from ..network.network import Network
from ..network.operands import QueryScaling
from .decoder import MODEL, declare_llama_like
from .family import ModelFamily, VisionTower, sliding_window_of_all_layers
from .llava import CONNECTOR_PATH, LLAVA_DECODER, LLAVA_OLDER_NAMES, LLAVA_TOWERS, TOWER_PATH
from .pixtral import PIXTRAL_TOWER, tower_fields
from .seeing import SeeingConfig

MISTRAL = ModelFamily(
    architecture="MistralForCausalLM",
    read_features=sliding_window_of_all_layers,
    declare=declare_llama_like,
    optional_fields=frozenset({"head_dim"}),
    neutral_fields={"attention_bias": False, "mlp_bias": False},
)

BAMBOO = replace(
    MISTRAL,
    architecture="BambooForCausalLM",
    fill_in=lambda fields: {"hidden_act": "silu"},  # default of its code, although no model was published with it
    activations={"relu": "relu_both"},
    published_code={
        "AutoConfig": "configuration_bamboo.BambooConfig",
        "AutoModel": "modeling_bamboo.BambooModel",
        "AutoModelForCausalLM": "modeling_bamboo.BambooForCausalLM",
    },
)
"""Bamboo, and TurboSparse's Mistral: relu(gate) * relu(up), which is called dReLU."""

_MINISTRAL3: Final = "ministral3"
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Ministral 3's default of rope_parameters."""


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(CheckpointConfig):
    """Fields of Ministral 3, in addition to Mistral's."""

    query_scaling_beta: float = added_later(0.0)
    """Above 0: queries beyond rotary_scaling's original_max_position_embeddings are scaled. It is 0 for Mistral."""

    @property
    def query_scaling(self) -> QueryScaling | None:
        """Factor of scores by the position of the query; None: 1."""
        if self.query_scaling_beta == 0.0 or not isinstance(self.rotary_scaling, YarnScaling):
            return None
        return QueryScaling(beta=self.query_scaling_beta, length=self.rotary_scaling.original_max_position_embeddings)

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        if self.query_scaling_beta != 0.0 and not isinstance(self.rotary_scaling, YarnScaling):
            kind = "default" if self.rotary_scaling is None else self.rotary_scaling.rope_type
            found.append(f"llama_4_scaling_beta is {self.query_scaling_beta}, but rope_type is {kind}; expected yarn")
        return found


@dataclass(frozen=True, kw_only=True)
class Mistral3Config(Ministral3Config, SeeingConfig):
    """Config of Mistral's and Ministral's vision-language models."""


def _declare_mistral3(net: Network, c: Mistral3Config) -> None:
    for path in (TOWER_PATH, CONNECTOR_PATH) if c.has_tower else ():
        net.leave_to_other(path)
    _declare_ministral3(net, c, decoder=LLAVA_DECODER)


def _declare_ministral3(net: Network, c: Ministral3Config, *, decoder: str = MODEL) -> None:
    declare_llama_like(net, c, decoder=decoder, query_scaling=c.query_scaling)


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    has_rope = any(fields.raw(name) is not None for name in ("rope_parameters", "rope_scaling"))
    return {} if has_rope else {"rope_parameters": _YARN}


MINISTRAL3 = replace(
    MISTRAL,
    architecture="Ministral3ForCausalLM",
    config_class=Ministral3Config,
    declare=_declare_ministral3,
    fill_in=_fill_in,
    query_scaling=True,
)

MISTRAL3 = replace(
    MINISTRAL3,
    architecture="Mistral3ForConditionalGeneration",
    fill_in=lambda fields: _fill_in(fields) if fields.raw("model_type") == _MINISTRAL3 else {},
    config_class=Mistral3Config,
    declare=_declare_mistral3,
    older_names=LLAVA_OLDER_NAMES,
    vision=VisionTower(
        tensor_prefixes=LLAVA_TOWERS,
        fields=frozenset(
            """
            vision_config image_token_index multimodal_projector_bias projector_hidden_act spatial_merge_size
            vision_feature_layer
            """.split()
        ),
        text_model_types=frozenset({"mistral", _MINISTRAL3}),
        family=PIXTRAL_TOWER,
        tower_fields=tower_fields,
    ),
)
"""Mistral Small 3.1 and 3.2, and Ministral 3."""
