"""Heads of classifier adapters: linear layers of their own, outside of a request's tensors.

PEFT trains the head whole and saves it with the LoRA matrices. The head stays on the host and is applied to pooled
hidden states. The rest of the adapter is served like any other adapter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..._core import AdapterError
from ...common.json_fields import JsonFields, describe, load_json_object
from ..checkpoint.casting import to_float32
from .adapter import Array

PER_TOKEN: Final[Mapping[str, bool]] = {"SEQ_CLS": False, "TOKEN_CLS": True}
"""True for tasks (PEFT's task_type) that classify each token, False for those that classify the text."""
_MODEL_CLASSES: Final = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
MODEL_CONFIG_FILE: Final = "config.json"
"""The trained model's config. Users may put it next to the adapter; no other file has the names of the classes."""

_NAMES: Final = ("score", "classifier", "pre_classifier")
_TENSOR: Final = re.compile(
    r"base_model\.model\.(?P<module>score|classifier|pre_classifier)\.(?:modules_to_save\.)?"
    r"(?P<inner>dense\.|out_proj\.)?(?P<part>weight|bias)"
)
# PEFT with bias "all" also saves the biases of the head that the adapter's own head replaces.
_REPLACED: Final = re.compile(
    r"base_model\.model\.(?:score|classifier|pre_classifier)\.(?:dense\.|out_proj\.)?original_module\."
    r"(?:dense\.|out_proj\.)?bias"
)
_LAST: Final = ("score", "classifier", "classifier.out_proj")
_BEFORE: Final = ("classifier.dense", "pre_classifier")


@dataclass(frozen=True, eq=False)
class LayerBefore:
    """The layer before a head's last layer, if the adapter has one."""

    path: str
    """Path in the model."""
    weight: npt.NDArray[np.float32]
    """[out, in]"""
    bias: npt.NDArray[np.float32]
    """[out]"""


@dataclass(frozen=True, eq=False)
class ClassifierHead:
    """Last layer of a head: logits = hidden state weight^T + bias."""

    weight: npt.NDArray[np.float32]
    """[labels, hidden_size]"""
    bias: npt.NDArray[np.float32] | None
    """[labels]"""
    per_token: bool
    labels: tuple[str, ...] | None
    """Names of the classes; None if unknown."""
    problem_type: str | None
    """Value for Classifier.problem_type; None if not stated."""
    before: LayerBefore | None = None
    """None: the adapter has only the last layer."""


def is_classifier(fields: Mapping[str, Any]) -> bool:
    """True if an adapter_config.json belongs to a classifier."""
    task = _task_of(fields)
    return isinstance(task, str) and task in PER_TOKEN


def _task_of(fields: Mapping[str, Any]) -> Any:
    """PEFT's task_type. If PEFT was not told, it wrote the trained model's class, which implies the task."""
    task, trained = fields.get("task_type"), fields.get("auto_mapping")
    if task is not None or not isinstance(trained, dict):
        return task
    name = str(trained.get("base_model_class"))
    return next((task for end, task in _MODEL_CLASSES.items() if name.endswith(end)), None)


def fields_without_head(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the head from the fields of an adapter_config.json."""
    saved = fields.get("modules_to_save")
    if isinstance(saved, list):
        saved = [name for name in saved if name not in _NAMES] or None
    return {**fields, "modules_to_save": saved}


def tensors_without_head(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Removes the head from an adapter's tensors."""
    of_heads = (_TENSOR, _REPLACED)
    return {name: tensor for name, tensor in tensors.items() if not any(of.fullmatch(name) for of in of_heads)}


def head_of(directory: Path, fields: Mapping[str, Any], file: Path, tensors: Mapping[str, Array]) -> ClassifierHead:
    """Reads the head of a classifier's adapter from the tensors of `file`. Raises AdapterError."""
    found: dict[str, dict[str, Array]] = {}
    for tensor_name, tensor in tensors.items():
        match = _TENSOR.fullmatch(tensor_name)
        if match is not None:
            path = f"{match['module']}.{match['inner'] or ''}".removesuffix(".")
            found.setdefault(path, {})[match["part"]] = tensor
    task = _task_of(fields)
    last = [name for name in _LAST if "weight" in found.get(name, {})]
    if len(last) != 1 or not set(found) <= {*last, *_BEFORE}:
        said = " and ".join(f"'{name}'" for name in found) or "none"
        raise AdapterError(
            f"{file}: has task_type {task}, and its classifier head has {said}; accepted: "
            "base_model.model.score.weight or base_model.model.classifier.weight, or classifier.dense and "
            "classifier.out_proj"
        )
    name, parts = last[0], found[last[0]]
    weight = _float32(file, f"{name}.weight", parts["weight"], 2)
    bias = _float32(file, f"{name}.bias", parts["bias"], 1) if "bias" in parts else None
    if bias is not None and bias.shape != weight.shape[:1]:
        raise AdapterError(f"{file}: {name}.bias is {list(bias.shape)}, and {name}.weight {list(weight.shape)}")
    labels, problem_type = _names_of_classes(directory, len(weight))
    return ClassifierHead(weight, bias, PER_TOKEN[task], labels, problem_type, _layer_before(file, found))


def _layer_before(file: Path, found: Mapping[str, Mapping[str, Array]]) -> LayerBefore | None:
    names = [name for name in _BEFORE if name in found]
    if not names:
        return None
    if len(names) > 1 or found[names[0]].keys() != {"weight", "bias"}:
        said = " and ".join(f"'{name}.{part}'" for name in names for part in found[name])
        raise AdapterError(f"{file}: the head has {said} before its last layer; accepted: weight and bias of one layer")
    (path,) = names
    weight = _float32(file, f"{path}.weight", found[path]["weight"], 2)
    bias = _float32(file, f"{path}.bias", found[path]["bias"], 1)
    if bias.shape != weight.shape[:1]:
        raise AdapterError(f"{file}: {path}.bias is {list(bias.shape)}, and {path}.weight {list(weight.shape)}")
    return LayerBefore(path, weight, bias)


def _float32(file: Path, name: str, tensor: Array, dimensions: int) -> npt.NDArray[np.float32]:
    if tensor.ndim != dimensions or 0 in tensor.shape:
        raise AdapterError(f"{file}: {name} is {list(tensor.shape)}; expected {dimensions} dimensions, none of them 0")
    if tensor.dtype.kind not in "fV" and tensor.dtype.name != "bfloat16":
        raise AdapterError(f"{file}: {name} is {tensor.dtype.name}; expected floating-point numbers")
    with np.errstate(over="ignore"):
        wide = np.ascontiguousarray(to_float32(tensor))
    if not np.isfinite(wide).all():
        raise AdapterError(f"{file}: {name} has NaN, or values beyond float32")
    return wide


def _names_of_classes(directory: Path, num_labels: int) -> tuple[tuple[str, ...] | None, str | None]:
    path = directory / MODEL_CONFIG_FILE
    if not path.is_file():
        return None, None
    fields = JsonFields(load_json_object(path, AdapterError))
    named, problem_type = fields.raw("id2label"), fields.raw("problem_type")
    if named is None:
        return None, problem_type
    labels = [named.get(str(number)) for number in range(num_labels)] if isinstance(named, dict) else []
    if len(labels) != num_labels or len(named) != num_labels or not all(isinstance(label, str) for label in labels):
        raise AdapterError(f"{path}: id2label is {describe(named)}; the adapter's head has {num_labels} classes")
    return tuple(map(str, labels)), problem_type
