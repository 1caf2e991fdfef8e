"""Description of an architecture in GGUF files: its names of tensors, and how its tensors differ from Hugging Face's.

Names are those of llama.cpp's converter, without "blk.N." and without the ending ".weight" or ".bias".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .metadata import Metadata

LLAMA_MODEL: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
GATED_MLP: Mapping[str, str] = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_NORMS: Mapping[str, str] = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS: Mapping[str, str] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture of GGUF files."""

    hugging_face: str
    """Hugging Face's class."""
    read_fields: Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]
    """Returns the fields of config.json that only this architecture has; the second argument has the common ones."""
    layer_names: Mapping[str, str]
    """Hugging Face's names of the layers' tensors, by those in the file."""
    model_names: Mapping[str, str] = field(default_factory=lambda: LLAMA_MODEL)
    """The same for tensors outside of layers."""
    layer_prefix: str = "model.layers"
    expert_names: Mapping[str, str] = field(default_factory=dict)
    """Names of one expert's layers, in which {} is its number, by the names of tensors that stack all experts."""
    parameter_names: Mapping[str, str] = field(default_factory=dict)
    """Names of the layers' parameters that have no ending .weight in Hugging Face's model."""
    rows: frozenset[str] = frozenset()
    """Vectors that are matrices with one row in Hugging Face's model."""
    bias_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of config.json that are true if a tensor is there."""
    row_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of config.json that are the number of rows of a matrix."""
    is_encoder: bool = False
    """True if tokens also attend to later tokens."""
    is_classifier: bool = False
    """True if the model returns classes."""
    first_position: Callable[[Metadata], int] | None = None
    """Returns the number of rows of Hugging Face's table of positions that no token reads, and that files do not have;
    None: every row is read."""
    is_permuted: bool = False
    """True if rows of q and k are in the order of llama.cpp's rotation, which pairs neighbours."""
    norms_plus_one: bool = False
    """True if the file has norms of weights plus one, and Hugging Face's model has them without."""
    transposed: frozenset[str] = frozenset()
    """Tensors that Hugging Face's model stores as [in, out]."""
    norm_epsilon: tuple[str, str] = (".attention.layer_norm_rms_epsilon", "rms_norm_eps")
    """Key of the norms' epsilon, and its name in config.json."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """Names of common fields in this architecture's config.json, where they differ from Llama's."""
    dropped_fields: frozenset[str] = frozenset()
    """Common fields that this architecture's config.json does not have."""
    is_always_tied: bool = False
    """True if lm_head is the embedding in every model."""
    rotates: bool = True
    """False if the architecture has no rotary positions."""
    yarn_truncates: bool = True
    """False if YaRN's interpolation begins and ends between dimensions, which files do not state."""
    scales_by_default: bool = False
    """True if a config.json without rope_scaling stands for a scaling."""
    partial_rotation: bool = False
    """True if only a part of each head may be rotated."""
