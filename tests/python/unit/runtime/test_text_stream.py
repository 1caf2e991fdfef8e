"""What of an answer may be shown when, where a stop string ends it, and which token a text came from."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from adaptrt import RequestError
from adaptrt.runtime.text_stream import TextStream, token_text
from support.tokenizers import byte_level, metaspace

BYTE_LEVEL = byte_level()
METASPACE = metaspace()


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in found
    return found


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    stream = TextStream(BYTE_LEVEL)
    assert [stream.add([token]) for token in ids(BYTE_LEVEL, "h", "â", "Ĥ", "¬", "Ġhello")] == [
        "h", "", "", "€", " hello",
    ]  # fmt: skip
    assert stream.finish() == ""


def test_an_incomplete_letter_ends_as_decoding_ends_it() -> None:
    stream = TextStream(BYTE_LEVEL)
    assert stream.add(ids(BYTE_LEVEL, "h", "â", "Ĥ")) == "h"
    assert stream.finish() == "\ufffd"


def test_byte_tokens_wait_for_their_runs_end() -> None:
    """<0x20> alone is a space, and two replacement characters with a byte behind it that is no UTF-8."""
    stream = TextStream(METASPACE)
    tokens = ids(METASPACE, "a", "<0x20>", "<0xFF>", "b")
    assert [stream.add([token]) for token in tokens] == ["a", "", "", "\ufffd\ufffdb"]
    stream = TextStream(METASPACE)
    assert stream.add(ids(METASPACE, "a", "<0xE2>", "<0x82>", "<0xAC>")) == "a"
    assert stream.finish() == "€"


def test_a_replacement_character_of_the_vocabulary_does_not_hide_where_bytes_end() -> None:
    """The text ends as if bytes were missing, but the last token is a word; the run before it is no UTF-8."""
    tokens = ids(METASPACE, "<0x82>", "<0xE2>", "<0xAC>", "<0x9F>", "▁\ufffd", "\ufffd")
    stream = TextStream(METASPACE)
    assert "".join(stream.add([token]) for token in tokens) + stream.finish() == METASPACE.decode(tokens)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(BYTE_LEVEL, ["</x"])
    tokens = ids(BYTE_LEVEL, "a", "<", "/", "<", "/", "x")
    assert [stream.add([token]) for token in tokens] == ["a", "", "", "</", "", ""]
    assert stream.stopped == "</x"
    assert stream.add(ids(BYTE_LEVEL, "a")) == ""
    assert stream.finish() == ""
    stream = TextStream(BYTE_LEVEL, ["</x"])
    assert stream.add(ids(BYTE_LEVEL, "a", "</")) == "a"
    assert stream.stopped is None
    assert stream.finish() == "</"


@pytest.mark.parametrize(
    ("stop", "shown", "stopped"),
    [
        (["ello", "lo"], "h", "ello"),  # both end at the same letter: the longest
        (["l", "hello"], "he", "l"),  # the one that ends first
        (["hello!", "x"], "hello", None),
    ],
)
def test_the_stop_string_that_ends_first_counts(stop: list[str], shown: str, stopped: str | None) -> None:
    for tokens in (["hello"], ["h", "e", "l", "l", "o"]):
        stream = TextStream(BYTE_LEVEL, stop)
        assert stream.add(ids(BYTE_LEVEL, *tokens)) + stream.finish() == shown
        assert stream.stopped == stopped


def test_a_stop_string_in_the_last_bytes_is_found() -> None:
    stream = TextStream(METASPACE, ["€"])
    assert stream.add(ids(METASPACE, "a", "<0xE2>", "<0x82>", "<0xAC>")) == "a"
    assert stream.finish() == ""
    assert stream.stopped == "€"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop has an empty string"):
        TextStream(BYTE_LEVEL, ["a", ""])


def test_special_tokens_are_shown_on_request() -> None:
    tokens = ids(BYTE_LEVEL, "a", "<|im_end|>", "<tool_call>", "b")
    assert TextStream(BYTE_LEVEL).add(tokens) == "a<tool_call>b"
    assert TextStream(BYTE_LEVEL, skip_special_tokens=False).add(tokens) == "a<|im_end|><tool_call>b"


def test_the_space_before_a_word_survives_a_special_token() -> None:
    """Decoders drop the space of a text's first token; a special token before it is not part of the text."""
    tokens = ids(METASPACE, "a", "<|im_end|>", "▁hello")
    stream = TextStream(METASPACE)
    assert "".join(stream.add([token]) for token in tokens) == "a hello"


def test_offsets_are_those_of_the_letters_that_tokens_belong_to() -> None:
    stream = TextStream(BYTE_LEVEL, ["never"])
    stream.add(ids(BYTE_LEVEL, "Ġhello", "n", "<|im_end|>", "â", "Ĥ", "¬", "x"))
    assert list(stream.offsets) == [0, 6, 7, 7, 7, 7, 8]


@pytest.mark.parametrize(
    ("tokenizer", "token", "text"),
    [
        (BYTE_LEVEL, "Ġhello", " hello"),
        (BYTE_LEVEL, "âĤ¬", "€"),
        (BYTE_LEVEL, "â", "\ufffd"),
        (BYTE_LEVEL, "<|im_end|>", "<|im_end|>"),
        (METASPACE, "▁hello", " hello"),
        (METASPACE, "▁", " "),
        (METASPACE, "<0x41>", "A"),
        (METASPACE, "<0xE2>", "\ufffd"),
    ],
)
def test_a_token_has_the_text_that_it_adds(tokenizer: Tokenizer, token: str, text: str) -> None:
    assert token_text(tokenizer, tokenizer.token_to_id(token)) == text


def test_an_id_beyond_the_vocabulary_has_no_text() -> None:
    assert token_text(BYTE_LEVEL, BYTE_LEVEL.get_vocab_size() + 7) == ""
