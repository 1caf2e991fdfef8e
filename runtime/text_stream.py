"""Converts tokens to text as they arrive: the text that can be shown now, and the end at a stop text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .stop_texts import StopTexts
from .token_bytes import REPLACEMENT, LetterCount
from .vocabulary import Vocabulary


class TextStream:
    """The text of one answer, decoded piece by piece.

    The results of add() and finish() joined equal tokenizer.decode() of all tokens, cut before the first stop string.
    The first one is the one that ends first; of several that end there, the longest. Text is held back while it may
    begin a stop string, and while later tokens may change it: an incomplete UTF-8 character, or a run of byte-fallback
    tokens, which is decoded as a whole.

    A stop string may contain names of special tokens. It then ends the text at these tokens even if the text leaves
    them out.

    Each step decodes only a few tokens, however long the answer is. (tokenizers' DecodeStream is not used: it raises an
    error if a run of byte tokens turns out not to be UTF-8.)
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        shown_special: Collection[str] = (),
        include_stop: bool = False,
    ) -> None:
        """shown_special: special tokens that are not skipped. include_stop: the text ends after the stop string, not
        before it.

        Raises RequestError for an empty stop string.
        """
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer
        self._hidden: Mapping[int, str] = vocabulary.special if skip_special_tokens else {}
        if self._hidden and shown_special:
            self._hidden = {number: name for number, name in self._hidden.items() if name not in shown_special}
        self._stop = StopTexts(stop, self._hidden, include_stop=include_stop)
        # Last tokens of the settled text. They are the context because decoders treat a text's first token differently.
        self._context: list[int] = []
        self._context_text = ""
        # Tokens whose text is not settled yet, and their characters.
        self._pending: list[int] = []
        self._letters = LetterCount()
        # For pending tokens and hidden tokens between them: index in offsets, and number of pending tokens before.
        self._places: list[tuple[int, int]] = []
        self._num_settled = 0
        self._offsets: list[int] = []

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None: none yet."""
        return self._stop.stopped

    @property
    def offsets(self) -> Sequence[int]:
        """Position of each added token's text, in characters of the text before stop strings cut it.

        Tokens that form a character together have the character's offset. A token that was added after the end has
        none. Offsets within a run of byte-fallback tokens may change until the run has ended.
        """
        return self._offsets

    def add(self, token_ids: Iterable[int]) -> str:
        """Adds tokens and returns the text that can be shown now. Ignores tokens after a stop string."""
        shown = ""
        for token_id in token_ids:
            if self.stopped is not None:
                break
            token = self._tokenizer.id_to_token(token_id)
            # Neither adds text: special tokens, and ids of a padded vocabulary.
            if token is None or token_id in self._hidden:
                if self._pending:
                    self._places.append((len(self._offsets), len(self._pending)))
                self._offsets.append(self._num_settled + self._letters.place)
                if mark := self._stop.mark(token_id):
                    # The token may end the text, so no character may extend over it.
                    shown += self._stop.add(self._settle(is_cut=True) + mark)
                continue
            shown += self._add(token_id, token)
        return shown

    def finish(self) -> str:
        """Returns the rest at the end of the tokens."""
        if self.stopped is not None:
            return ""
        shown = self._stop.add(self._settle())
        return shown if self.stopped is not None else shown + self._stop.finish()

    def _add(self, token_id: int, token: str) -> str:
        """Adds a token that has text. Returns the text that can be shown now."""
        of_tokens = self._vocabulary.bytes
        is_byte = of_tokens.has_byte_tokens and of_tokens.is_byte(token)
        if not self._pending and not is_byte:
            tokens = [*self._context, token_id]
            text = self._decode(tokens)
            # Most tokens are whole characters.
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
        """Settles the pending tokens and returns their text. They become the context.

        is_cut: bytes of later tokens do not continue theirs.
        """
        tokens = self._context + self._pending
        text = self._decode(tokens)
        if len(self._pending) > 1 and self._vocabulary.bytes.has_byte_tokens:
            self._correct_offsets(text[len(self._context_text) :])
        settled = self._settled(tokens, text)
        if is_cut:
            # Parts of characters are left out, because later tokens would complete them.
            whole = [token for token in tokens if not self._vocabulary.is_part(token)]
            self._keep_context(whole if whole or not self._num_settled else list(self._vocabulary.any_word))
        self._pending, self._letters, self._places = [], LetterCount(), []
        return settled

    def _settled(self, tokens: list[int], text: str) -> str:
        """Returns the text that `tokens` add to the context's text. They become the new context."""
        settled = text[len(self._context_text) :]
        self._num_settled += len(settled)
        self._keep_context(tokens)
        return settled

    def _keep_context(self, tokens: list[int]) -> None:
        last = len(tokens)
        # A single token may decode to nothing at the beginning of a text, for example the space before a word; two do
        # not.
        for first in (last - 1, last - 2, 0):
            if first >= 0 and (context_text := self._decode(tokens[first:last])):
                self._context, self._context_text = tokens[first:last], context_text
                return
        self._context, self._context_text = tokens, ""

    def _correct_offsets(self, settled: str) -> None:
        """Sets the offsets of a run of byte tokens. Decoders make characters of it only if the whole run is UTF-8."""
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
        # Special tokens that are skipped never come here.
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


@dataclass(frozen=True)
class TokenText:
    """The text that a token adds to a text before it."""

    text: str
    """Text with its leading space; U+FFFD for bytes that are no character; "" for an unknown id."""
    data: bytes | None
    """Bytes, which may be part of a character; None for an unknown id."""


def token_text(vocabulary: Vocabulary, token_id: int) -> TokenText:
    """Returns the text that a token adds to a text before it.

    For log probs, which name tokens by their text. Special tokens have their names.
    """
    tokenizer = vocabulary.tokenizer
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return TokenText("", None)
    data = vocabulary.bytes.of(token)
    if data is not None:
        return TokenText(data.decode(errors="replace"), data)
    # The token is decoded after itself, because decoders drop the leading space of a text's first token.
    alone = str(tokenizer.decode([token_id], skip_special_tokens=False))
    text = str(tokenizer.decode([token_id, token_id], skip_special_tokens=False))[len(alone) :]
    return TokenText(text, text.encode())


def prompt_offsets(vocabulary: Vocabulary, text: str, *, add_special_tokens: bool) -> list[int]:
    """Returns the position of each prompt token in its text, in characters.

    Tokens that the tokenizer adds around the text have the position of the next token, or of the end.
    """
    # Unlike encode(), this releases the GIL.
    (encoding,) = vocabulary.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    own = [token for token, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True) if not is_added]
    stream = TextStream(vocabulary, skip_special_tokens=False)
    if stream.add(own) + stream.finish() == text:
        starts = iter(stream.offsets)
    else:
        # A normaliser changes the text. The tokenizer's own positions may leave out the space before a word.
        places = zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
        starts = iter([begin for (begin, _), is_added in places if not is_added])
    offsets = [None if is_added else next(starts) for is_added in encoding.special_tokens_mask]
    following = len(text)
    for i in range(len(offsets) - 1, -1, -1):
        if (own_offset := offsets[i]) is not None:
            following = own_offset
        offsets[i] = following
    return [offset for offset in offsets if offset is not None]
