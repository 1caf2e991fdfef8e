"""Requests that end in rows instead of tokens, such as embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from .._core import PoolingParams, PoolingType, RequestError
from ..formats.checkpoint.pooling import CLS, LAST, MEAN
from .loaded_engine import LoadedEngine

FloatArray = npt.NDArray[np.float32]

POOLING_TYPES: Final = {LAST: PoolingType.LAST, CLS: PoolingType.CLS, MEAN: PoolingType.MEAN}
"""Pooling types by their names in checkpoints."""


@dataclass(frozen=True)
class PromptTokens:
    """Tokens of a request that ends in rows."""

    ids: list[int]
    types: list[int] | None = None
    """Token type of each token; None: all 0."""

    @classmethod
    def of_pair(cls, encoding: Encoding, num_token_types: int) -> PromptTokens:
        """Returns the tokens of two texts that a tokenizer joined, for a model with this number of token types."""
        return cls(list(encoding.ids), list(encoding.type_ids) if num_token_types > 1 else None)

    def up_to(self, end: int) -> PromptTokens:
        """Returns the first `end` tokens."""
        return PromptTokens(self.ids[:end], None if self.types is None else self.types[:end])


def embedding_params(
    engine: LoadedEngine, pooling_type: PoolingType | None = None, normalize: bool | None = None
) -> PoolingParams:
    """Returns how to make a text's embedding: from the arguments, or else from the model's checkpoint.

    Raises RequestError if neither says it, and for PoolingType.ALL, which makes no single embedding.
    """
    stated = engine.config.pretrained_config.embedding_pooling
    if stated is not None:
        pooling_type = POOLING_TYPES[stated.pooling_type] if pooling_type is None else pooling_type
        normalize = stated.normalize if normalize is None else normalize
    if pooling_type is None or normalize is None:
        raise RequestError(
            f"{engine.directory}: the model does not say how embeddings are pooled (it had no modules.json of "
            "sentence-transformers); state pooling_type and normalize"
        )
    if pooling_type is PoolingType.ALL:
        raise RequestError("pooling_type is ALL; accepted: LAST, CLS, MEAN")
    return PoolingParams(pooling_type, engine.embedding_layers, normalize)


def embedding_size(engine: LoadedEngine, params: PoolingParams) -> int:
    """Returns the number of elements of an embedding."""
    return len(params.layers[-1].weight) if params.layers else engine.config.pretrained_config.hidden_size


def rows_of(output: Any) -> FloatArray:
    """Converts Result.pooled_output to float32. Raises RequestError if the request ended without it."""
    if output is None:
        raise RequestError("the request ended before its prompt was computed")
    return np.asarray(output, np.float32)
