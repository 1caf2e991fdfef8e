"""Modules that engines hold in parts."""

from __future__ import annotations

# In the order of Hugging Face's fused layers: [q; k; v] and [gate; up].
_PARTS_OF = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "mlp_gate_up": ("mlp_h_to_4h", "mlp_gate")}


def parts_of(module: str) -> tuple[str, ...]:
    """The modules that a module of an adapter consists of in the base model, in the order of its rows."""
    return _PARTS_OF.get(module, (module,))
