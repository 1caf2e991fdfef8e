"""Versions of an adapter with other bytes and the same answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

Tensors = Mapping[str, Any]


def without_first_rank(adapter: Path) -> dict[str, Any]:
    """Returns the tensors of a PEFT directory, with zeros in column 0 of every B."""
    tensors: dict[str, Any] = load_file(adapter / "adapter_model.safetensors")
    for name, value in tensors.items():
        if ".lora_B." in name:
            value[:, 0] = 0
    return tensors


def with_number(tensors: Tensors, number: int) -> dict[str, Any]:
    """Writes `number` into row 0 of every A, which the zeros of without_first_rank() multiply."""
    changed = dict(tensors)
    for name, value in tensors.items():
        if ".lora_A." in name:
            changed[name] = value.copy()
            changed[name][0, 0] = number
    return changed
