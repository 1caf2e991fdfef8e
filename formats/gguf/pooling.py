"""The pooling of embeddings in a GGUF file, as files of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .architecture import Architecture
from .architectures import DENSE_MODULES
from .gguf_file import GgufModel
from .metadata import Metadata

_KEY: Final = ".pooling_type"
_NONE, _RANK = 0, 4
_MODES: Final[Mapping[int, str]] = {
    1: "pooling_mode_mean_tokens",
    2: "pooling_mode_cls_token",
    3: "pooling_mode_lasttoken",
}
"""Fields of sentence-transformers by llama.cpp's numbers."""
_PLACE: Final = "1_Pooling"
_MODELS: Final = "sentence_transformers.models"


def read_pooling(model: GgufModel, metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    """Returns the contents of JSON files by their paths; none if the file states no pooling of embeddings.

    Files do not say if embeddings are normalised. They are here, as llama-server's are.
    """
    number = metadata.optional_integer(_KEY)
    dense = {place: layer for name, place in DENSE_MODULES.items() if (layer := _dense(model, metadata, name))}
    neutral = (_NONE, _RANK) if architecture.is_classifier else (_NONE,)
    if number is None or number in neutral:
        return {}
    if number not in _MODES:
        accepted = ", ".join(map(str, sorted({*neutral, *_MODES})))
        metadata.problem(
            _KEY, f"is {number}; accepted: {accepted} (0: none, 1: mean, 2: first token, 3: last, 4: rank)"
        )
        return {}
    modules = [("", "Transformer"), (_PLACE, "Pooling"), *((place, "Dense") for place in dense)]
    modules.append((f"{len(modules)}_Normalize", "Normalize"))
    return {
        "modules.json": [
            {"idx": at, "name": str(at), "path": path, "type": f"{_MODELS}.{kind}"}
            for at, (path, kind) in enumerate(modules)
        ],
        f"{_PLACE}/config.json": {mode: mode == _MODES[number] for mode in _MODES.values()},
        **{f"{place}/config.json": layer for place, layer in dense.items()},
    }


def _dense(model: GgufModel, metadata: Metadata, name: str) -> dict[str, Any] | None:
    """Config of a linear layer after the pooling; None if the file does not have it. Converters drop biases, and only
    accept layers without an activation."""
    tensor = model.tensors.get(f"{name}.weight")
    outputs, inputs = tensor.shape if tensor is not None and len(tensor.shape) == 2 else (0, 0)
    if not outputs:
        return None
    metadata.expect(f".{name}_feat_in", [inputs])
    metadata.expect(f".{name}_feat_out", [outputs])
    return {
        "in_features": inputs,
        "out_features": outputs,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
