"""Rejects texts that are too long before they are tokenised completely.

Tokenising takes about 1 us and 200 bytes of memory per character, even if the text is then rejected for its number of
tokens. So the number of characters is checked first, and a long text is then tokenised piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from .._core import EngineInfo, RequestError

LONG_TEXT: Final = 1 << 14
"""Characters; a longer text is tokenised without holding the GIL, and a server does so outside its event loop."""
NORMALIZER_ROOM: Final = 4
"""Number of characters that normalisation may turn into one: normalisers compose characters and drop spaces."""
_USUAL_CHARACTERS_PER_TOKEN: Final = 4
"""A text with fewer characters per allowed token is tokenised at once, which costs little more than the longest
accepted text.
"""
_PIECE_CHARACTERS: Final = 1 << 16
_CUT_TOKENS: Final = 256
"""Number of tokens that one cut may add: WordPiece has one token for a word of more than 100 characters."""


class TextTooLongError(RequestError):
    """A text is longer than the engine's longest prompt."""

    def __init__(self, message: str, field: str) -> None:
        """field: name of the request's field with the text."""
        super().__init__(message)
        self.field: Final = field


def max_prompt_tokens(info: EngineInfo) -> int:
    """Returns the maximum number of prompt tokens; in an encoder-decoder model, of the encoder's input."""
    return info.max_encoder_input_len or info.max_input_len


def longest_token(tokenizer: Tokenizer) -> int:
    """Returns the length of the longest token in characters. Byte-level tokens count bytes, at least as many."""
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)


def check_characters(num_characters: int, token_length: int, max_tokens: int, field: str) -> None:
    """Raises TextTooLongError for more characters than `max_tokens` tokens can have.

    token_length: longest_token() of the tokenizer.
    """
    bound = max_tokens * token_length * NORMALIZER_ROOM
    if num_characters > bound:
        raise TextTooLongError(
            f"{field} has {num_characters} characters; expected at most {bound}, as many as {max_tokens} tokens can "
            "have",
            field,
        )


def check_pieces(texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int, field: str) -> None:
    """Raises TextTooLongError if the first pieces of a long text already have more than `max_tokens` tokens.

    Does not tokenise a text that is short for its limit. Otherwise keeps only one piece in memory at a time.
    """
    num_characters = sum(map(len, texts))
    if num_characters <= max(_PIECE_CHARACTERS, max_tokens * _USUAL_CHARACTERS_PER_TOKEN):
        return
    num_tokens = 0
    for text in texts:
        for begin in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[begin : begin + _PIECE_CHARACTERS]
            (encoding,) = tokenizer.encode_batch_fast([piece], add_special_tokens=False)
            num_tokens += max(len(encoding) - _CUT_TOKENS, 0)
            if num_tokens > max_tokens:
                raise TextTooLongError(
                    f"{field} has {num_characters} characters, which are more than {max_tokens} tokens; expected at "
                    f"most {max_tokens} tokens",
                    field,
                )
