"""Texts that are too long for a prompt are rejected before they are tokenised, or after a part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import adaptrt
from adaptrt.runtime.adapter_tokenizers import TextTokenizer, read_tokenizer
from adaptrt.runtime.text_bound import NORMALIZER_ROOM, TextTooLongError, longest_token
from adaptrt.runtime.vocabulary import Vocabulary
from support.tokenizers import byte_level, metaspace, save_tokenizer

LONGEST = "<|im_start|>"
MEGABYTE = 1 << 20


class Counting:
    """A tokenizer that counts the characters that it gets."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_characters = self.num_short = 0

    def encode(self, text: str, pair: str | None = None, **fields: Any) -> Any:
        self.num_short += 1
        self.num_characters += len(text) + len(pair or "")
        return self.tokenizer.encode(text, pair, **fields)

    def encode_batch_fast(self, texts: list[Any], **fields: Any) -> Any:
        self.num_characters += sum(len(part) for text in texts for part in ([text] if isinstance(text, str) else text))
        return self.tokenizer.encode_batch_fast(texts, **fields)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.tokenizer, attribute)


def counted(tokenizer: Tokenizer) -> tuple[Counting, TextTokenizer]:
    counting = Counting(tokenizer)
    return counting, TextTokenizer(Vocabulary(counting), (), longest_token(tokenizer))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a" * (8 * MEGABYTE), (" " * 4 * MEGABYTE, "b" * 4 * MEGABYTE)])
def test_nothing_is_tokenised_of_a_text_that_is_too_long(text: str | tuple[str, str]) -> None:
    counting, own = counted(byte_level())
    bound = 640 * len(LONGEST) * NORMALIZER_ROOM
    said = f"text_2 has {8 * MEGABYTE} characters; expected at most {bound}, as many as 640 tokens can have"
    with pytest.raises(TextTooLongError, match=said) as raised:
        own.encode(text, 640, "text_2")
    assert raised.value.field == "text_2"
    assert isinstance(raised.value, adaptrt.RequestError)
    assert counting.num_characters == 0


def test_the_bound_of_characters_is_exact() -> None:
    _, own = counted(byte_level())
    bound = 7 * len(LONGEST) * NORMALIZER_ROOM
    assert len(own.encode("a" * bound, 7, "prompt")) == bound
    with pytest.raises(TextTooLongError, match=f"prompt has {bound + 1} characters; expected at most {bound}"):
        own.encode("a" * (bound + 1), 7, "prompt")


def test_a_dense_text_is_tokenised_up_to_its_limit() -> None:
    """With few characters per token, the limit of characters passes, but the first pieces have too many tokens."""
    counting, own = counted(byte_level())
    text = "a" * (4 * MEGABYTE)
    with pytest.raises(TextTooLongError, match=f"{len(text)} characters, which are more than 100000 tokens"):
        own.encode(text, 100_000, "prompt")
    assert counting.num_characters < 2 * 100_000


@pytest.mark.parametrize("num_tokens", [1, 20_000, 100_000])
def test_a_text_of_as_many_tokens_as_a_prompt_may_have_is_accepted(num_tokens: int) -> None:
    """The longest token may repeat, so that pieces end within tokens."""
    _, own = counted(byte_level())
    encoding = own.encode(LONGEST * num_tokens, num_tokens, "prompt")
    assert encoding.ids == byte_level().encode(LONGEST).ids * num_tokens
    with pytest.raises(TextTooLongError):
        own.encode(LONGEST * num_tokens, num_tokens // NORMALIZER_ROOM // 2, "prompt")


def test_words_that_pieces_cut_count_once() -> None:
    """WordPiece has one token for a long word, and more tokens for its two halves."""
    words = {"[UNK]": 0, "a": 1, "##a": 2}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    _, own = counted(tokenizer)
    text = " ".join(["a" * 199] * 1000)
    assert len(own.encode(text, 10_000, "prompt")) == 1000
    assert len(own.encode(text, 10_000, "prompt", add_special_tokens=False)) == 1000


@pytest.mark.parametrize("letter", ["ΐ", "각", "ǖ"])
def test_letters_that_a_normaliser_composes_have_room(letter: str) -> None:
    """Each is one token of one character, but three characters in the text."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, letter: 1}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    own = TextTokenizer(Vocabulary(tokenizer), (), 1)
    decomposed = normalizers.NFD().normalize_str(letter)
    assert len(decomposed) == 3
    assert own.encode(decomposed * 50, 50, "prompt").ids == [1] * 50


def test_short_and_long_texts_have_the_same_tokens() -> None:
    for tokenizer in (byte_level(), metaspace()):
        own = TextTokenizer(Vocabulary(tokenizer), (), longest_token(tokenizer))
        for text in ("a hello €", "a hello €" * 4000):
            assert own.encode(text, 1 << 20, "prompt").ids == tokenizer.encode(text).ids
            pair = own.encode((text, "b"), 1 << 20, "prompt", add_special_tokens=False)
            assert pair.ids == tokenizer.encode(text, "b", add_special_tokens=False).ids


@pytest.mark.parametrize("second", [None, "b" * 1000])
def test_texts_of_up_to_16384_characters_are_short(second: str | None) -> None:
    """Longer ones are tokenised without the GIL, which takes longer for a short text."""
    counting, own = counted(byte_level())
    for num_characters, num_short in ((16384, 1), (16385, 1)):
        first = "a" * (num_characters - len(second or ""))
        own.encode(first if second is None else (first, second), MEGABYTE, "prompt")
        assert counting.num_short == num_short


def test_the_longest_token_may_be_an_added_one(tmp_path: Path) -> None:
    tokenizer = byte_level()
    assert longest_token(tokenizer) == len(LONGEST)
    tokenizer.add_tokens(["<|a_longer_token|>"])
    save_tokenizer(tokenizer, tmp_path)
    assert read_tokenizer(tmp_path / "tokenizer.json", ()).longest_token == len("<|a_longer_token|>")
    assert longest_token(Tokenizer(models.BPE())) == 1
