"""Tokens to text, as they come: what may be shown of an answer now, and where a stop string ends it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from tokenizers import Tokenizer

from .._core import RequestError

_REPLACEMENT: Final = "\ufffd"
"""What decoders write for bytes that are no UTF-8; at the end of a text, the letter's other bytes may still come."""
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-F]{2}>")
"""How vocabularies with byte fallback name the tokens of single bytes."""
_LONGEST_LETTER: Final = 4
"""Bytes of a letter in UTF-8."""


class TextStream:
    """The text of one answer, decoded piece by piece.

    The pieces of add() and finish() together are tokenizer.decode() of all tokens, cut before the first stop string:
    the one that ends first, and the longest of those that end there. Text is held back while it may be the beginning
    of a stop string, or while tokens to come may still change it: an incomplete UTF-8 letter, and a run of
    byte-fallback tokens, which is decoded as a whole.

    Each step decodes a few tokens, however long the answer is. (tokenizers' DecodeStream is not used: it raises an
    error where a run of byte tokens turns out not to be UTF-8 after all.)
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        """Raises RequestError for an empty stop string."""
        if not all(stop):
            raise RequestError("stop has an empty string; leave it out, or give the text that ends an answer")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special_tokens = skip_special_tokens
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if skip_special_tokens and token.special
        )
        # The last tokens of the settled text: decoders treat the first token of a text differently from others.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._held = ""
        self._num_settled = 0
        self._offsets: list[int] = []
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None: none did so far."""
        return self._stopped

    @property
    def offsets(self) -> Sequence[int]:
        """Where each added token's text begins, in characters of the text that stop strings have not cut.

        Tokens that make up a letter together have the same offset, the letter's. A token that was added after the end
        has none.
        """
        return self._offsets

    def add(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that may be shown now; after a stop string, they are ignored."""
        shown = ""
        for token_id in token_ids:
            if self._stopped is not None:
                break
            self._offsets.append(self._num_settled)
            token = self._tokenizer.id_to_token(token_id)
            # Neither leaves a trace in the text: special tokens, and ids of a padded vocabulary.
            if token is None or token_id in self._special_ids:
                continue
            self._pending.append(token_id)
            if not _BYTE_TOKEN.fullmatch(token):
                shown += self._show(self._settle())
        return shown

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self._stopped is not None:
            return ""
        rest = self._decode(self._context + self._pending)[len(self._context_text) :]
        shown = self._show(rest)
        if self._stopped is None:
            shown += self._held
        self._held, self._pending = "", []
        return shown

    def _settle(self) -> str:
        """The text of pending tokens that no later token can change; they become the context."""
        tokens = self._context + self._pending
        text = self._decode(tokens)
        last = len(tokens)
        if text.endswith(_REPLACEMENT):
            last = self._last_whole_letter(tokens, text)
            text = self._decode(tokens[:last])
        settled = text[len(self._context_text) :]
        self._pending = tokens[last:]
        # A lone token may decode to nothing at the beginning of a text, such as the space before a word; two do not.
        for first in (last - 1, last - 2, 0):
            if first >= 0 and (context_text := self._decode(tokens[first:last])):
                self._context, self._context_text = tokens[first:last], context_text
                break
        else:
            self._context, self._context_text = tokens[:last], ""
        self._num_settled += len(settled)
        return settled

    def _last_whole_letter(self, tokens: list[int], text: str) -> int:
        """How many of the tokens end with a whole letter, or with bytes that nothing can make one.

        Only the last bytes can be incomplete, and each token has one at least. Where two parts decode to the same as
        they do together, no letter reaches from one to the other.
        """
        for cut in range(len(tokens) - 1, max(len(self._context), len(tokens) - _LONGEST_LETTER), -1):
            if self._decode(tokens[:cut]) + self._decode(tokens[cut:]) == text:
                return cut
        return len(self._context)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))

    def _show(self, text: str) -> str:
        """What may be shown of the held text and this one; sets `stopped` at the first stop string."""
        text = self._held + text
        ends = [(begin + len(stop), begin, stop) for stop in self._stop if (begin := text.find(stop)) != -1]
        if ends:
            _, begin, self._stopped = min(ends)
            self._held, self._pending = "", []
            return text[:begin]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """What a token adds to a text that it continues: with its leading space, U+FFFD for bytes that are not a letter.

    For log probabilities, which name tokens by their text. Special tokens have their names; an id that the tokenizer
    does not have has "".
    """
    # Behind itself, a token is not the first of a text, whose leading space decoders drop.
    alone = str(tokenizer.decode([token_id], skip_special_tokens=False))
    return str(tokenizer.decode([token_id, token_id], skip_special_tokens=False))[len(alone) :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that a stop string begins with, without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
