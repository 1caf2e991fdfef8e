"""LoRARequest, the form in which callers of vLLM and TensorRT-LLM name an adapter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from .._core import AdapterError
from ..common.shown_value import shown

_NO_EFFECT: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "load_inplace": ((True, False), "True reads the adapter again, and replaces it"),
    "is_3d_lora_weight": ((True, False), "the tensors of an adapter show their form"),
    "tensorizer_config_dict": ((None,), "adapters are read from safetensors"),
    "long_lora_max_len": ((None,), "EngineOptions(long_lora_scaling_factors=...) extends the context"),
    "lora_local_path": ((None, ""), "give lora_path"),
}
"""Fields that accept only these values, and the reason."""


@dataclass(frozen=True)
class LoRARequest:
    """An adapter with its name, as LLM's arguments `lora` and `lora_request` accept it.

    The first request reads the adapter and makes its name known, like LLM.load_lora(); later ones use it.

    Raises AdapterError for values that cannot be used, with what is accepted.
    """

    lora_name: str
    lora_int_id: int
    """vLLM's number of the adapter, 0 or more. It has no effect: the name identifies the adapter."""
    lora_path: str | os.PathLike[str] = ""
    """Directory or name in a store; empty: the name is known already."""
    base_model_name: str | None = field(default=None, kw_only=True)
    """Has no effect: the adapter's own config names its base model."""
    load_inplace: bool = field(default=False, kw_only=True)
    """True: reads the adapter again even if its name is known. Running requests keep the old one."""
    is_3d_lora_weight: bool = field(default=False, kw_only=True)
    tensorizer_config_dict: Any = field(default=None, kw_only=True)
    long_lora_max_len: int | None = field(default=None, kw_only=True)
    lora_local_path: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Raises AdapterError with all problems."""
        problems = []
        if not isinstance(self.lora_name, str) or not self.lora_name:
            problems.append(f"lora_name is {shown(self.lora_name)}; expected a text of one character or more")
        if not isinstance(self.lora_int_id, int) or isinstance(self.lora_int_id, bool) or self.lora_int_id < 0:
            problems.append(f"lora_int_id is {shown(self.lora_int_id)}; expected 0 or more")
        if not isinstance(self.lora_path, str | os.PathLike):
            problems.append(f"lora_path is {shown(self.lora_path)}; expected a directory or a name in a store")
        if self.base_model_name is not None and not isinstance(self.base_model_name, str):
            problems.append(f"base_model_name is {shown(self.base_model_name)}; expected a text or None")
        for name, (values, reason) in _NO_EFFECT.items():
            value = getattr(self, name)
            if not any(type(value) is type(one) and value == one for one in values):
                said = " or ".join(map(repr, values))
                problems.append(f"{name} is {shown(value)}; expected {said}: {reason}")
        if problems:
            raise AdapterError("LoRARequest: " + "; ".join(problems))

    @staticmethod
    def of(request: Any) -> LoRARequest:
        """Returns the request of another program's class. Raises AdapterError for a field that is unknown and set."""
        if isinstance(request, LoRARequest):
            return request
        known = {one.name for one in fields(LoRARequest)}
        names = getattr(request, "__struct_fields__", None) or vars(request)
        for name in names:
            if name not in known and not name.startswith("_") and getattr(request, name) not in (None, False, ""):
                raise AdapterError(
                    f"LoRARequest: {name} is {shown(getattr(request, name))}; expected no value: the field is unknown"
                )
        return LoRARequest(**{name: getattr(request, name) for name in known if hasattr(request, name)})


def is_lora_request(value: Any) -> bool:
    """True for a LoRARequest of this package, of vLLM and of TensorRT-LLM. The others are not imported."""
    return all(hasattr(value, name) for name in ("lora_name", "lora_int_id", "lora_path"))
