"""PEFT adapters: what each field and tensor means, conversion to a request's tensors, DoRA normalisation."""

from .base_weights import BaseWeights, HuggingFaceBase
from .convert import ConvertedAdapter, convert_adapter
from .dora import normalize_adapter
from .names import ModuleKey
from .peft_reader import read_peft_adapter

__all__ = [
    "BaseWeights",
    "ConvertedAdapter",
    "HuggingFaceBase",
    "ModuleKey",
    "convert_adapter",
    "normalize_adapter",
    "read_peft_adapter",
]
