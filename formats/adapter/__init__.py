"""PEFT and MLX-LM adapters: reading, checking, conversion to a request's tensors, DoRA normalisation."""

from .adapter import Adapter
from .base_weights import BaseWeights, HuggingFaceBase
from .convert import MAGNITUDE, SHIFT, ConvertedAdapter, convert_adapter
from .dora import normalize_adapter
from .invocation import invocation_start, invocation_tokens
from .names import EMBEDDING, LM_HEAD, ModuleKey
from .prompt_embeddings import is_prompt_tuned, read_prompt_embeddings
from .reader import read_adapter
from .token_rows import add_token_rows
from .weighted_sum import Term, check_ranks, weighted_sum
from .whole_weights import add_whole_weights

__all__ = [
    "EMBEDDING",
    "LM_HEAD",
    "MAGNITUDE",
    "SHIFT",
    "Adapter",
    "BaseWeights",
    "ConvertedAdapter",
    "HuggingFaceBase",
    "ModuleKey",
    "Term",
    "add_token_rows",
    "add_whole_weights",
    "check_ranks",
    "convert_adapter",
    "invocation_start",
    "invocation_tokens",
    "is_prompt_tuned",
    "normalize_adapter",
    "read_adapter",
    "read_prompt_embeddings",
    "weighted_sum",
]
