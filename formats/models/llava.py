"""Paths of the language model in LLaVA's layout, which Gemma 3 and Mistral Small 3.1 use, for example."""

from __future__ import annotations

from typing import Final

LLAVA_DECODER: Final = "model.language_model"
LLAVA_TOWERS: Final = ("model.vision_tower.", "model.multi_modal_projector.")
# Names before transformers 4.52, which transformers still saves.
LLAVA_OLDER_NAMES: Final = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
