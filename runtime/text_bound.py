"""How long a text may be, decided before all of it is tokenised.

Tokenising takes about 1 us and 200 bytes of memory per character, also for a text that is refused afterwards for its
number of tokens. So a text is refused by its number of characters first, and a long one then piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from .._core import EngineInfo, RequestError

LONG_TEXT: Final = 1 << 14
"""Characters; a longer text is tokenised without holding the GIL, and a server does so outside its event loop."""
NORMALIZER_ROOM: Final = 4
"""Characters of a text that may become one character of a token: normalisers compose letters and drop spaces."""
_USUAL_CHARACTERS_PER_TOKEN: Final = 4
"""A text of no more is tokenised as a whole: that costs little more than the longest text that is accepted."""
_PIECE_CHARACTERS: Final = 1 << 16
_CUT_TOKENS: Final = 256
"""Tokens that one cut through a text may add: WordPiece has one token for a word of more than 100 characters."""


class TextTooLongError(RequestError):
    """A text is longer than any prompt that the engine takes."""

    def __init__(self, message: str, field: str) -> None:
        """`field`: name of the request's field that has the text."""
        super().__init__(message)
        self.field: Final = field


def max_prompt_tokens(info: EngineInfo) -> int:
    """Tokens of the longest prompt of an engine: the encoder's input where it has an encoder."""
    return info.max_encoder_input_len or info.max_input_len


def longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest token. Byte-level tokens count their bytes, which are at least as many."""
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)


def check_characters(num_characters: int, token_length: int, max_tokens: int, field: str) -> None:
    """Raises TextTooLongError for a text that has too many characters for `max_tokens` tokens.

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
    """Raises TextTooLongError for a long text whose first pieces have more than `max_tokens` tokens already.

    Nothing is tokenised of a text that has few characters for its limit. Of another, one piece is in memory at a time.
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
