"""Adapters of virtual tokens: converts them to the virtual tokens of a request."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from .._core import AdapterError, PromptTuningConfig, Request, RequestError
from ..formats.adapter import is_prompt_tuned, read_prompt_embeddings
from ..formats.adapter.recognise import CONFIG_FILE
from ..formats.engine.build_config import CUDA, NATIVE, TENSORRT
from .engine import LoadedEngine, load_engine

_KINDS: Final = {TENSORRT: "of TensorRT", CUDA: f"of backend {CUDA}"}
"""Descriptions of engines that take no virtual tokens, by backend."""


def table_from_peft(directory: str | Path, engine: LoadedEngine | str | Path) -> npt.NDArray[np.float32]:
    """Implements PromptTuningConfig.from_peft: returns float32 [virtual tokens, prompt_embedding_size].

    Raises AdapterError.
    """
    directory = Path(directory)
    loaded = engine if isinstance(engine, LoadedEngine) else load_engine(engine)
    if not is_prompt_tuned(directory):
        raise AdapterError(f"{directory / CONFIG_FILE}: has no virtual tokens; accepted: PROMPT_TUNING and P_TUNING")
    return _table_of(directory, loaded)


def prompt_of_directory(directory: Path, engine: LoadedEngine) -> PromptTuningConfig | None:
    """Returns the virtual tokens in a directory; None: its adapter is of another kind.

    Raises AdapterError for invalid virtual tokens, or for an engine that accepts none.
    """
    return PromptTuningConfig(_table_of(directory, engine)) if is_prompt_tuned(directory) else None


def _table_of(directory: Path, engine: LoadedEngine) -> npt.NDArray[np.float32]:
    _, table = read_prompt_embeddings(directory, engine.adapted_modules)
    backend = engine.config.build_config.backend
    if engine.num_ranks > 1 or backend != NATIVE:
        kind = _KINDS[backend] if backend != NATIVE else f"of {engine.num_ranks} ranks"
        raise AdapterError(
            f"{directory}: is an adapter of virtual tokens, and {engine.directory} is an engine {kind}; accepted: "
            "native engines of one rank"
        )
    return _with_given_columns(table, engine)


def _with_given_columns(table: npt.NDArray[np.float32], engine: LoadedEngine) -> npt.NDArray[np.float32]:
    """Adds the columns of engines that take images: nothing for later layers, and no coordinates."""
    num_later, num_coordinates = engine.config.network.given_columns
    later = np.zeros((len(table), num_later), np.float32)
    coordinates = np.full((len(table), num_coordinates), -1.0, np.float32)
    return np.concatenate([table, later, coordinates], axis=1)


def num_virtual_tokens(config: PromptTuningConfig) -> int:
    """Returns the number of tokens that it puts before a prompt."""
    return len(config.embedding_table)


def behind_virtual_tokens(request: Request, config: PromptTuningConfig, vocab_size: int, name: str) -> Request:
    """Returns a copy of the request whose prompt follows all virtual tokens of the adapter `name`.

    Raises RequestError for a request that has its own virtual tokens, and for one that is pooled.
    """
    foreign = next((token for token in request.input_token_ids if token >= vocab_size), None)
    if foreign is not None:
        raise RequestError(f"input_token_ids has {foreign}; the vocabulary is 0 to {vocab_size - 1}")
    if request.prompt_tuning_config is not None:
        raise RequestError(
            f"prompt_tuning_config is given; accepted: None, because adapter '{name}' brings virtual tokens"
        )
    if request.pooling_params is not None:
        raise RequestError(
            f"adapter '{name}' has virtual tokens, which are only for generation; accepted: requests without "
            "pooling_params"
        )
    tuned = copy.copy(request)
    tuned.input_token_ids = [
        *range(vocab_size, vocab_size + num_virtual_tokens(config)),
        *request.input_token_ids,
    ]
    tuned.prompt_tuning_config = config
    return tuned
