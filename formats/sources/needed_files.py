"""Files of a repository that AdaptRT reads, chosen from a list of the repository's files."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Sequence
from typing import Final

from ..adapter.adapter_copy import ADDED_TOKENS_FILE, SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from ..adapter.classifier_head import MODEL_CONFIG_FILE
from ..adapter.new_embeddings import PICKLE as EMBEDDINGS_PICKLE
from ..adapter.new_embeddings import SAFETENSORS as EMBEDDINGS_FILE
from ..adapter.proof import PROOF_FILE
from ..adapter.recognise import CONFIG_FILE as ADAPTER_CONFIG_FILE
from ..adapter.recognise import DRAFT_DIRECTORY, INITIAL_DIRECTORY, MLX_FILE, PICKLE_FILE, SAFETENSORS_FILE
from ..checkpoint.hf_weights import INDEX_SUFFIX, MODULE_WEIGHTS, WEIGHT_FILES
from ..hugging_face.hf_config import GENERATION_CONFIG_FILE
from ..hugging_face.image_processor import PREPROCESSOR_FILE, PROCESSOR_FILE
from ..hugging_face.sentence_transformers import MODULES_FILE, TRANSFORMER_FILE
from ..template_files import PROCESSOR_TEMPLATE_FILE, TEMPLATE_FILE, TEMPLATE_SUFFIX, TEMPLATES_DIRECTORY
from .kind import Kind
from .shown import some

_TEXT_FILES: Final = (
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    ADDED_TOKENS_FILE,
    TOKENIZER_FILE,
    TEMPLATE_FILE,
    MODEL_CONFIG_FILE,
)
_MODEL_FILES: Final = (
    *_TEXT_FILES,
    PROCESSOR_TEMPLATE_FILE,
    GENERATION_CONFIG_FILE,
    MODULES_FILE,
    TRANSFORMER_FILE,
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
)
_TEMPLATE: Final = re.compile(rf"{TEMPLATES_DIRECTORY}/[^/]+{re.escape(TEMPLATE_SUFFIX)}")
_MODULE_FILE: Final = re.compile(rf"[^/]+/config\.json|[^/]+_Dense/{re.escape(MODULE_WEIGHTS)}")


def small_files(kind: Kind, files: Collection[str]) -> list[str]:
    """Config, tokenizer and template files among `files`, which are relative to the directory.

    For models of sentence-transformers, also the weights of Dense modules.
    """
    known = _MODEL_FILES if kind is Kind.MODEL else (ADAPTER_CONFIG_FILE, PROOF_FILE, *_TEXT_FILES)
    chosen = [name for name in files if name in known or _TEMPLATE.fullmatch(name)]
    if kind is Kind.MODEL and MODULES_FILE in files:
        chosen += [name for name in files if _MODULE_FILE.fullmatch(name)]
    return sorted(chosen)


def weight_files(kind: Kind, files: Collection[str]) -> list[str]:
    """Files with weights among `files`, safetensors where both formats exist; for a model of several files, its index.

    Empty if there are none. Two entries of one format are both returned: the reader refuses such a model.
    """
    if kind is Kind.ADAPTER:
        others = [file for name in (INITIAL_DIRECTORY, DRAFT_DIRECTORY) for file in _adapter_below(name, files)]
        own = _adapter_weights(files)
        return [*others, *own] if own else []
    for whole in WEIGHT_FILES:
        present = [name for name in (whole, whole + INDEX_SUFFIX) if name in files]
        if present:
            return present
    return []


def weights_problem(kind: Kind, chosen: Sequence[str], files: Collection[str]) -> str | None:
    """Says why weight_files(), here `chosen`, cannot be read; None if they can. files: all files of the directory."""
    if not chosen:
        expected = SAFETENSORS_FILE if kind is Kind.ADAPTER else WEIGHT_FILES[0]
        others = [file for file in files if file.endswith((".gguf", ".safetensors", ".bin", ".pt", ".npz"))]
        holds = f"; it holds {some(others)}" if others else ""
        return f"has no weights that can be read; expected {expected}{holds}"
    if kind is Kind.MODEL and len(chosen) > 1:
        return f"has both {chosen[0]} and {chosen[1]}; expected one of them"
    if are_pickled(chosen) and importlib.util.find_spec("torch") is None:
        return f"has only pickled weights ({chosen[0]}), which need torch: pip install 'adaptrt[torch]'"
    return None


def are_pickled(weights: Collection[str]) -> bool:
    """True if reading these files needs torch."""
    return any(name.endswith((".bin", f".bin{INDEX_SUFFIX}")) for name in weights)


def _adapter_weights(files: Collection[str]) -> list[str]:
    weights = [name for name in (SAFETENSORS_FILE, PICKLE_FILE) if name in files][:1]
    weights += [name for name in (MLX_FILE,) if name in files]
    embeddings = [name for name in (EMBEDDINGS_FILE, EMBEDDINGS_PICKLE) if name in files][:1]
    return [*weights, *embeddings] if weights else []


def _adapter_below(directory: str, files: Collection[str]) -> list[str]:
    """Files of the adapter in a subdirectory."""
    config = f"{directory}/{ADAPTER_CONFIG_FILE}"
    weights = [f"{directory}/{name}" for name in _adapter_weights(_below(directory, files))]
    return [*weights, *([config] if config in files else [])]


def _below(directory: str, files: Collection[str]) -> list[str]:
    return [name.removeprefix(f"{directory}/") for name in files if name.startswith(f"{directory}/")]
