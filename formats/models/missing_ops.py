"""Model families that need ops which do not exist yet."""

from __future__ import annotations

from typing import Final

_GEMMA3N = (
    "several residual streams (AltUp), low-rank residuals (LAuReL), norms of values, keys and values that several "
    "layers share, and embeddings for each layer"
)

MISSING_OPS: Final = {
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": _GEMMA3N,
    "MambaForCausalLM": "Mamba's selective scan",
    "JambaForCausalLM": "Mamba's selective scan",
}
"""Needed ops, by architecture."""
