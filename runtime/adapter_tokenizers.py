"""Tokenizers of the model and of adapters.

An adapter that was trained with additional tokens has its own tokenizer.json. Its requests are tokenised, and its
answers detokenised, with that tokenizer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from tokenizers import Encoding, Tokenizer

from .._core import ConfigError, RequestError
from ..formats.adapter.adapter_copy import TOKENIZER_FILE, adapter_files
from ..formats.adapter.one_version import one_version
from .adapter_store import AdapterStore
from .chat_template import special_tokens
from .named_adapter import NamedAdapter
from .text_bound import LONG_TEXT, check_characters, check_pieces, longest_token
from .text_stream import TokenText, token_text
from .tokenizer_files import TokenizerFiles
from .vocabulary import Vocabulary

MAX_TOKENIZERS: Final = 16
"""Maximum number of adapters' tokenizers in memory. Each may be as large as the model's."""


class TokenTexts:
    """Texts of tokens in log probs, each computed once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Keeps at most one text per token of the vocabulary."""
        self._vocabulary = vocabulary
        self._texts: dict[int, TokenText] = {}

    def __getitem__(self, token_id: int) -> TokenText:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = token_text(self._vocabulary, token_id)
        return text


@dataclass(frozen=True)
class Truncation:
    """How a text is cut if it has too many tokens."""

    max_tokens: int
    """Number of tokens that stay, with the special tokens that the tokenizer adds."""
    side: str
    """Side on which tokens are left out, "left" or "right"."""

    def cut(self, token_ids: list[int]) -> list[int]:
        """Returns the tokens that stay."""
        return token_ids[-self.max_tokens :] if self.side == "left" else token_ids[: self.max_tokens]


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """Converts between texts and tokens, and knows the tokens that end a text."""

    vocabulary: Vocabulary
    end_ids: tuple[int, ...]
    longest_token: int
    """Number of characters of the longest token."""
    content: bytes = b""
    """Digest of the tokenizer's files."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary's tokenizer."""
        return self.vocabulary.tokenizer

    @cached_property
    def texts(self) -> TokenTexts:
        """Texts of single tokens."""
        return TokenTexts(self.vocabulary)

    def check_length(self, num_characters: int, max_tokens: int, field: str) -> None:
        """Rejects a text by its number of characters, before encode() is called.

        field: names the text in errors. Raises TextTooLongError if the text must have more than `max_tokens` tokens.
        """
        check_characters(num_characters, self.longest_token, max_tokens, field)

    def encode(
        self,
        text: str | tuple[str, str],
        max_tokens: int,
        field: str,
        *,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> Encoding:
        """Returns the tokens of a text, or of two texts with the tokenizer's separators.

        There may be somewhat more than `max_tokens` tokens. A text with many more is not tokenised to its end: raises
        TextTooLongError for it, and like check_length(). truncation: leaves out tokens of the text; the longer one of
        two texts is cut first. Raises RequestError if it leaves no room for a token of each text.
        """
        if truncation is not None:
            return self._encode_and_cut(text, max_tokens, field, truncation, add_special_tokens=add_special_tokens)
        first, second = (text, None) if isinstance(text, str) else text
        texts = (first,) if second is None else (first, second)
        num_characters = sum(map(len, texts))
        self.check_length(num_characters, max_tokens, field)
        if num_characters <= LONG_TEXT:
            return self.tokenizer.encode(first, second, add_special_tokens=add_special_tokens)
        check_pieces(texts, self.tokenizer, max_tokens, field)
        # Unlike encode(), this releases the GIL.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def _encode_and_cut(
        self,
        text: str | tuple[str, str],
        max_tokens: int,
        field: str,
        truncation: Truncation,
        *,
        add_special_tokens: bool,
    ) -> Encoding:
        texts = (text,) if isinstance(text, str) else text
        encodings = [self.encode(part, max_tokens, field, add_special_tokens=False) for part in texts]
        num_special = self.tokenizer.num_special_tokens_to_add(len(texts) > 1) if add_special_tokens else 0
        room = truncation.max_tokens - num_special
        if room < len(texts):
            raise RequestError(
                f"truncate_prompt_tokens is {truncation.max_tokens}; expected at least {num_special + len(texts)}: the "
                f"tokenizer adds {num_special} special tokens"
            )
        for encoding, length in zip(encodings, _shares([len(encoding) for encoding in encodings], room), strict=True):
            encoding.truncate(length, direction=truncation.side)
        second = encodings[1] if len(encodings) > 1 else None
        return self.tokenizer.post_process(encodings[0], second, add_special_tokens=add_special_tokens)


def _shares(lengths: list[int], room: int) -> list[int]:
    """Returns how many tokens of one or two texts stay."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    shorter = min(*lengths, room // 2)
    return [shorter, room - shorter] if lengths[0] <= lengths[1] else [room - shorter, shorter]


class Tokenizers:
    """The model's tokenizer, and those in adapters' directories. Thread-safe."""

    def __init__(self, of_model: TextTokenizer, adapters: AdapterStore) -> None:
        self.of_model: Final = of_model
        self._adapters = adapters
        self._own: OrderedDict[NamedAdapter, TextTokenizer] = OrderedDict()
        self._changed = threading.Lock()

    def known(self, adapter: str | None) -> TextTokenizer | None:
        """Returns the tokenizer of an adapter's requests (None: the base model's). Returns None if of() would read a
        file.

        Raises AdapterError for an unknown adapter.
        """
        found = None if adapter is None else self._adapters.find(adapter)
        # A weighted sum uses the model's tokenizer: its adapters add no tokens.
        if not isinstance(found, NamedAdapter):
            return self.of_model
        with self._changed:
            if found in self._own:
                self._own.move_to_end(found)
                return self._own[found]
        return self.of_model if found.facts.has_tokenizer is False else None

    def of(self, adapter: str | None) -> TextTokenizer:
        """Returns the tokenizer of an adapter's requests (None: the base model's). Reads it once, and again after the
        adapter was replaced.

        Raises AdapterError for an unknown adapter, ConfigError for tokenizer files that cannot be used.
        """
        known = self.known(adapter)
        if known is not None or adapter is None:
            return known or self.of_model
        return self.of_adapter(self._adapters.get(adapter))

    def of_adapter(self, found: NamedAdapter) -> TextTokenizer:
        """Returns the same for an adapter whose name may not be known yet."""
        found.facts.has_tokenizer = (found.directory / TOKENIZER_FILE).exists()
        if not found.facts.has_tokenizer:
            return self.of_model
        with one_version(found.directory, adapter_files):
            own = self._read(found.directory)
        with self._changed:
            self._own[found] = own
            if len(self._own) > MAX_TOKENIZERS:
                self._own.popitem(last=False)
        return own

    def _read(self, directory: Path) -> TextTokenizer:
        path = directory / TOKENIZER_FILE
        files = TokenizerFiles.read(path)
        tokenizer, without_id = files.make()
        content = files.digest(tokenizer)
        with self._changed:
            same = [other.vocabulary for other in (self.of_model, *self._own.values()) if other.content == content]
        # Most adapters have a copy of the model's tokenizer.
        vocabulary = same[0] if same else Vocabulary(tokenizer)
        end_ids = self.of_model.end_ids
        end = special_tokens(directory).get("eos_token")
        end_id = None if end is None or end in without_id else vocabulary.tokenizer.token_to_id(end)
        if end_id is not None:
            end_ids = tuple(dict.fromkeys((*end_ids, end_id)))
        return TextTokenizer(vocabulary, end_ids, longest_token(vocabulary.tokenizer), content)


def read_tokenizer(path: Path, end_ids: Sequence[int], vocab_size: int | None = None) -> TextTokenizer:
    """Reads the tokenizer of a tokenizer.json. Its texts end with one of `end_ids`.

    vocab_size: of the model; tokens beyond it in the files next to tokenizer.json are not added. None: all are added.

    Raises ConfigError for files that cannot be read.
    """
    require_tokenizer(path)
    files = TokenizerFiles.read(path)
    tokenizer = files.make(vocab_size).tokenizer
    return TextTokenizer(Vocabulary(tokenizer), tuple(end_ids), longest_token(tokenizer), files.digest(tokenizer))


def require_tokenizer(path: Path) -> None:
    """Raises ConfigError if there is no tokenizer.json. The error says how to make one."""
    if not path.exists():
        if path.name != TOKENIZER_FILE:
            raise ConfigError(f"{path}: there is no tokenizer; expected a {TOKENIZER_FILE} or a directory with one")
        raise ConfigError(
            f"{path}: there is no tokenizer; transformers can make it from a model's other tokenizer files: "
            f"AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(path.parent)!r})"
        )


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads the tokenizer of a tokenizer.json and the files next to it; see TokenizerFiles.make().

    Raises ConfigError for files that cannot be read or used.
    """
    require_tokenizer(path)
    return TokenizerFiles.read(path).make().tokenizer
