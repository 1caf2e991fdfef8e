"""Model families that need ops which do not exist yet."""

from __future__ import annotations

from typing import Final

_GEMMA3N = (
    "several residual streams (AltUp), low-rank residuals (LAuReL), norms of values, keys and values that several "
    "layers share, and embeddings for each layer"
)
_LLAMA4 = (
    "experts whose inputs the router scales, norms of heads after the rotation, attention within chunks, and queries "
    "that are scaled by their position"
)

MISSING_OPS: Final = {
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": _GEMMA3N,
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "OlmoForCausalLM": "layer norms without weights, and bounds on q, k and v",
    "FalconH1ForCausalLM": "Mamba 2's layers beside attention, with factors of their inputs",
    "MambaForCausalLM": "Mamba's selective scan",
    "JambaForCausalLM": "Mamba's selective scan",
}
"""Needed ops, by architecture."""
