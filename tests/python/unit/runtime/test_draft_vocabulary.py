"""A draft model must have the same tokens as its target model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from adaptrt import ConfigError
from adaptrt.runtime.draft_vocabulary import check_draft_vocabulary
from support.tokenizers import byte_level, save_tokenizer


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_tokenizer(byte_level(), tmp_path / "model")
    return tmp_path / "model" / "tokenizer.json"


def changed(target: Path, directory: Path, change: Any) -> Path:
    """Copies the tokenizer and changes its model's vocabulary."""
    content = json.loads(target.read_text())
    change(content["model"]["vocab"])
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory / "tokenizer.json"


def swap(vocab: dict[str, int]) -> None:
    first, second = (token for token, number in vocab.items() if number in (70, 71))
    vocab[first], vocab[second] = vocab[second], vocab[first]


def test_two_tokens_that_changed_places_are_refused(target: Path, tmp_path: Path) -> None:
    draft = changed(target, tmp_path / "draft", swap)
    names = {number: token for token, number in json.loads(target.read_text())["model"]["vocab"].items()}
    with pytest.raises(ConfigError) as error:
        check_draft_vocabulary(target, draft)
    assert str(error.value) == (
        f"{draft}: token 70 is {names[71]!r}; expected {names[70]!r}, as in {target}: "
        "a draft model needs the tokenizer of its model"
    )


def test_files_of_one_size_and_time_are_still_compared(target: Path, tmp_path: Path) -> None:
    target.write_text(json.dumps(json.loads(target.read_text())))
    draft = changed(target, tmp_path / "draft", swap)
    now = target.stat()
    os.utime(draft, ns=(now.st_atime_ns, now.st_mtime_ns))
    assert draft.stat().st_size == now.st_size
    with pytest.raises(ConfigError, match="token 70 is"):
        check_draft_vocabulary(target, draft)


def test_files_that_differ_only_in_their_spacing_are_alike(target: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    draft = tmp_path / "draft" / "tokenizer.json"
    draft.write_text(json.dumps(json.loads(target.read_text()), indent=1))
    assert draft.read_bytes() != target.read_bytes()
    check_draft_vocabulary(target, draft)


def test_tokens_that_one_model_lacks_may_pass(tmp_path: Path) -> None:
    files = []
    for words in (("a", "b"), ("a", "b", "c")):
        tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
        (tmp_path / str(len(words))).mkdir()
        files.append(tmp_path / str(len(words)) / "tokenizer.json")
        tokenizer.save(str(files[-1]))
    check_draft_vocabulary(files[0], files[1])
    check_draft_vocabulary(files[1], files[0])


def test_added_tokens_may_have_other_names(target: Path, tmp_path: Path) -> None:
    directories = []
    for name in ("<|reserved|>", "<|tool|>"):
        tokenizer = byte_level()
        tokenizer.add_special_tokens([AddedToken(name, special=True)])
        directories.append(tmp_path / name.strip("<|>"))
        directories[-1].mkdir()
        save_tokenizer(tokenizer, directories[-1])
    check_draft_vocabulary(directories[0] / "tokenizer.json", directories[1] / "tokenizer.json")


@pytest.mark.parametrize("missing", ["model", "draft"])
def test_a_model_without_a_tokenizer_is_not_compared(target: Path, tmp_path: Path, missing: str) -> None:
    draft = changed(target, tmp_path / "draft", swap)
    (target if missing == "model" else draft).unlink()
    check_draft_vocabulary(target, draft)
