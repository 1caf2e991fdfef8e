"""Text that can be shown, ends at stop strings, and positions of tokens."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from adaptrt import RequestError
from adaptrt.runtime.text_stream import TextStream, TokenText, prompt_offsets, token_text
from adaptrt.runtime.vocabulary import Vocabulary
from support.tokenizers import byte_level, metaspace

BYTE_LEVEL = byte_level()
METASPACE = metaspace()


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in found
    return found


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    stream = TextStream(Vocabulary(BYTE_LEVEL))
    assert [stream.add([token]) for token in ids(BYTE_LEVEL, "h", "â", "Ĥ", "¬", "Ġhello")] == [
        "h", "", "", "€", " hello",
    ]  # fmt: skip
    assert stream.finish() == ""


def test_an_incomplete_letter_ends_as_decoding_ends_it() -> None:
    stream = TextStream(Vocabulary(BYTE_LEVEL))
    assert stream.add(ids(BYTE_LEVEL, "h", "â", "Ĥ")) == "h"
    assert stream.finish() == "\ufffd"


def test_byte_tokens_wait_for_their_runs_end() -> None:
    """<0x20> alone is a space. With an invalid byte after it, it is two replacement characters."""
    stream = TextStream(Vocabulary(METASPACE))
    tokens = ids(METASPACE, "a", "<0x20>", "<0xFF>", "b")
    assert [stream.add([token]) for token in tokens] == ["a", "", "", "\ufffd\ufffdb"]
    stream = TextStream(Vocabulary(METASPACE))
    assert stream.add(ids(METASPACE, "a", "<0xE2>", "<0x82>", "<0xAC>")) == "a"
    assert stream.finish() == "€"


def test_a_replacement_character_of_the_vocabulary_does_not_hide_where_bytes_end() -> None:
    """The text ends as if bytes were missing, but the last token is a word; the run before it is invalid UTF-8."""
    tokens = ids(METASPACE, "<0x82>", "<0xE2>", "<0xAC>", "<0x9F>", "▁\ufffd", "\ufffd")
    stream = TextStream(Vocabulary(METASPACE))
    assert "".join(stream.add([token]) for token in tokens) + stream.finish() == METASPACE.decode(tokens)


def test_a_possible_start_of_a_stop_string_is_held_back() -> None:
    stream = TextStream(Vocabulary(BYTE_LEVEL), ["</x"])
    tokens = ids(BYTE_LEVEL, "a", "<", "/", "<", "/", "x")
    assert [stream.add([token]) for token in tokens] == ["a", "", "", "</", "", ""]
    assert stream.stopped == "</x"
    assert stream.add(ids(BYTE_LEVEL, "a")) == ""
    assert stream.finish() == ""
    stream = TextStream(Vocabulary(BYTE_LEVEL), ["</x"])
    assert stream.add(ids(BYTE_LEVEL, "a", "</")) == "a"
    assert stream.stopped is None
    assert stream.finish() == "</"


@pytest.mark.parametrize(
    ("stop", "shown", "stopped"),
    [
        (["ello", "lo"], "h", "ello"),  # both end at the same character: the longest one counts
        (["l", "hello"], "he", "l"),  # the one that ends first counts
        (["hello!", "x"], "hello", None),
    ],
)
def test_the_stop_string_that_ends_first_counts(stop: list[str], shown: str, stopped: str | None) -> None:
    for tokens in (["hello"], ["h", "e", "l", "l", "o"]):
        stream = TextStream(Vocabulary(BYTE_LEVEL), stop)
        assert stream.add(ids(BYTE_LEVEL, *tokens)) + stream.finish() == shown
        assert stream.stopped == stopped


def test_a_stop_string_in_the_last_bytes_is_found() -> None:
    stream = TextStream(Vocabulary(METASPACE), ["€"])
    assert stream.add(ids(METASPACE, "a", "<0xE2>", "<0x82>", "<0xAC>")) == "a"
    assert stream.finish() == ""
    assert stream.stopped == "€"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop has an empty string"):
        TextStream(Vocabulary(BYTE_LEVEL), ["a", ""])


def test_special_tokens_are_shown_on_request() -> None:
    tokens = ids(BYTE_LEVEL, "a", "<|im_end|>", "<tool_call>", "b")
    assert TextStream(Vocabulary(BYTE_LEVEL)).add(tokens) == "a<tool_call>b"
    assert TextStream(Vocabulary(BYTE_LEVEL), skip_special_tokens=False).add(tokens) == "a<|im_end|><tool_call>b"
    tokens = [*ids(BYTE_LEVEL, "<|im_start|>"), *tokens]
    stream = TextStream(Vocabulary(BYTE_LEVEL), ["<|im_start|>b"], shown_special=["<|im_end|>", "not there"])
    assert stream.add(tokens) == "a<|im_end|><tool_call>b"


def test_the_space_before_a_word_survives_a_special_token() -> None:
    """Decoders drop the space of a text's first token; a special token before it is not part of the text."""
    tokens = ids(METASPACE, "a", "<|im_end|>", "▁hello")
    stream = TextStream(Vocabulary(METASPACE))
    assert "".join(stream.add([token]) for token in tokens) == "a hello"


def test_offsets_are_those_of_the_letters_that_tokens_belong_to() -> None:
    stream = TextStream(Vocabulary(BYTE_LEVEL), ["never"])
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
    found = token_text(Vocabulary(tokenizer), tokenizer.token_to_id(token))
    assert found.text == text
    if "\ufffd" not in text:
        assert found.data == text.encode()


@pytest.mark.parametrize(
    ("tokenizer", "text", "data"),
    [
        (BYTE_LEVEL, "€", [b"\xe2", b"\x82", b"\xac"]),
        (METASPACE, "é", [b"\xc3", b"\xa9"]),
        (METASPACE, "\ufffd", ["\ufffd".encode()]),
        (BYTE_LEVEL, "\ufffd", [b"\xef", b"\xbf", b"\xbd"]),
    ],
)
def test_parts_of_letters_have_their_bytes(tokenizer: Tokenizer, text: str, data: list[bytes]) -> None:
    """Together they are the text. A token that is U+FFFD has bytes like any character."""
    tokens = tokenizer.encode(text, add_special_tokens=False).ids[-len(data) :]
    assert [token_text(Vocabulary(tokenizer), token).data for token in tokens] == data
    assert {token_text(Vocabulary(tokenizer), token).text for token in tokens} == {"\ufffd"}


def test_an_id_beyond_the_vocabulary_has_no_text() -> None:
    assert token_text(Vocabulary(BYTE_LEVEL), BYTE_LEVEL.get_vocab_size() + 7) == TokenText("", None)


def test_a_token_of_a_decoder_of_another_kind_has_its_texts_bytes() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "é": 1, "##é": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert token_text(Vocabulary(tokenizer), 1) == TokenText(" é", " é".encode())
    assert token_text(Vocabulary(tokenizer), 2) == TokenText("é", "é".encode())


def test_text_behind_broken_bytes_has_its_place() -> None:
    stream = TextStream(Vocabulary(BYTE_LEVEL))
    pieces = [stream.add([token]) for token in ids(BYTE_LEVEL, "é", "c", "d")]  # a single byte E9
    assert pieces == ["", "\ufffdc", "d"]
    assert list(stream.offsets) == [0, 1, 2]
    stream = TextStream(Vocabulary(METASPACE))
    stream.add(ids(METASPACE, "<0x41>", "<0xE2>", "<0x82>", "<0xAC>", "a"))
    assert list(stream.offsets) == [0, 1, 1, 1, 2]
    stream = TextStream(Vocabulary(METASPACE))
    stream.add(ids(METASPACE, "a", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "▁hello"))
    assert list(stream.offsets) == [0, 1, 2, 3, 4, 5]  # in an invalid run, each byte is a character


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE])
def test_a_real_replacement_character_is_shown_at_once(tokenizer: Tokenizer) -> None:
    """This holds after invalid bytes too, although the character looks like an incomplete one."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_tokens([AddedToken("x\ufffd", special=False)])
    real = tokenizer.get_vocab_size() - 1
    broken = tokenizer.token_to_id("é" if tokenizer.token_to_id("é") is not None else "<0xE9>")
    whole = tokenizer.decode([broken, real, real])
    stream = TextStream(Vocabulary(tokenizer))
    assert stream.add([broken]) == ""
    assert stream.add([real]) == tokenizer.decode([broken, real])
    assert stream.add([real]) == whole[len(tokenizer.decode([broken, real])) :]
    assert stream.finish() == ""


def streamed(tokenizer: Tokenizer, stop: list[str], *tokens: str) -> tuple[str, str | None]:
    """Returns text and stop string, equal token by token and at once."""
    found = ids(tokenizer, *tokens)
    stream = TextStream(Vocabulary(tokenizer), stop)
    text = "".join(stream.add([token]) for token in found) + stream.finish()
    at_once = TextStream(Vocabulary(tokenizer), stop)
    assert at_once.add(found) + at_once.finish() == text
    assert at_once.stopped == stream.stopped
    return text, stream.stopped


@pytest.mark.parametrize(
    ("stop", "tokens", "text", "stopped"),
    [
        (["<|im_end|>"], ["a", "<|im_end|>", "b"], "a", "<|im_end|>"),
        (["<|im_end|>"], ["a", "<|im_start|>", "b"], "ab", None),
        (["b<|im_end|>a"], ["a", "b", "<|im_end|>", "a", "x"], "a", "b<|im_end|>a"),
        (["b<|im_end|>a"], ["a", "b", "<|im_end|>", "b", "<|im_end|>", "a"], "ab", "b<|im_end|>a"),
        (["b<|im_end|>a"], ["a", "b", "<|im_end|>", "x"], "abx", None),
        (["<|im_start|><|im_end|>"], ["a", "<|im_start|>", "<|im_end|>"], "a", "<|im_start|><|im_end|>"),
        (["<|im_start|><|im_end|>"], ["a", "<|im_end|>", "<|im_start|>"], "a", None),
        # Shown text counts as well, with and without hidden tokens.
        (["ab", "<|im_end|>"], ["x", "a", "<|im_start|>", "b"], "x", "ab"),
        (["ab", "<|im_end|>b"], ["x", "a", "<|im_end|>", "b"], "x", "ab"),
        (["bc", "<|im_end|>b"], ["x", "a", "<|im_end|>", "b"], "xa", "<|im_end|>b"),
        (["ab", "<|im_end|>x"], ["x", "a", "<|im_end|>", "b"], "x", "ab"),
        (["|"], ["a", "<|im_end|>", "|", "b"], "a", "|"),
        (["im_end"], ["a", "<|im_end|>", "b"], "ab", None),
        # The longer of two names with a common beginning counts; a part of a name is text.
        (["<|im_end|>", "a"], ["x", "<|im_end|>"], "x", "<|im_end|>"),
    ],
)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE])
def test_a_stop_string_may_have_special_tokens(
    tokenizer: Tokenizer, stop: list[str], tokens: list[str], text: str, stopped: str | None
) -> None:
    assert streamed(tokenizer, stop, *tokens) == (text, stopped)


def test_a_special_token_ends_the_text_behind_parts_of_letters() -> None:
    assert streamed(BYTE_LEVEL, ["<|im_end|>"], "a", "â", "Ĥ", "<|im_end|>", "¬") == ("a\ufffd", "<|im_end|>")
    assert streamed(METASPACE, ["<|im_end|>"], "a", "<0x41>", "<|im_end|>", "<0x42>") == ("aA", "<|im_end|>")
    assert streamed(METASPACE, ["A<|im_end|>"], "a", "<0x41>", "<|im_end|>", "<0x42>") == ("a", "A<|im_end|>")
    # Without the stop string after it, the text continues; characters do not extend over the token.
    assert streamed(METASPACE, ["<|im_end|>!"], "a", "<0x41>", "<|im_end|>", "<0x42>", "▁hello") == ("aAB hello", None)
    assert streamed(METASPACE, ["<|im_end|>!"], "<|im_end|>", "<0x41>", "<|im_end|>", "▁hello") == ("A hello", None)


def test_special_tokens_that_are_shown_end_the_text_too() -> None:
    stream = TextStream(Vocabulary(BYTE_LEVEL), ["<|im_end|>"], skip_special_tokens=False)
    assert stream.add(ids(BYTE_LEVEL, "a", "<|im_start|>", "<|im_end|>")) == "a<|im_start|>"
    assert stream.stopped == "<|im_end|>"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE])
@pytest.mark.parametrize("with_bos", [False, True])
@pytest.mark.parametrize("text", ["abc", "a</s>bc", "</s>a", "a €hello hello.", " hello", "", "x<tool_call>€é"])
def test_tokens_of_a_prompt_point_into_its_text(tokenizer: Tokenizer, with_bos: bool, text: str) -> None:
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A <s>", pair="$A $B", special_tokens=[("<s>", 0)]
        )
    encoding = tokenizer.encode(text)
    offsets = prompt_offsets(Vocabulary(tokenizer), text, add_special_tokens=True)
    assert len(offsets) == len(encoding.ids)
    assert offsets == sorted(offsets)
    first, last = (1, -1) if with_bos else (0, len(offsets))
    if with_bos:
        assert (offsets[0], offsets[-1]) == (0, len(text))
    pieces = [text[begin:end] for begin, end in itertools.pairwise([*offsets[first:last], len(text)])]
    assert "".join(pieces) == text
    for token, begin in zip(encoding.ids[first:last], offsets[first:last], strict=True):
        shown = token_text(Vocabulary(tokenizer), token).text
        # Metaspace vocabularies add a space at the beginning of a text and after a special token.
        assert "\ufffd" in shown or text[begin:].startswith((shown, shown.removeprefix(" "))), (shown, begin)
    assert prompt_offsets(Vocabulary(tokenizer), text, add_special_tokens=False) == offsets[first:last]


def test_tokens_of_a_text_that_is_normalised_have_their_places() -> None:
    tokenizer = Tokenizer.from_str(BYTE_LEVEL.to_str())
    tokenizer.normalizer = normalizers.NFC()
    assert prompt_offsets(Vocabulary(tokenizer), "e\u0301ab", add_special_tokens=False) == [0, 0, 2, 3]
