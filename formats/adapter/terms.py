"""Conditions that an adapter sets for its requests: their vocabulary, and the divisor of their rotary positions.

An adapter's tensors express them as settings: rows without weights, with a number in place of the rank
(docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..._core import AdapterError
from ...common.json_fields import load_json_object
from ...common.safetensors_stream import read_header
from ..network.adapter_sites import NEW_TOKENS, AdaptedModules
from .adapter import Adapter
from .names import MODULES
from .new_embeddings import has_new_embeddings
from .recognise import CONFIG_FILE, MAX_CONFIG_BYTES, PICKLE_FILE, SAFETENSORS_FILE, refuse_lfs_pointer

ROTARY_SCALING: Final = "rotary_scaling"
ABSENT_TOKENS: Final = "absent_tokens"


@dataclass(frozen=True)
class AdapterTerms:
    """Conditions of an adapter's requests; the defaults are those of requests without an adapter."""

    vocabulary_change: int = 0
    """Number of tokens that their vocabulary has more than the engine's; negative: fewer."""
    rotary_factor: int = 1
    """Divisor of their rotary positions."""


def terms_of(config: npt.NDArray[np.int32]) -> AdapterTerms:
    """Reads the conditions from rows [rows, 4]."""
    ranks = {int(row[0]): int(row[2]) for row in config}
    return AdapterTerms(
        ranks.get(MODULES[NEW_TOKENS].id, 0) - ranks.get(MODULES[ABSENT_TOKENS].id, 0),
        ranks.get(MODULES[ROTARY_SCALING].id, 1),
    )


def max_rank_of(config: npt.NDArray[np.int32]) -> int:
    """Returns the maximum rank of rows [rows, 4]; 0: all rows are settings."""
    settings = {MODULES[name].id for name in (NEW_TOKENS, ABSENT_TOKENS, ROTARY_SCALING)}
    return max((int(row[2]) for row in config if int(row[0]) not in settings), default=0)


def settings_of(terms: AdapterTerms) -> dict[str, int]:
    """Returns the number of each setting that differs from the default, by the name of its module."""
    found = {}
    if terms.rotary_factor != 1:
        found[ROTARY_SCALING] = terms.rotary_factor
    if terms.vocabulary_change < 0:
        found[ABSENT_TOKENS] = -terms.vocabulary_change
    return found


def rotary_factor_of(adapter: Adapter, modules: AdaptedModules | None, accepted: Collection[int] | None) -> int:
    """Returns the divisor of an adapter's rotary positions: context_length / base's positions, rounded up, as in vLLM.

    modules: modules of the model that will serve the adapter, or of its base.
    accepted: accepted divisors; None: any.

    Raises AdapterError for a context_length without a base, and for a divisor that is not accepted.
    """
    length = adapter.context_length
    if length == 0:
        return 1
    given = f"{adapter.directory / CONFIG_FILE}: context_length = {length}"
    if modules is None:
        raise AdapterError(f"{given}: the divisor of positions depends on the base model; give the base model")
    factor = -(-length // modules.max_positions)
    if factor == 1 or accepted is None or factor in accepted:
        return factor
    has = ", ".join(map(str, sorted(accepted))) if accepted else "none"
    raise AdapterError(
        f"{given}: the scaling factor is {factor} (the base has {modules.max_positions} positions), and the engine's "
        f"long_lora_scaling_factors are {has}; build it with --long_lora_scaling_factors {factor}"
    )


def may_have_terms(directory: Path, modules: AdaptedModules) -> bool:
    """True if the PEFT or MLX-LM adapter in a directory may set conditions; reads no tensor data.

    Raises AdapterError if the files cannot be read.
    """
    fields: dict[str, Any] = load_json_object(directory / CONFIG_FILE, AdapterError, max_bytes=MAX_CONFIG_BYTES)
    path = directory / SAFETENSORS_FILE
    if fields.get("context_length") or has_new_embeddings(directory) or (directory / PICKLE_FILE).is_file():
        return True
    if not path.is_file():
        return False  # MLX-LM adapters have the base's vocabulary
    refuse_lfs_pointer(path)
    paths = [f"{path}." for path, layer in modules.by_any_path.items() if layer.is_of_vocabulary]
    return any(path in name for name in read_header(path, AdapterError).specs for path in paths)
