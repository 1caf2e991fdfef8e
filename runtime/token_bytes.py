"""Bytes of single tokens, and counts of characters whose bytes come in several tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

REPLACEMENT: Final = "\ufffd"
"""Written by decoders for bytes that are not UTF-8. At the end of a text, the missing bytes may still come."""
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""Names of single-byte tokens in vocabularies with byte fallback."""


class TokenBytes:
    """Bytes that each token of a vocabulary adds to a text, as the tokenizer's decoder makes them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Reads only the decoder, so the size of the vocabulary does not matter."""
        decoder = tokenizer.decoder
        decoders = _decoders(None if decoder is None else json.loads(decoder.__getstate__()))
        self.kinds: Final = frozenset(decoder["type"] for decoder in decoders)
        """Types of the decoder and of nested decoders."""
        self.is_byte_level: Final = "ByteLevel" in self.kinds
        """True: tokens are written in characters that stand for bytes."""
        self.has_byte_tokens: Final = not self.is_byte_level and "ByteFallback" in self.kinds
        """True: there are single-byte tokens. A run of them is decoded as a whole."""
        self._spaces = _letters_for_spaces(decoders)

    @property
    def is_known(self) -> bool:
        """True if of() knows the bytes of tokens."""
        return bool(self.kinds & {"ByteLevel", "ByteFallback", "Metaspace"})

    def of(self, token: str) -> bytes | None:
        """Returns the bytes that a token adds to a text; None for an unknown kind of decoder."""
        if self.is_byte_level:
            try:
                return bytes(_BYTE_OF_LETTER[letter] for letter in token)
            except KeyError:  # an added token is its own text
                return token.encode()
        if not self.is_known:
            return None
        if self.is_byte(token):
            return bytes.fromhex(token[3:5])
        return token.translate(self._spaces).encode()

    def is_byte(self, token: str) -> bool:
        """True for a single-byte token."""
        return self.has_byte_tokens and token.startswith("<0x") and _BYTE_TOKEN.fullmatch(token) is not None


class LetterCount:
    """Counts the characters of a text whose bytes come in parts. Invalid UTF-8 counts as decoders write it.

    Decoders write one U+FFFD for an incomplete character, and one for each other byte that begins no character.
    """

    def __init__(self) -> None:
        self.started = 0
        """Number of characters whose first byte has been added."""
        self.missing = 0
        """Number of bytes that the last character still needs."""
        self._lowest, self._highest = 0x80, 0xBF

    @property
    def place(self) -> int:
        """Index of the incomplete character, or of the next one."""
        return self.started - (self.missing > 0)

    def is_continued_by(self, data: bytes) -> bool:
        """True if the first of these bytes continues the incomplete character."""
        return self.missing > 0 and len(data) > 0 and self._lowest <= data[0] <= self._highest

    def add(self, data: bytes) -> None:
        """Adds bytes."""
        for byte in data:
            if self.missing and self._lowest <= byte <= self._highest:
                self.missing -= 1
                self._lowest, self._highest = 0x80, 0xBF
            else:
                self.started += 1
                self.missing, self._lowest, self._highest = _FOLLOWING.get(byte, (0, 0x80, 0xBF))


def _following() -> dict[int, tuple[int, int, int]]:
    """Returns, by a character's first byte, the number of bytes that follow and the next one's range (Unicode, table
    3-7).
    """
    found = dict.fromkeys(range(0xC2, 0xE0), (1, 0x80, 0xBF))
    found |= dict.fromkeys(range(0xE0, 0xF0), (2, 0x80, 0xBF))
    found |= dict.fromkeys(range(0xF0, 0xF5), (3, 0x80, 0xBF))
    return found | {0xE0: (2, 0xA0, 0xBF), 0xED: (2, 0x80, 0x9F), 0xF0: (3, 0x90, 0xBF), 0xF4: (3, 0x80, 0x8F)}


def _byte_letters() -> dict[str, int]:
    """Returns the bytes by the characters that stand for them in byte-level vocabularies: printable bytes stand for
    themselves, the others have characters from 256 on.
    """
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_FOLLOWING: Final = _following()
_BYTE_OF_LETTER: Final = _byte_letters()


def _decoders(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Returns a decoder and all decoders inside it."""
    if decoder is None:
        return []
    return [decoder, *(inner for part in decoder.get("decoders", ()) for inner in _decoders(part))]


def _letters_for_spaces(decoders: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Returns the characters that stand for a space in tokens."""
    letters = {}
    for decoder in decoders:
        if decoder["type"] == "Metaspace":
            letters[ord(decoder["replacement"])] = " "
        elif decoder["type"] == "Replace":
            pattern = decoder["pattern"].get("String", "")
            if len(pattern) == 1 and decoder["content"] == " ":
                letters[ord(pattern)] = " "
    return letters
