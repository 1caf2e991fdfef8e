"""What an adapter says of the requests that use it: their vocabulary, and what their rotary positions are divided by.

In an adapter's tensors these are rows without weights, settings, with a number in the rank's place (docs/formats.md).
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
    """Of an adapter's requests, and of those without one."""

    vocabulary_change: int = 0
    """Tokens that their vocabulary has more than the engine's; below 0: fewer."""
    rotary_factor: int = 1
    """What their rotary positions are divided by."""


def terms_of(config: npt.NDArray[np.int32]) -> AdapterTerms:
    """Those that rows [rows, 4] tell."""
    ranks = {int(row[0]): int(row[2]) for row in config}
    return AdapterTerms(
        ranks.get(MODULES[NEW_TOKENS].id, 0) - ranks.get(MODULES[ABSENT_TOKENS].id, 0),
        ranks.get(MODULES[ROTARY_SCALING].id, 1),
    )


def settings_of(terms: AdapterTerms) -> dict[str, int]:
    """The number of each setting that there is, by the name of its module."""
    found = {}
    if terms.rotary_factor != 1:
        found[ROTARY_SCALING] = terms.rotary_factor
    if terms.vocabulary_change < 0:
        found[ABSENT_TOKENS] = -terms.vocabulary_change
    return found


def rotary_factor_of(adapter: Adapter, modules: AdaptedModules | None, accepted: Collection[int] | None) -> int:
    """What an adapter divides rotary positions by: context_length over the base's positions, rounded up, as in vLLM.

    modules: of the model that will serve the adapter, or of its base.
    accepted: None: any.

    Raises AdapterError for a context_length without a base, and for a factor that is not accepted.
    """
    length = adapter.context_length
    if length == 0:
        return 1
    given = f"{adapter.directory / CONFIG_FILE}: context_length = {length}"
    if modules is None:
        raise AdapterError(f"{given}: what positions are divided by depends on the base's; give the base model")
    factor = -(-length // modules.max_positions)
    if factor == 1 or accepted is None or factor in accepted:
        return factor
    has = f"has {', '.join(map(str, sorted(accepted)))}" if accepted else "was built with none"
    raise AdapterError(
        f"{given}: {factor} times the base's {modules.max_positions} positions, and of long_lora_scaling_factors the "
        f"engine {has}; adaptrt build --long_lora_scaling_factors {factor} makes one that takes it"
    )


def may_have_terms(directory: Path, modules: AdaptedModules) -> bool:
    """Whether the adapter of PEFT or MLX-LM in a directory may say anything of its requests; reads no tensor.

    Raises AdapterError for files that cannot be read.
    """
    fields: dict[str, Any] = load_json_object(directory / CONFIG_FILE, AdapterError, max_bytes=MAX_CONFIG_BYTES)
    path = directory / SAFETENSORS_FILE
    if fields.get("context_length") or has_new_embeddings(directory) or (directory / PICKLE_FILE).is_file():
        return True
    if not path.is_file():
        return False  # MLX-LM's adapters have the base's vocabulary
    refuse_lfs_pointer(path)
    paths = [f"{path}." for path, layer in modules.by_any_path.items() if layer.is_of_vocabulary]
    return any(path in name for name in read_header(path, AdapterError).specs for path in paths)
