"""The tokens of a text on which engines are compared: the same for all engines, and none is cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import adaptrt
from adaptrt.runtime.text_quality import Quality, read_tokens
from adaptrt.tools.perplexity import _tokens_of
from support.tokenizers import byte_level, metaspace, save_tokenizer

TEXT = "hello hello"


@pytest.fixture
def engines(tmp_path: Path) -> list[Path]:
    (tmp_path / "text").write_text(TEXT)
    directories = [tmp_path / name for name in ("first", "second", "third")]
    for directory in directories:
        directory.mkdir()
        save_tokenizer(byte_level(), directory)
    return directories


def test_engines_with_one_tokenizer_are_compared(engines: list[Path], tmp_path: Path) -> None:
    (engines[1] / "tokenizer_config.json").write_text('{"chat_template": "a"}')
    assert _tokens_of(tmp_path / "text", engines) == byte_level().encode(TEXT).ids


def test_engines_with_other_tokenizers_are_refused_by_name(engines: list[Path], tmp_path: Path) -> None:
    save_tokenizer(metaspace(), engines[2])
    with pytest.raises(adaptrt.ConfigError, match=r"^\S*third/tokenizer\.json: differs from \S*first/tokenizer\.json"):
        _tokens_of(tmp_path / "text", engines)
    (engines[1] / "added_tokens.json").write_text(json.dumps({"hello hello": byte_level().get_vocab_size()}))
    with pytest.raises(adaptrt.ConfigError, match=r"second/tokenizer\.json, \S*third/tokenizer\.json: differs from"):
        _tokens_of(tmp_path / "text", engines)
    (tmp_path / "fourth").mkdir()
    with pytest.raises(adaptrt.ConfigError, match=r"there is no tokenizer: .*fourth"):
        _tokens_of(tmp_path / "text", [*engines, tmp_path / "fourth"])


@pytest.mark.parametrize("limit", [2, 3])
def test_the_last_token_of_the_part_that_is_read_is_whole(limit: int, tmp_path: Path) -> None:
    """The reader takes 16 characters per token, and the last word continues after them."""
    words = [letter * 15 for letter in "abcd"[: limit - 1]]
    last = "z" * 20
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", last, *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "text").write_text(" ".join([*words, last, *words * 10]))
    ids = read_tokens(tmp_path / "text", tmp_path / "tokenizer.json", limit)
    assert ids == [*range(2, limit + 1), 1]


def test_changes_of_log_probs_are_those_of_the_texts_tokens() -> None:
    reference = np.log([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    changed = np.log([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]])
    quality = Quality()
    quality.add(changed, np.array([0, 2]), reference)
    assert quality.log_prob_change == pytest.approx(np.log(2) + np.log(0.8 / 0.6))
    assert quality.worst_log_prob_change == pytest.approx(np.log(2))
    quality.add(reference, np.array([1, 1]), reference)
    assert quality.worst_log_prob_change == pytest.approx(np.log(2))
    assert quality.tokens == 4
