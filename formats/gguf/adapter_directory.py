"""A LoRA adapter in a GGUF file as a directory of PEFT."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from ..._core import AdapterError
from ...common.shown_value import shown
from .architecture import Architecture
from .architectures import ARCHITECTURES
from .gguf_file import GgufModel
from .metadata import Metadata

ROW_ORDER_KEY: Final = "adaptrt.rotary_rows"
"""Metadata of adapter_model.safetensors: order of the rows of q's and k's lora_B. Missing: transformers' order."""
PAIRS: Final = "pairs"
"""Value of ROW_ORDER_KEY: the two elements of a head that are rotated together are neighbours, as in llama.cpp."""
_TENSOR: Final = re.compile(r"(?:blk\.(\d+)\.)?(.+)\.weight\.(lora_[ab])")
_PEFT_ROLES: Final = {"lora_a": "lora_A", "lora_b": "lora_B"}
_EMBEDDING: Final = "token_embd"


def is_adapter(path: Path) -> bool:
    """True for a GGUF file of an adapter. Raises CheckpointError as GgufModel()."""
    return GgufModel(path).metadata.get("general.type") == "adapter"


def write_adapter_directory(path: Path, directory: Path) -> None:
    """Writes adapter_config.json and adapter_model.safetensors of an adapter into an empty directory.

    Raises AdapterError that lists every metadata key and tensor that is missing, unknown or not supported;
    CheckpointError for a damaged file; OSError.
    """
    model = GgufModel(path.absolute())
    metadata = Metadata(model.metadata, str(model.path), AdapterError)
    kind = metadata.raw("general.type")
    if kind != "adapter":
        raise AdapterError(f"{path}: general.type is {shown(kind)}; expected adapter, because a LoRA adapter was named")
    metadata.text("adapter.type", choices=("lora",))
    alpha = metadata.number("adapter.lora.alpha", positive=False)
    metadata.ignore(["adapter.lora.task_name", "adapter.lora.prompt_prefix"])
    invocation = metadata.numbers("adapter.alora.invocation_tokens")
    architecture = ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        raise AdapterError(
            f"{path}: general.architecture is {shown(metadata.architecture)}, which is not read from GGUF files; "
            f"accepted: {', '.join(ARCHITECTURES)}. Take the adapter of PEFT that the file was made from"
        )
    tensors, problems = _peft_tensors(model, architecture)
    metadata.problems.extend(problems)
    metadata.finish()
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "lora_alpha": alpha,
        **_ranks(tensors),
    }
    if invocation is not None:
        config["alora_invocation_tokens"] = [int(token) for token in invocation]
    (directory / "adapter_config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
    marks = {ROW_ORDER_KEY: PAIRS} if architecture.is_permuted else {}
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt", **marks})


def _peft_tensors(
    model: GgufModel, architecture: Architecture
) -> tuple[dict[str, np.ndarray[Any, np.dtype[Any]]], list[str]]:
    """PEFT's tensors by name, and the problems of tensors that have no place in a PEFT adapter."""
    found, problems = {}, []
    for name, tensor in model.tensors.items():
        match = _TENSOR.fullmatch(name)
        layer, module, role = (None, "", "") if match is None else match.groups()
        names = architecture.model_names if layer is None else architecture.layer_names
        if match is None or module not in names or module == _EMBEDDING or len(tensor.shape) != 2:
            problems.append(
                f"tensor '{name}' {list(tensor.shape)} is not read; expected lora_a [rank, in] and lora_b [out, rank] "
                "of linear layers and of output"
            )
            continue
        above = "" if layer is None else f"{architecture.layer_prefix}.{layer}."
        path = f"base_model.model.{above}{names[module]}.{_PEFT_ROLES[role]}.weight"
        found[path] = np.ascontiguousarray(model.rows(name, slice(None)))
    return found, problems


def _ranks(tensors: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> dict[str, Any]:
    """Fields r, rank_pattern and target_modules."""
    ranks = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): len(values)
        for name, values in tensors.items()
        if name.endswith(".lora_A.weight")
    }
    most = max(ranks.values(), key=list(ranks.values()).count, default=1)
    return {
        "r": most,
        "rank_pattern": {re.escape(path): rank for path, rank in ranks.items() if rank != most},
        "target_modules": sorted(ranks),
    }
