"""The tokens of a GGUF file: their texts and kinds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from ...common.shown_value import shown
from .metadata import Metadata

PREFIX: Final = "tokenizer.ggml."
"""Beginning of all keys of tokenizers."""
_PADDING: Final = re.compile(r"\[PAD\d+\]")


class Kind(IntEnum):
    """Kinds of tokens in tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Tokens:
    """Texts and kinds of the tokens."""

    texts: Sequence[str]
    kinds: Sequence[int]

    @classmethod
    def read(cls, metadata: Metadata, vocab_size: int, original: Callable[[str, int], str] | None = None) -> Tokens:
        """Reads the tokens. Problems are noted in `metadata`.

        original: returns the text of a token of a kind in Hugging Face's vocabulary; None: it is the file's.
        """
        texts = metadata.texts(f"{PREFIX}tokens")
        given = metadata.numbers(f"{PREFIX}token_type")
        kinds = [int(Kind.NORMAL)] * len(texts) if given is None else [int(kind) for kind in given.tolist()]
        if len(kinds) != len(texts) or not set(kinds) <= set(Kind):
            metadata.problem(f"{PREFIX}token_type", "is no array of a kind from 1 to 6 for each token; expected one")
            kinds = [int(Kind.NORMAL)] * len(texts)
        if original is not None:
            texts = [original(text, kind) for text, kind in zip(texts, kinds, strict=True)]
        tokens = cls(texts, kinds)
        size = len(texts)
        # Converters of Gemma 3 shorten the embedding, but not the list of tokens.
        while size > vocab_size and not tokens.is_known(size - 1):
            size -= 1
        tokens = cls(texts[:size], kinds[:size])
        if not 1 <= size <= vocab_size:
            metadata.problem(f"{PREFIX}tokens", f"has {size} tokens; expected 1 to {vocab_size}, the vocabulary's")
        first: dict[str, int] = {}
        for number, text in enumerate(tokens.texts):
            if first.setdefault(text, number) != number and tokens.is_known(number):
                metadata.problem(
                    f"{PREFIX}tokens", f"has {shown(text)} twice, as {first[text]} and {number}; expected each once"
                )
                break
        return tokens

    def is_known(self, number: int) -> bool:
        """False for places in the vocabulary that no token has."""
        return self.kinds[number] != int(Kind.UNUSED) or not _PADDING.fullmatch(self.texts[number])

    def of_kind(self, *kinds: Kind) -> list[int]:
        """Returns the numbers of all tokens of these kinds."""
        wanted = set(map(int, kinds))
        return [number for number, kind in enumerate(self.kinds) if kind in wanted]

    def vocabulary(self) -> dict[str, int]:
        """Ids by the texts of the tokens."""
        vocabulary = {text: number for number, text in enumerate(self.texts)}
        for number in self.of_kind(Kind.UNUSED):
            if not self.is_known(number) and vocabulary.get(self.texts[number]) == number:
                del vocabulary[self.texts[number]]
        return vocabulary

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before it is split, as tokenizer.json lists them."""
        numbers = self.of_kind(Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)
        common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": number, "content": self.texts[number], **common,
             "special": self.kinds[number] != Kind.USER_DEFINED}
            for number in numbers if self.texts[number]
        ]  # fmt: skip


def special_tokens_around(
    tokens: Tokens,
    begin: Sequence[int],
    end: Sequence[int],
    *,
    between: Sequence[int] | None = None,
    second_type: int = 1,
) -> Mapping[str, Any] | None:
    """Returns a post-processor that adds tokens around each text; None: no tokens are added.

    between: tokens between two texts; None: each text has its own tokens around it. second_type: token type of the
    second text and what follows it.
    """
    if not begin and not end:
        return None

    def special(ids: Sequence[int], number: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": tokens.texts[each], "type_id": number}} for each in ids]

    def text(name: str, number: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": number}}

    middle = [*special(end, 0), *special(begin, second_type)] if between is None else special(between, 0)
    used = (*begin, *end, *(between or ()))
    return {
        "type": "TemplateProcessing",
        "single": [*special(begin, 0), text("A", 0), *special(end, 0)],
        "pair": [*special(begin, 0), text("A", 0), *middle, text("B", second_type), *special(end, second_type)],
        "special_tokens": {
            tokens.texts[each]: {"id": tokens.texts[each], "ids": [each], "tokens": [tokens.texts[each]]}
            for each in used
        },
    }
