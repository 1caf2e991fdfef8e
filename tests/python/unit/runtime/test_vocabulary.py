"""Facts about a tokenizer's tokens: read once and used by each answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from adaptrt.runtime.adapter_tokenizers import TextTokenizer
from adaptrt.runtime.text_bound import longest_token
from adaptrt.runtime.text_stream import TextStream, token_text
from adaptrt.runtime.vocabulary import Vocabulary
from support.tokenizers import SPECIAL, byte_level, metaspace


class Counting:
    """A tokenizer that counts uses of its attributes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.uses: Counter[str] = Counter()

    def __getattr__(self, attribute: str) -> Any:
        self.uses[attribute] += 1
        return getattr(self._tokenizer, attribute)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_answers_do_not_read_all_added_tokens_and_decoders_again(skip_special_tokens: bool) -> None:
    counting = Counting(byte_level())
    own = TextTokenizer(Vocabulary(counting), (), longest_token(counting))  # type: ignore[arg-type]
    tokens = counting.encode("h€llo<tool_call>").ids
    for _ in range(5):
        stream = TextStream(own.vocabulary, ["<s>"], skip_special_tokens=skip_special_tokens)
        assert stream.add(tokens) + stream.finish() == "h€llo<tool_call>"
        assert own.texts[tokens[0]].text == "h"
        assert token_text(own.vocabulary, tokens[0]).text == "h"
        assert own.vocabulary.special_id("<s>") is not None
    assert counting.uses["get_added_tokens_decoder"] == 1
    assert counting.uses["decoder"] == 1


def test_special_tokens_are_those_whose_flag_is_set() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<end>", special=True)])
    vocabulary = Vocabulary(tokenizer)
    names = [*SPECIAL, "<end>"]
    assert vocabulary.special == {tokenizer.token_to_id(name): name for name in names}
    assert vocabulary.special_id("<end>") == tokenizer.token_to_id("<end>")
    assert [vocabulary.special_id(name) for name in ("<think>", "h", "not there")] == [None] * 3


def test_any_word_is_no_special_token_and_no_part_of_a_letter() -> None:
    for tokenizer in (byte_level(), metaspace()):
        (word,) = Vocabulary(tokenizer).any_word
        assert tokenizer.decode([word]).strip()
        assert tokenizer.id_to_token(word) not in SPECIAL
        assert not Vocabulary(tokenizer).is_part(word)
    without = Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>"))
    without.add_special_tokens(["<s>"])
    assert Vocabulary(without).any_word == ()
