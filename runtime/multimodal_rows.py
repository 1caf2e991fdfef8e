"""TensorRT-LLM's multimodal inputs of requests: rows in place of tokens whose ids are after the vocabulary."""

from __future__ import annotations

import copy

from .._core import EngineInfo, PromptTuningConfig, Request, RequestError
from .options.elsewhere import MultimodalInput

_EMBEDDING = "multimodal_embedding"
_INPUT = "multimodal_input"


def has_multimodal_fields(request: Request) -> bool:
    """True if the request needs with_multimodal_rows()."""
    return request.multimodal_embedding is not None or request.multimodal_input is not None


def with_multimodal_rows(request: Request, info: EngineInfo, vocab_size: int) -> Request:
    """Returns a copy of the request whose multimodal_embedding is a prompt_tuning_config.

    multimodal_embedding: [rows, hidden_size]. Its rows stand in their order for the tokens of the prompt that are
    `vocab_size` or more. vocab_size: with the tokens that the request's adapter adds. multimodal_input only says where
    they are: rows of equal content are reused without its hashes.

    Raises RequestError if tokens and rows do not fit together, and for models whose rows need positions.
    """
    rows, places = request.multimodal_embedding, request.multimodal_input
    if rows is None:
        raise RequestError(f"{_INPUT} is given without {_EMBEDDING}; expected both, or neither")
    if request.prompt_tuning_config is not None:
        raise RequestError(f"{_EMBEDDING} is given with prompt_tuning_config; expected one of them")
    if info.num_coordinates > 0:
        raise RequestError(
            f"{_EMBEDDING} is given; expected None, because rows of this model have {info.num_coordinates} coordinates "
            "after their elements: give them as prompt_tuning_config (LLM.chat_prompt makes one of images)"
        )
    config = PromptTuningConfig(rows)
    count = len(config.embedding_table)
    at = [place for place, token in enumerate(request.input_token_ids) if token >= vocab_size]
    if len(at) != count:
        raise RequestError(
            f"{_EMBEDDING} has {count} rows, and input_token_ids has {len(at)} tokens from {vocab_size} on; expected "
            "a token for each row"
        )
    if places is not None and at != _places_of(places):
        raise RequestError(
            f"{_INPUT} has other places than the tokens from {vocab_size} on in input_token_ids; expected "
            "multimodal_positions and multimodal_lengths of exactly these tokens"
        )
    seen = copy.copy(request)
    seen.multimodal_embedding = seen.multimodal_input = None
    seen.prompt_tuning_config = config
    ids = list(request.input_token_ids)
    for row, place in enumerate(at):
        ids[place] = vocab_size + row
    seen.input_token_ids = ids
    return seen


def _places_of(places: MultimodalInput) -> list[int]:
    """Returns the places of all rows. Raises RequestError for something else than a MultimodalInput."""
    if not isinstance(places, MultimodalInput):
        raise RequestError(f"{_INPUT} is of type {type(places).__name__}; expected MultimodalInput")
    begins, lengths = places.multimodal_positions, places.multimodal_lengths
    if len(begins) != len(lengths):
        raise RequestError(
            f"{_INPUT} has {len(begins)} multimodal_positions and {len(lengths)} multimodal_lengths; expected as many"
        )
    return [place for begin, length in zip(begins, lengths, strict=True) for place in range(begin, begin + length)]
