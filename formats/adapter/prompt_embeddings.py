"""PEFT adapters that put virtual tokens before a prompt: prompt tuning, and P-tuning as PEFT saves it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..._core import AdapterError
from ...common.json_fields import describe, load_json_object
from ...common.safetensors_stream import SafetensorsReader
from ..checkpoint.casting import CHECKPOINT_DTYPES, to_float32
from ..network.adapter_sites import AdaptedModules
from .peft_fields import PROMPT_FIELDS, PROMPT_REQUIRED, field_problems
from .problems import join_problems
from .recognise import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    PICKLE_FILE,
    SAFETENSORS_FILE,
    PromptKind,
    prompt_kind,
    refuse_lfs_pointer,
)

_TENSOR: Final = "prompt_embeddings"
_TASK: Final = "CAUSAL_LM"


def is_prompt_tuned(directory: Path) -> bool:
    """True if the adapter consists of virtual tokens. Raises AdapterError if its config cannot be read."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return False
    refuse_lfs_pointer(path)
    return prompt_kind(load_json_object(path, AdapterError, max_bytes=MAX_CONFIG_BYTES)) is not None


def read_prompt_embeddings(
    directory: Path, modules: AdaptedModules | None
) -> tuple[PromptKind, npt.NDArray[np.float32]]:
    """Reads the kind and the virtual tokens [virtual tokens, hidden_size] of a prompt-tuned adapter.

    The values are inputs of the first layer: if the Hugging Face model scales its inputs_embeds, they are scaled.

    modules: modules of the model that the adapter is for; None: the width is not checked, and nothing is scaled.

    Raises AdapterError that names every field and tensor that cannot be used, and why.
    """
    path = directory / CONFIG_FILE
    fields = load_json_object(path, AdapterError, max_bytes=MAX_CONFIG_BYTES)
    kind = prompt_kind(fields)
    assert kind is not None
    problems = _problems_of(fields, modules)
    if problems:
        raise AdapterError(f"{path}: " + join_problems(problems))
    table = _read_table(directory, (fields["num_virtual_tokens"], fields["token_dim"]))
    # Scaled in float32, because PEFT's tokens are cast to the model's type before the model multiplies them.
    return kind, table if modules is None else table * np.float32(modules.inputs_embeds_scale)


def _problems_of(fields: Mapping[str, Any], modules: AdaptedModules | None) -> list[str]:
    problems = field_problems(fields, PROMPT_FIELDS[fields["peft_type"]], PROMPT_REQUIRED)
    task = fields.get("task_type")
    if task != _TASK:
        problems.append(f"task_type = {describe(task)}: virtual tokens are put before prompts; accepted: {_TASK}")
    if problems or modules is None:
        return problems
    if modules.has_encoder or modules.is_encoder_only:
        problems.append("virtual tokens are put before a decoder's prompts, but the model has an encoder")
    if fields["token_dim"] != modules.hidden_size:
        problems.append(f"token_dim = {fields['token_dim']}: expected the model's hidden size {modules.hidden_size}")
    return problems


def _read_table(directory: Path, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    path = directory / SAFETENSORS_FILE
    if not path.is_file():
        pickle = f"; {PICKLE_FILE} is not read" if (directory / PICKLE_FILE).is_file() else ""
        raise AdapterError(f"{directory}: has no {SAFETENSORS_FILE}{pickle}")
    refuse_lfs_pointer(path)
    reader = SafetensorsReader(path, AdapterError, in_memory=True)
    problems = [f"tensor '{name}' does not belong to virtual tokens" for name in reader.specs if name != _TENSOR]
    spec = reader.specs.get(_TENSOR)
    if spec is None:
        problems.append(f"tensor '{_TENSOR}' is missing")
    elif spec.dtype not in CHECKPOINT_DTYPES:
        accepted = ", ".join(dtype.name for dtype in CHECKPOINT_DTYPES)
        problems.append(f"tensor '{_TENSOR}' is of {spec.dtype.name}; accepted: {accepted}")
    elif spec.shape != shape:
        problems.append(
            f"tensor '{_TENSOR}' is {list(spec.shape)}; {CONFIG_FILE} has num_virtual_tokens {shape[0]} and token_dim "
            f"{shape[1]}"
        )
    if problems:
        raise AdapterError(f"{path}: " + join_problems(problems))
    table = to_float32(reader.array(_TENSOR))
    if not np.isfinite(table).all():
        row, column = np.argwhere(~np.isfinite(table))[0].tolist()
        raise AdapterError(f"{path}: tensor '{_TENSOR}' holds {table[row, column]} at [{row}, {column}]")
    return table
