"""A TextStream's pieces together are the decoded text, cut at the first stop string."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from tokenizers import Tokenizer, decoders

from adaptrt.runtime.guided_decoding import token_bytes
from adaptrt.runtime.text_stream import TextStream
from adaptrt.runtime.token_bytes import LetterCount
from adaptrt.runtime.vocabulary import Vocabulary
from support.examples import examples
from support.tokenizers import byte_level, metaspace


def with_metaspace_decoder() -> Tokenizer:
    tokenizer = metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level(),
    "metaspace": metaspace(),
    "metaspace_decoder": with_metaspace_decoder(),
}


def reference(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Returns the text before the first stop string, searched character by character."""
    for end in range(len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@st.composite
def answers(draw: Any) -> tuple[str, list[int], list[int], list[str]]:
    """Draws a tokenizer, tokens that are often single bytes, split positions, and stop strings that are likely to
    occur."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    texts = st.text(st.sampled_from("hello .€😀\n</|é"), max_size=6).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )
    # Some ids exceed the vocabulary, because models' vocabularies are padded.
    tokens = st.lists(st.one_of(texts, st.lists(st.integers(0, size + 3), max_size=4)), max_size=8)
    ids = [token for part in draw(tokens) for token in part]
    splits = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    text = tokenizer.decode(ids)
    parts = st.builds(lambda begin, length: text[begin : begin + length], st.integers(0, 20), st.integers(1, 4))
    stop = draw(st.lists(st.one_of(parts, st.text("hello .€", min_size=1, max_size=3)).filter(bool), max_size=3))
    return name, ids, splits, stop


@settings(max_examples=examples(200, 2500), deadline=None)
@given(answers(), st.booleans())
@example(("metaspace", [0, 329, 4, 268, 242], [], []), False)  # no text, a word, a letter of bytes
def test_pieces_are_the_whole_text_up_to_a_stop_string(
    answer: tuple[str, list[int], list[int], list[str]], skip_special_tokens: bool
) -> None:
    name, ids, splits, stop = answer
    tokenizer = TOKENIZERS[name]
    stream = TextStream(Vocabulary(tokenizer), stop, skip_special_tokens=skip_special_tokens)
    pieces = [stream.add(ids[begin:end]) for begin, end in zip([0, *splits], [*splits, len(ids)], strict=True)]
    stopped_before_the_end = stream.stopped
    pieces.append(stream.finish())
    whole = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    text, stopped = reference(whole, stop)
    assert "".join(pieces) == text
    assert stream.stopped == stopped
    assert stopped_before_the_end in (None, stopped)
    assert stream.finish() == ""
    if stopped is None:
        assert len(stream.offsets) == len(ids)
    assert list(stream.offsets) == sorted(stream.offsets)
    assert all(offset <= len(whole) for offset in stream.offsets)


# Bytes of letters of each length, and of half a UTF-16 surrogate pair.
LETTER_BYTES = "a€😀é\ufffd\ud800".encode("utf-8", "surrogatepass")


def letter_starts(data: bytes) -> list[int]:
    """Returns, for each byte, the index of its letter; an incomplete letter counts as one."""
    starts: list[int] = []
    while data:
        try:
            data.decode()
            end, broken = len(data), 0
        except UnicodeDecodeError as error:
            end, broken = error.start, error.end - error.start
        for letter in data[:end].decode():
            starts += [1 + (starts[-1] if starts else -1)] * len(letter.encode())
        starts += [1 + (starts[-1] if starts else -1)] * broken
        data = data[end + broken :]
    return starts


def reference_offsets(name: str, ids: list[int], *, skip_special_tokens: bool) -> dict[int, int]:
    """Returns where each token's text starts: from the bytes before it, or from its place in a run of byte tokens."""
    tokenizer = TOKENIZERS[name]
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special and skip_special_tokens}
    shown = [(at, i) for at, i in enumerate(ids) if tokenizer.id_to_token(i) is not None and i not in special]
    of_token = token_bytes(tokenizer, 400)
    # The byte FF marks special tokens.
    data = [of_token[i] if len(of_token[i]) == 1 else of_token[i].removeprefix(b"\xff") for _, i in shown]

    def length(count: int) -> int:
        return len(tokenizer.decode([i for _, i in shown[:count]], skip_special_tokens=skip_special_tokens))

    if name == "byte_level":
        starts = letter_starts(b"".join(data))
        positions = itertools.accumulate(map(len, data), initial=0)
        return {at: starts[position] for (at, _), position in zip(shown, positions, strict=False)}
    is_byte = [name == "metaspace" and tokenizer.id_to_token(i).startswith("<0x") for _, i in shown]
    found = {}
    for is_run, group in itertools.groupby(range(len(shown)), key=is_byte.__getitem__):
        places = list(group)
        if not is_run:
            found |= {shown[place][0]: length(place) for place in places}
            continue
        first, run = length(places[0]), b"".join(data[place] for place in places)
        try:
            run.decode()
            starts = letter_starts(run)
        except UnicodeDecodeError:
            starts = list(range(len(run)))
        dropped = starts[-1] + 1 - (length(places[-1] + 1) - first)
        found |= {shown[place][0]: first + max(0, starts[i] - dropped) for i, place in enumerate(places)}
    return found


@settings(max_examples=examples(200, 2500), deadline=None)
@given(answers(), st.booleans())
def test_a_token_begins_where_the_text_before_it_ends(
    answer: tuple[str, list[int], list[int], list[str]], skip_special_tokens: bool
) -> None:
    name, ids, _, _ = answer
    stream = TextStream(Vocabulary(TOKENIZERS[name]), skip_special_tokens=skip_special_tokens)
    expected = reference_offsets(name, ids, skip_special_tokens=skip_special_tokens)
    for place, token_id in enumerate(ids):
        stream.add([token_id])
        if name == "byte_level" and place in expected:
            assert stream.offsets[-1] == expected[place]
    stream.finish()
    assert {place: stream.offsets[place] for place in expected} == expected


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=12) | st.lists(st.sampled_from(LETTER_BYTES)).map(bytes))
def test_letters_are_counted_as_decoders_write_them(data: bytes) -> None:
    letters = LetterCount()
    for i, start in enumerate(letter_starts(data)):
        continues = letters.is_continued_by(data[i:])
        assert (letters.place if continues else letters.started) == start
        letters.add(data[i : i + 1])
    assert letters.started == len(data.decode(errors="replace"))
    assert letters.missing == 0 or data.decode(errors="replace").endswith("\ufffd")
    byte_letters = TOKENIZERS["byte_level"].get_vocab()
    tokens = {of: i for i, of in enumerate(token_bytes(TOKENIZERS["byte_level"], 300)) if len(of) == 1}
    assert len(byte_letters) > len(tokens) == 256
    assert TOKENIZERS["byte_level"].decode([tokens[bytes([byte])] for byte in data]) == data.decode(errors="replace")


SPECIAL_WORDS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.lists(st.sampled_from(["a", "l", "hello", "<tool_call>", "<", *SPECIAL_WORDS]), max_size=12),
    st.lists(st.lists(st.sampled_from(["a", "l", "<", *SPECIAL_WORDS]), min_size=1, max_size=3).map("".join)),
)
def test_special_tokens_end_a_text_as_if_it_had_them(name: str, words: list[str], stop: list[str]) -> None:
    """Stop strings match in the text with the tokens that they name, and in the text without any special token."""
    tokenizer = TOKENIZERS[name]
    # A text after a word has the same spaces with and without special tokens.
    ids = [i for word in ["hello", *words] if (i := tokenizer.token_to_id(word)) is not None]
    stream = TextStream(Vocabulary(tokenizer), stop)
    found = "".join([*(stream.add([i]) for i in ids), stream.finish()])
    parts: list[str] = []
    for i in ids:
        of_token = tokenizer.decode([i], skip_special_tokens=False)
        parts += [of_token] if of_token in SPECIAL_WORDS else of_token
    assert (found, stream.stopped) == reference_with_names(parts, stop)


def reference_with_names(parts: list[str], stop: list[str]) -> tuple[str, str | None]:
    """Returns the letters before the first stop string. `parts` are letters and names of special tokens.

    Each stop string is searched in the letters, and in the letters with the special names that it contains.
    """
    ends = []
    for text in stop:
        for names in ([], [name for name in SPECIAL_WORDS if name in text]):
            kept = [(place, part) for place, part in enumerate(parts) if len(part) == 1 or part in names]
            for first, last in itertools.combinations_with_replacement(range(len(kept)), 2):
                if "".join(part for _, part in kept[first : last + 1]) == text:
                    ends.append((kept[last][0], kept[first][0], text))
    _, begin, stopped = min(ends, default=(0, len(parts), None))
    return "".join(part for part in parts[:begin] if len(part) == 1), stopped


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("garbage", [[0xFF], [0xE2], [0xE2, 0x82], [0x82], [0xF0, 0x9F, 0x98], [0x20]])
def test_a_long_run_of_broken_bytes_takes_a_few_decodings_each(
    name: str, garbage: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        one_byte = {token: token_id for token, token_id in tokenizer.get_vocab().items() if len(token) == 1}
        of_byte = {tokenizer.decode([token_id]): token_id for token_id in one_byte.values()}
        names = dict(zip((0xFF, 0xE2, 0x82, 0xF0, 0x9F, 0x98), "ÿâĤðŁĺ", strict=True))
        ids = [one_byte[names[byte]] if byte in names else of_byte[chr(byte)] for byte in garbage]
    else:
        ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in garbage]
    run = (ids * 400)[:400]
    decoded: list[int] = []

    class Counting:
        def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
            decoded.append(len(token_ids))
            return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

        def __getattr__(self, attribute: str) -> Any:
            return getattr(tokenizer, attribute)

    stream = TextStream(Vocabulary(Counting()))  # type: ignore[arg-type]
    text = "".join(stream.add([token_id]) for token_id in run) + stream.finish()
    assert text == tokenizer.decode(run)
    assert sum(decoded) < 60 * len(run)
