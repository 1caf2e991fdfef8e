"""Tokens to text, as they come: what may be shown of an answer now, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .stop_texts import StopTexts
from .token_bytes import REPLACEMENT, LetterCount
from .vocabulary import Vocabulary


class TextStream:
    """The text of one answer, decoded piece by piece.

    The pieces of add() and finish() together are tokenizer.decode() of all tokens, cut before the first stop string:
    the one that ends first, and the longest of those that end there. Text is held back while it may be the beginning
    of a stop string, or while tokens to come may still change it: an incomplete UTF-8 letter, and a run of
    byte-fallback tokens, which is decoded as a whole.

    A stop string may have the names of special tokens, which end the text where they come even if it leaves them out.

    Each step decodes a few tokens, however long the answer is. (tokenizers' DecodeStream is not used: it raises an
    error where a run of byte tokens turns out not to be UTF-8 after all.)
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        """Raises RequestError for an empty stop string."""
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._hidden: Mapping[int, str] = vocabulary.special if skip_special_tokens else {}
        self._stop = StopTexts(stop, self._hidden)
        # The last tokens of the settled text: decoders treat the first token of a text differently from others.
        self._context: list[int] = []
        self._context_text = ""
        # Tokens whose text is not settled, and their letters.
        self._pending: list[int] = []
        self._letters = LetterCount()
        # For those and for hidden tokens between them: the place in offsets, and the number of pending tokens before.
        self._places: list[tuple[int, int]] = []
        self._num_settled = 0
        self._offsets: list[int] = []

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None: none did so far."""
        return self._stop.stopped

    @property
    def offsets(self) -> Sequence[int]:
        """Where each added token's text begins, in characters of the text that stop strings have not cut.

        Tokens that make up a letter together have the same offset, the letter's. A token that was added after the end
        has none. Offsets within a run of byte-fallback tokens may change until the run has ended.
        """
        return self._offsets

    def add(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that may be shown now; after a stop string, they are ignored."""
        shown = ""
        for token_id in token_ids:
            if self.stopped is not None:
                break
            token = self._tokenizer.id_to_token(token_id)
            # Neither leaves a trace in the text: special tokens, and ids of a padded vocabulary.
            if token is None or token_id in self._hidden:
                if self._pending:
                    self._places.append((len(self._offsets), len(self._pending)))
                self._offsets.append(self._num_settled + self._letters.place)
                if mark := self._stop.mark(token_id):
                    # It may end the text: letters do not reach over it.
                    shown += self._stop.add(self._settle(is_cut=True) + mark)
                continue
            shown += self._add(token_id, token)
        return shown

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self.stopped is not None:
            return ""
        shown = self._stop.add(self._settle())
        return shown if self.stopped is not None else shown + self._stop.finish()

    def _add(self, token_id: int, token: str) -> str:
        """The text that may be shown after one more token that has some."""
        of_tokens = self._vocabulary.bytes
        is_byte = of_tokens.has_byte_tokens and of_tokens.is_byte(token)
        if not self._pending and not is_byte:
            tokens = [*self._context, token_id]
            text = self._decode(tokens)
            # Most tokens are whole letters.
            if not (of_tokens.is_byte_level and text.endswith(REPLACEMENT)):
                self._offsets.append(self._num_settled)
                return self._stop.add(self._settled(tokens, text))
        data = of_tokens.of(token) or b""
        continues = self._letters.is_continued_by(data)
        settled = ""
        if self._pending and not is_byte and not continues:
            settled = self._settle()
        self._places.append((len(self._offsets), len(self._pending)))
        self._offsets.append(self._num_settled + (self._letters.place if continues else self._letters.started))
        self._pending.append(token_id)
        self._letters.add(data)
        is_open = is_byte or (of_tokens.is_byte_level and self._letters.missing > 0)
        return self._stop.add(settled if is_open else settled + self._settle())

    def _settle(self, *, is_cut: bool = False) -> str:
        """The text of pending tokens, which become the context.

        is_cut: bytes of the next tokens do not continue theirs.
        """
        tokens = self._context + self._pending
        text = self._decode(tokens)
        if len(self._pending) > 1 and self._vocabulary.bytes.has_byte_tokens:
            self._correct_offsets(text[len(self._context_text) :])
        settled = self._settled(tokens, text)
        if is_cut:
            # Without the parts of letters, with which tokens to come would make others.
            whole = [token for token in tokens if not self._vocabulary.is_part(token)]
            self._keep_context(whole if whole or not self._num_settled else list(self._vocabulary.any_word))
        self._pending, self._letters, self._places = [], LetterCount(), []
        return settled

    def _settled(self, tokens: list[int], text: str) -> str:
        """Returns the text that more tokens add to the context's text; they become the context."""
        settled = text[len(self._context_text) :]
        self._num_settled += len(settled)
        self._keep_context(tokens)
        return settled

    def _keep_context(self, tokens: list[int]) -> None:
        last = len(tokens)
        # A lone token may decode to nothing at the beginning of a text, such as the space before a word; two do not.
        for first in (last - 1, last - 2, 0):
            if first >= 0 and (context_text := self._decode(tokens[first:last])):
                self._context, self._context_text = tokens[first:last], context_text
                return
        self._context, self._context_text = tokens, ""

    def _correct_offsets(self, settled: str) -> None:
        """Sets the offsets of a run of byte tokens, of which decoders make letters only if all of it is UTF-8."""
        of_tokens = self._vocabulary.bytes
        data = b"".join(of_tokens.of(str(self._tokenizer.id_to_token(token))) or b"" for token in self._pending)
        letters = LetterCount()
        starts = []
        for i in range(len(data)):
            letters.add(data[i : i + 1])
            starts.append(letters.started - 1)
        try:
            starts.append(len(data.decode()))
        except UnicodeDecodeError:
            starts = list(range(len(data) + 1))
        # Decoders drop a space at the beginning of a text.
        num_dropped = starts[-1] - len(settled)
        for place, num_before in self._places:
            self._offsets[place] = self._num_settled + max(starts[num_before] - num_dropped, 0)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))


@dataclass(frozen=True)
class TokenText:
    """Text that a token adds to a text before it."""

    text: str
    """With its leading space; U+FFFD for bytes that are not a letter; "" for an id that the tokenizer does not have."""
    data: bytes | None
    """Its bytes, which may be a part of a letter; None for an id that the tokenizer does not have."""


def token_text(vocabulary: Vocabulary, token_id: int) -> TokenText:
    """Returns the text that a token adds to a text before it.

    For log probabilities, which name tokens by their text. Special tokens have their names.
    """
    tokenizer = vocabulary.tokenizer
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return TokenText("", None)
    data = vocabulary.bytes.of(token)
    if data is not None:
        return TokenText(data.decode(errors="replace"), data)
    # Following itself, a token is not the first of a text, whose leading space decoders drop.
    alone = str(tokenizer.decode([token_id], skip_special_tokens=False))
    text = str(tokenizer.decode([token_id, token_id], skip_special_tokens=False))[len(alone) :]
    return TokenText(text, text.encode())


def prompt_offsets(vocabulary: Vocabulary, text: str, *, add_special_tokens: bool) -> list[int]:
    """Where each token of a prompt begins in its text, in characters.

    Tokens that are not in the text, because the tokenizer puts them around it, are where the next one is, or at the
    end.
    """
    # Unlike encode(), this lets other threads of Python run meanwhile.
    (encoding,) = vocabulary.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    own = [token for token, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True) if not is_added]
    stream = TextStream(vocabulary, skip_special_tokens=False)
    if stream.add(own) + stream.finish() == text:
        starts = iter(stream.offsets)
    else:
        # A normaliser changes the text. Its own places may leave out the space before a word.
        places = zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
        starts = iter([begin for (begin, _), is_added in places if not is_added])
    offsets = [None if is_added else next(starts) for is_added in encoding.special_tokens_mask]
    following = len(text)
    for i in range(len(offsets) - 1, -1, -1):
        if (own_offset := offsets[i]) is not None:
            following = own_offset
        offsets[i] = following
    return [offset for offset in offsets if offset is not None]
