"""Adapters of PEFT and MLX-LM: what fields and tensors mean, conversion to a request's tensors, DoRA normalisation."""

from .adapter import Adapter
from .base_weights import BaseWeights, HuggingFaceBase
from .convert import MAGNITUDE, SHIFT, ConvertedAdapter, convert_adapter
from .dora import normalize_adapter
from .invocation import invocation_start, invocation_tokens
from .names import ModuleKey
from .reader import read_adapter
from .weighted_sum import Term, weighted_sum

__all__ = [
    "MAGNITUDE",
    "SHIFT",
    "Adapter",
    "BaseWeights",
    "ConvertedAdapter",
    "HuggingFaceBase",
    "ModuleKey",
    "Term",
    "convert_adapter",
    "invocation_start",
    "invocation_tokens",
    "normalize_adapter",
    "read_adapter",
    "weighted_sum",
]
