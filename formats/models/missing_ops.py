"""Model families that need ops which do not exist yet."""

from __future__ import annotations

from typing import Final

_GEMMA4 = "norms of values, keys that several layers share and embeddings for each layer"
_SQUARED_RELU = "a squared ReLU"

MISSING_OPS: Final = {
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
    "ApertusForCausalLM": "the activation xIELU",
    "ArceeForCausalLM": _SQUARED_RELU,
    "NemotronForCausalLM": _SQUARED_RELU,
    "HunYuanDenseV1ForCausalLM": "norms of heads after the rotation",
    "OlmoForCausalLM": "layer norms without weights, and bounds on q, k and v",
}
"""Needed ops, by architecture."""
