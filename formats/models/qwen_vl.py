"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen 2 and 3 with three rows of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig, added_later
from ..network.network import Network
from .decoder import GivenRows, declare_llama_like
from .family import Features, ModelFamily, VisionTower, sliding_window_by_layer
from .qwen_tower import (
    OLDER_NAMES,
    QWEN2_5_TOWER,
    QWEN2_TOWER,
    QWEN3_TOWER,
    VISION,
    VISION_DECODER,
    QwenTowerConfig,
    qwen2_5_tower_fields,
    qwen2_tower_fields,
    qwen3_tower_fields,
)
from .seeing import SeeingConfig
from .tower import TowerConfig

_AXES: Final = 3
"""Number of an image row's rotary positions: time, height and width."""
_SECTIONS: Final = (11, 11, 10)
"""transformers' default of mrope_section in Qwen3.5; other models state it."""
NUM_TEXT_COORDINATES: Final = _AXES + 1
"""Coordinates of an image's row: its positions, and that of a text token after it."""


@dataclass(frozen=True, kw_only=True)
class QwenVlConfig(SeeingConfig):
    """Config of language models whose image rows have three rotary positions."""

    mrope_section: tuple[int, ...] = added_later(())
    """Number of pairs of a head that are rotated by time, height and width."""
    num_deepstack_layers: int = added_later(0)
    """Number of first layers after which a part of an image's rows is added."""

    def with_tower(self, tower: TowerConfig) -> QwenVlConfig:
        """Returns the config for an engine with this tower."""
        assert isinstance(tower, QwenTowerConfig)
        return replace(self, has_tower=True, num_deepstack_layers=len(tower.deepstack_layers))


def vision_of(
    model_type: str,
    tower: ModelFamily | None = None,
    tower_fields: Callable[[Mapping[str, Any], CheckpointConfig], Mapping[str, Any]] | None = None,
) -> VisionTower:
    """Returns the vision tower of a family of vision-language models; without `tower`, it is not served."""
    return VisionTower(
        tensor_prefixes=(f"{VISION}.",),
        fields=frozenset(
            """
            vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id vision_token_id
            """.split()
        ),
        text_model_types=frozenset({f"{model_type}_text"}),
        family=tower,
        tower_fields=tower_fields,
    )


def _read_qwen2_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {**sliding_window_by_layer(fields, num_hidden_layers), "attn_bias": True}


def _read_qwen3_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {"attn_bias": attention_bias, "attn_dense_bias": attention_bias, "qk_layernorm": True}


def axes_in_sections(sections: tuple[int, ...], num_pairs: int) -> tuple[int, ...]:
    """Returns the axis of each pair of a head: first those of time, then of height, then of width."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def axes_in_turn(sections: tuple[int, ...], num_pairs: int) -> tuple[int, ...]:
    """Returns the axis of each pair of a head: time, height and width in turn, and time when another has its share."""
    return tuple(pair % _AXES if pair < _AXES * sections[pair % _AXES] else 0 for pair in range(num_pairs))


Axes = Callable[[tuple[int, ...], int], tuple[int, ...]]
"""Returns the axis of each pair of a head, from mrope_section and the number of pairs."""


def image_rows(net: Network, c: QwenVlConfig, axes: Axes = axes_in_turn) -> GivenRows | None:
    """Returns the form of an image's rows, and leaves the tower to its own network; None: there is no tower."""
    if not c.has_tower:
        return None
    net.leave_to_other(VISION)
    return GivenRows(
        num_layers=c.num_deepstack_layers,
        num_coordinates=NUM_TEXT_COORDINATES,
        axes=axes(c.mrope_section or _SECTIONS, c.rotary_size // 2),
    )


def _declare(net: Network, c: QwenVlConfig, axes: Axes) -> None:
    declare_llama_like(net, c, decoder=VISION_DECODER, given=image_rows(net, c, axes))


QWEN2_VL = ModelFamily(
    architecture="Qwen2VLForConditionalGeneration",
    config_class=QwenVlConfig,
    read_features=_read_qwen2_features,
    declare=partial(_declare, axes=axes_in_sections),
    older_names=OLDER_NAMES,
    vision=vision_of("qwen2_vl", QWEN2_TOWER, qwen2_tower_fields),
    mrope=True,
    default_rope_theta=1000000.0,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
)

QWEN2_5_VL = replace(
    QWEN2_VL,
    architecture="Qwen2_5_VLForConditionalGeneration",
    vision=vision_of("qwen2_5_vl", QWEN2_5_TOWER, qwen2_5_tower_fields),
)

QWEN3_VL = replace(
    QWEN2_VL,
    architecture="Qwen3VLForConditionalGeneration",
    read_features=_read_qwen3_features,
    declare=partial(_declare, axes=axes_in_turn),
    vision=vision_of("qwen3_vl", QWEN3_TOWER, qwen3_tower_fields),
    default_rope_theta=500000.0,
    optional_fields=frozenset({"num_key_value_heads"}),
    neutral_fields={"use_sliding_window": False},
)
