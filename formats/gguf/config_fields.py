"""The fields of a Hugging Face config.json, from the metadata and tensors of a GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from ..._core import CheckpointError
from ...common.shown_value import shown
from .architecture import Architecture
from .architectures import ARCHITECTURES, BERT, CLASSIFIER_TENSORS, LLAMA, MIXTRAL, OLMO2, OLMO3, bert_architecture
from .gguf_file import GgufModel
from .metadata import Metadata

EMBEDDING: Final = "token_embd.weight"
LM_HEAD: Final = "output.weight"
ROPE_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
SHORT_FACTORS: Final = "rope_factors_short.weight"
ROPE_TENSORS: Final = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})
"""Tensors that become fields of config.json."""
_DTYPES: Final[Mapping[str, str]] = {"F32": "float32", "F16": "float16"}
"""Types of config.json for files that mostly have these types. All others become bfloat16."""
_OTHER_FILES: Final[Mapping[str, str]] = {
    "clip": "is a vision projector (mmproj); expected the file of the language model",
    "mmproj": "is a vision projector (mmproj); expected the file of the language model",
    "adapter": "is a LoRA adapter; expected the file of its base model",
    "imatrix": "is an importance matrix; expected the file of a model",
}


def find_architecture(model: GgufModel, metadata: Metadata) -> Architecture:
    """Returns the architecture of a model. Raises CheckpointError for files that are no model, and for architectures
    that are not read."""
    kind = metadata.raw("general.type")
    for value in (kind, metadata.architecture):
        if isinstance(value, str) and value in _OTHER_FILES:
            raise CheckpointError(f"{model.path}: {_OTHER_FILES[value]}")
    if kind not in (None, "model"):
        raise CheckpointError(f"{model.path}: general.type is {shown(kind)}; expected model")
    found = ARCHITECTURES.get(metadata.architecture)
    if found is None:
        raise CheckpointError(
            f"{model.path}: general.architecture is {shown(metadata.architecture)}, which is not read from GGUF files; "
            f"accepted: {', '.join(ARCHITECTURES)}. Take the model that the file was made from"
        )
    if EMBEDDING not in model.tensors:
        raise CheckpointError(f"{model.path}: has no tensor '{EMBEDDING}'; expected a whole model, not a vocabulary")
    if found is BERT:
        found = bert_architecture(model.tensors, metadata)
        if found is BERT and (head := sorted(CLASSIFIER_TENSORS & model.tensors.keys())):
            raise CheckpointError(
                f"{model.path}: tensor '{head[0]}' belongs to a classifier of BERT, whose pooler converters leave out; "
                "take the model that the file was made from"
            )
        return found
    if found is LLAMA and metadata.optional_integer(".expert_count"):
        return MIXTRAL
    return OLMO3 if found is OLMO2 and ".attention.sliding_window" in metadata else found


def config_fields(model: GgufModel, metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    """Returns the fields of config.json. Problems are noted in `metadata`."""
    common = _common_fields(model, metadata, architecture)
    own = architecture.read_fields(metadata, common)
    if architecture.rotates:
        own = {**_rope_fields(model, metadata, architecture, common), **own}
    _expect_neutral(metadata, architecture)
    fields = {
        architecture.field_names.get(name, name): value
        for name, value in common.items()
        if name not in architecture.dropped_fields
    }
    biases = {name: tensor in model.tensors for name, tensor in architecture.bias_fields.items()}
    rows = {name: _num_rows(model, tensor, metadata) for name, tensor in architecture.row_fields.items()}
    return {"architectures": [architecture.hugging_face], **fields, **biases, **rows, **own}


def head_sizes(metadata: Metadata) -> tuple[int, int, int]:
    """Returns num_attention_heads, num_key_value_heads and the size of a head."""
    heads = metadata.integer(".attention.head_count")
    kv_heads = metadata.integer(".attention.head_count_kv", heads)
    size = metadata.integer(".attention.key_length", max(1, metadata.integer(".embedding_length") // heads))
    return heads, kv_heads, size


def unread_positions(architecture: Architecture, metadata: Metadata) -> int:
    """Returns the number of rows of Hugging Face's table of positions that the file does not have."""
    return 0 if architecture.first_position is None else architecture.first_position(metadata)


def _common_fields(model: GgufModel, metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    heads, kv_heads, head_size = head_sizes(metadata)
    value_size = metadata.integer(".attention.value_length", head_size)
    if value_size != head_size:
        metadata.problem(".attention.value_length", f"is {value_size}; expected .key_length, {head_size}")
    vocab_size = model.tensors[EMBEDDING].shape[0]
    if metadata.integer(".vocab_size", vocab_size) != vocab_size:
        metadata.problem(".vocab_size", f"is not the number of rows of {EMBEDDING}, {vocab_size}")
    num_layers = metadata.integer(".block_count")
    if num_layers > len(model.tensors):
        metadata.problem(".block_count", f"is {num_layers}, but there are only {len(model.tensors)} tensors")
        num_layers = 1
    key, epsilon = architecture.norm_epsilon
    return {
        "dtype": _dtype(model),
        "vocab_size": vocab_size,
        "max_position_embeddings": metadata.integer(".context_length") + unread_positions(architecture, metadata),
        "hidden_size": metadata.integer(".embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "intermediate_size": metadata.integer(".feed_forward_length"),
        epsilon: metadata.number(key),
        "tie_word_embeddings": architecture.is_always_tied or LM_HEAD not in model.tensors,
    }


def _num_rows(model: GgufModel, name: str, metadata: Metadata) -> int:
    tensor = model.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        metadata.problems.append(
            f"tensor '{name}' is {'missing' if tensor is None else 'no matrix'}; expected a matrix"
        )
        return 1
    return tensor.shape[0]


def _dtype(model: GgufModel) -> str:
    """Type in which most values of matrices are stored, or bfloat16 if that is another type."""
    values = Counter[str]()
    for tensor in model.tensors.values():
        if len(tensor.shape) > 1:
            values[tensor.type.name] += tensor.num_rows * tensor.shape[-1]
    return _DTYPES.get(values.most_common(1)[0][0], "bfloat16")


def _rope_fields(
    model: GgufModel, metadata: Metadata, architecture: Architecture, common: Mapping[str, Any]
) -> dict[str, Any]:
    head_size = common["head_dim"]
    rotated = metadata.integer(".rope.dimension_count", head_size)
    fields: dict[str, Any] = {"rope_theta": metadata.number(".rope.freq_base", 10000.0)}
    if architecture.partial_rotation:
        fields["partial_rotary_factor"] = rotated / head_size
    elif rotated != head_size:
        metadata.problem(".rope.dimension_count", f"is {rotated}; expected the size of a head, {head_size}")
    scaling = _rope_scaling(model, metadata, architecture, common["max_position_embeddings"])
    if scaling is None and architecture.scales_by_default:
        scaling = {"rope_type": "default"}
    return fields if scaling is None else {**fields, "rope_scaling": scaling}


def _rope_scaling(
    model: GgufModel, metadata: Metadata, architecture: Architecture, length: int
) -> dict[str, Any] | None:
    kind = metadata.text(".rope.scaling.type", choices=("none", "linear", "yarn", "longrope")) or "none"
    factor = metadata.optional_number(".rope.scaling.factor") or metadata.optional_number(".rope.scale_linear")
    original = metadata.optional_integer(".rope.scaling.original_context_length") or length
    attention = metadata.optional_number(".rope.scaling.attn_factor")
    metadata.ignore([".rope.scaling.finetuned"])
    metadata.expect(".rope.scaling.yarn_log_multiplier", [0.0])
    metadata.expect(".rope.scaling.yarn_attn_factor", [1.0])
    metadata.expect(".rope.scaling.yarn_ext_factor", [1.0, -1.0])
    factors = {name: _factors(model, name) for name in ROPE_TENSORS if name in model.tensors}
    if factors:
        if kind not in ("none", "longrope"):
            metadata.problem(".rope.scaling.type", f"is {kind}, but there are tensors of factors; expected longrope")
        own = factors.get(ROPE_FACTORS)
        short, long = factors.get(SHORT_FACTORS, own), factors.get(LONG_FACTORS, own)
        if short is None or long is None:
            metadata.problem(".rope.scaling.type", f"needs {SHORT_FACTORS} and {LONG_FACTORS}; one is missing")
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
            "attention_factor": attention or 1.0,
        }
    if kind == "longrope":
        metadata.problem(".rope.scaling.type", f"is longrope, which needs {SHORT_FACTORS} and {LONG_FACTORS}")
    if attention not in (None, 1.0):
        metadata.problem(".rope.scaling.attn_factor", f"is {attention}; only 1.0 is supported without factors")
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor or 1.0,
            "original_max_position_embeddings": original,
            "beta_fast": metadata.number(".rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number(".rope.scaling.yarn_beta_slow", 1.0),
            **({} if architecture.yarn_truncates else {"truncate": False}),
        }
    if factor is None or factor == 1.0 or (kind == "none" and ".rope.scaling.type" in metadata):
        return None
    return {"rope_type": "linear", "factor": factor}


def _factors(model: GgufModel, name: str) -> list[float]:
    return [float(each) for each in model.rows(name, slice(None)).reshape(-1)]


def _expect_neutral(metadata: Metadata, architecture: Architecture) -> None:
    """Keys that other architectures have, with the values at which they change nothing."""
    neutral: Mapping[str, tuple[bool | int | float | str, ...]] = {
        ".attention.causal": (not architecture.is_encoder,),
        ".attention.clamp_kqv": (0.0,),
        ".attention.max_alibi_bias": (0.0,),
        ".expert_count": (0,),
        ".expert_used_count": (0,),
        ".expert_gating_func": (1,),
        ".expert_shared_count": (0,),
        ".tensor_data_layout": ("Meta AI original pth",),
    }
    for key, accepted in neutral.items():
        if metadata.is_unused(key):
            metadata.expect(key, accepted)
