"""A tokenizer with facts about its tokens that every answer needs, each read once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Final

from tokenizers import Tokenizer

from .token_bytes import REPLACEMENT, TokenBytes


class Vocabulary:
    """A tokenizer whose tokens no longer change. Thread-safe.

    Reading thousands of added tokens takes milliseconds, so it is done once and not for each answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer: Final = tokenizer
        self.special: Final[Mapping[int, str]] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        """Names of the special tokens, by id."""
        self.bytes: Final = TokenBytes(tokenizer)
        """Bytes of single tokens."""

    def special_id(self, text: str) -> int | None:
        """Returns the id of the special token with this text; None: there is none."""
        token_id = self.tokenizer.token_to_id(text)
        return token_id if token_id in self.special else None

    def is_part(self, token_id: int) -> bool:
        """True for a token that is no text by itself, because its bytes are not whole characters."""
        token = str(self.tokenizer.id_to_token(token_id))
        if self.bytes.is_byte_level:
            return REPLACEMENT in (self.bytes.of(token) or b"").decode(errors="replace")
        return self.bytes.is_byte(token)

    @cached_property
    def any_word(self) -> tuple[int, ...]:
        """A token with text, which stands in for context that tokens cannot express; empty if there is none."""
        for token_id in range(self.tokenizer.get_vocab_size()):
            if (
                token_id not in self.special
                and not self.is_part(token_id)
                and self.tokenizer.decode([token_id]).strip()
            ):
                return (token_id,)
        return ()
