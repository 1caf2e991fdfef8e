"""Idefics 3 and SmolVLM: Llama with SigLIP's tower, whose neighbouring rows are joined and projected."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from ..network.network import Network
from .decoder import declare_llama_like
from .family import ModelFamily, VisionTower
from .llama import LLAMA
from .seeing import SeeingConfig
from .siglip import IDEFICS3_TOWER, SMOLVLM_TOWER, tower_fields

_DECODER: Final = "model.text_model"


_TOWER: Final = ("model.vision_model", "model.connector")


def _declare(net: Network, c: SeeingConfig) -> None:
    if c.has_tower:
        for path in _TOWER:
            net.leave_to_other(path)
    declare_llama_like(net, c, decoder=_DECODER)


def _family(architecture: str, tower: ModelFamily) -> ModelFamily:
    return replace(
        LLAMA,
        architecture=architecture,
        config_class=SeeingConfig,
        declare=_declare,
        neutral_fields={**LLAMA.neutral_fields, "qk_layer_norms": False, "use_resampler": False},
        harmless_fields=LLAMA.harmless_fields
        | {"neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "use_reentrant_checkpointing"},
        vision=VisionTower(
            tensor_prefixes=tuple(f"{path}." for path in _TOWER),
            fields=frozenset({"vision_config", "image_token_id", "scale_factor", "image_seq_len", "_pad_token_id"}),
            text_model_types=frozenset({"llama"}),
            family=tower,
            tower_fields=partial(tower_fields, architecture=tower.architecture),
        ),
    )


IDEFICS3 = _family("Idefics3ForConditionalGeneration", IDEFICS3_TOWER)
SMOLVLM = _family("SmolVLMForConditionalGeneration", SMOLVLM_TOWER)
