"""Paths of the parts of a model in LLaVA's layout, which Gemma 3 and Mistral Small 3.1 use, for example."""

from __future__ import annotations

from typing import Final

LLAVA_DECODER: Final = "model.language_model"
TOWER_PATH: Final = "model.vision_tower"
CONNECTOR_PATH: Final = "model.multi_modal_projector"
LLAVA_TOWERS: Final = (f"{TOWER_PATH}.", f"{CONNECTOR_PATH}.")
# Names before transformers 4.52, which transformers still saves.
LLAVA_OLDER_NAMES: Final = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
# The towers of CLIP and SigLIP were parts of their classes before transformers 5.
CLIP_OLDER_NAMES: Final = {
    f"{TOWER_PATH}.vision_model.": f"{TOWER_PATH}.",
    "vision_tower.vision_model.": f"{TOWER_PATH}.",
    **LLAVA_OLDER_NAMES,
}
