"""Reads the pooling of embeddings from the sentence-transformers files of a Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..._core import CheckpointError
from ...common.json_fields import JsonFields, describe, load_json_object
from ..checkpoint.hf_weights import MODULE_WEIGHTS
from ..checkpoint.pooling import CLS, LAST, MEAN, DenseLayer, EmbeddingPooling

MODULES_FILE: Final = "modules.json"

TRANSFORMER_FILE: Final = "sentence_bert_config.json"
_MODES: Final = {
    "pooling_mode_cls_token": CLS,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_lasttoken": LAST,
    "pooling_mode_max_tokens": "",
    "pooling_mode_mean_sqrt_len_tokens": "",
    "pooling_mode_weightedmean_tokens": "",
}
"""Switches of older releases, one per way of pooling; "" for those that are not served."""
_NAMES: Final = {"cls": CLS, "mean": MEAN, "lasttoken": LAST}
"""Values of pooling_mode in newer releases."""
_ACCEPTED: Final = ", ".join(_NAMES)
_ACTIVATIONS: Final = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.GELU": "gelu",
}
"""Activations of Dense modules, with their names in checkpoints."""
_EMBEDDING: Final = "sentence_embedding"
"""Name of the value that Dense modules read and replace."""


def read_embedding_pooling(model_dir: Path) -> EmbeddingPooling | None:
    """Returns the pooling of a model's modules.json; None if the file does not exist.

    Raises CheckpointError for other modules or ways of pooling, and for models that lower-case texts.
    """
    path = model_dir / MODULES_FILE
    if not path.is_file():
        return None
    pooling_type = None
    normalize = False
    dense: list[DenseLayer] = []
    for module in _modules(path):
        kind = str(module.get("type")).rpartition(".")[2]
        place = module.get("path")
        if kind == "Transformer" and pooling_type is None and place == "":
            _check_transformer(model_dir / TRANSFORMER_FILE)
        elif kind == "Pooling" and pooling_type is None and isinstance(place, str):
            pooling_type = _pooling_type(_inside(model_dir, place, path) / "config.json")
        elif kind == "Dense" and pooling_type is not None and not normalize and isinstance(place, str):
            dense.append(_dense_layer(_inside(model_dir, place, path) / "config.json", place))
        elif kind == "Normalize" and pooling_type is not None:
            normalize = True
        else:
            raise CheckpointError(
                f"{path}: module {describe(module)} is not served; accepted: a Transformer in this directory, a "
                "Pooling, any number of Dense, and a Normalize, in this order"
            )
    if pooling_type is None:
        raise CheckpointError(f"{path}: has no module of type Pooling")
    return EmbeddingPooling(pooling_type=pooling_type, normalize=normalize, dense=tuple(dense))


def pooling_files(model_dir: Path) -> list[Path]:
    """Existing files that read_embedding_pooling() may read, and those with weights of Dense modules."""
    inner = [path for name in ("config.json", MODULE_WEIGHTS) for path in sorted(model_dir.glob(f"*/{name}"))]
    named = [model_dir / MODULES_FILE, model_dir / TRANSFORMER_FILE, *inner]
    return [path for path in named if path.is_file()] if named[0].is_file() else []


def _modules(path: Path) -> list[Mapping[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path}: is {describe(modules)}; expected a list of objects")
    return modules


def _inside(model_dir: Path, place: str, path: Path) -> Path:
    found = (model_dir / place).resolve()
    if not found.is_relative_to(model_dir.resolve()):
        raise CheckpointError(f"{path}: path {describe(place)} is outside of the model's directory")
    return found


def _check_transformer(path: Path) -> None:
    # max_seq_length, the other field, truncates texts; AdaptRT refuses longer ones.
    if path.is_file() and load_json_object(path, CheckpointError).get("do_lower_case"):
        raise CheckpointError(f"{path}: do_lower_case is true; accepted: false, texts are given to the tokenizer as is")


def _dense_layer(path: Path, place: str) -> DenseLayer:
    if not place or place != Path(place).name:
        raise CheckpointError(f"{path}: path {describe(place)} of a Dense module; expected a directory's plain name")
    fields = JsonFields(load_json_object(path, CheckpointError))
    for name in ("module_input_name", "module_output_name"):
        if fields.raw(name) is not None:
            fields.string(name, choices=(_EMBEDDING,))
    activation = fields.string("activation_function", choices=_ACTIVATIONS, default="torch.nn.modules.activation.Tanh")
    layer = DenseLayer(
        path=place,
        inputs=fields.integer("in_features"),
        outputs=fields.integer("out_features"),
        bias=fields.boolean("bias", default=True),
        activation=_ACTIVATIONS.get(activation, "none"),
    )
    fields.finish(str(path), CheckpointError)
    return layer


def _pooling_type(path: Path) -> str:
    fields = load_json_object(path, CheckpointError)
    if fields.get("include_prompt", True) is not True:
        raise CheckpointError(f"{path}: include_prompt is {describe(fields['include_prompt'])}; accepted: true")
    mode = fields.get("pooling_mode")
    if mode is not None:
        if not isinstance(mode, str) or mode not in _NAMES:
            raise CheckpointError(f"{path}: pooling_mode is {describe(mode)}; accepted: {_ACCEPTED}")
        return _NAMES[mode]
    switched_on = [name for name in fields if name.startswith("pooling_mode_") and fields[name] is True]
    found = [_MODES.get(name, "") for name in switched_on]
    if len(found) != 1 or not found[0]:
        said = ", ".join(f"{name} is true" for name in switched_on) or "no pooling_mode is true"
        accepted = ", ".join(name for name, served in _MODES.items() if served)
        raise CheckpointError(f"{path}: {said}; accepted: one of {accepted}")
    return found[0]
