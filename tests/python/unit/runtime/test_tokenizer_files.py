"""Tokens that only the files next to tokenizer.json have: the same results as in transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import adaptrt
from adaptrt.builder.conversion.convert import COPIED_FILES
from adaptrt.formats.adapter.adapter_copy import adapter_files
from adaptrt.runtime import tokenizer_files
from adaptrt.runtime.adapter_tokenizers import load_tokenizer, read_tokenizer
from adaptrt.runtime.guided_decoding import grammar_compiler_of
from adaptrt.runtime.tokenizer_files import TokenizerFiles
from support.tokenizers import byte_level, metaspace, save_tokenizer

SIZE = byte_level().get_vocab_size()
FIRST, SECOND, THIRD = SIZE, SIZE + 1, SIZE + 2


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
    return {"content": content, **plain, **flags}


CASES: dict[str, dict[str, Any]] = {
    "tokens by id": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(SECOND): token("<b>"), str(FIRST): token("<a>", special=True)}
        }
    },
    "flags": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                str(FIRST): token("<a>", lstrip=True),
                str(SECOND): token("<b>", rstrip=True, special=True),
                str(THIRD): token("word", single_word=True, normalized=True),
            }
        }
    },
    "other flags of a known token": {
        "tokenizer_config.json": {"added_tokens_decoder": {str(SIZE - 1): token("<tool_call>", special=True)}}
    },
    "a known token of the vocabulary": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(byte_level().token_to_id("hello")): token("hello", special=True)}
        }
    },
    "a token that a field names": {
        "tokenizer_config.json": {"added_tokens_decoder": {str(FIRST): token("<a>")}, "eos_token": "<a>"}
    },
    "tokens that only fields name": {
        "tokenizer_config.json": {
            "pad_token": "<pad>", "eos_token": "</s>", "image_token": "<image>", "add_bos_token": True, "bos": None,
        }
    },
    "extra tokens": {"tokenizer_config.json": {"extra_special_tokens": ["<b>", "<a>", "<tool_call>"]}},
    "extra tokens by name": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<a>", "b": "<b>"}}},
    "extra tokens by their older name": {"tokenizer_config.json": {"additional_special_tokens": ["<a>"]}},
    "both names": {
        "tokenizer_config.json": {"additional_special_tokens": ["<a>"], "extra_special_tokens": ["<b>"]}
    },
    "an object for a token": {
        "tokenizer_config.json": {"pad_token": {"__type": "AddedToken", **token("<pad>", lstrip=True)}}
    },
    "added_tokens.json": {
        "tokenizer_config.json": {"pad_token": "<b>"}, "added_tokens.json": {"<a>": FIRST, "<b>": SECOND},
    },
    "added_tokens.json and names of the model's own": {
        "tokenizer_config.json": {"image_token": "<a>", "eos_token": "<b>"},
        "added_tokens.json": {"<a>": FIRST, "<b>": SECOND},
    },
    "a token that two fields name": {
        "tokenizer_config.json": {
            "pad_token": {"__type": "AddedToken", **token("<a>", rstrip=True)}, "image_token": "<a>", "b_token": "<b>",
        }
    },
    "added_tokens.json alone": {"added_tokens.json": {"<b>": SECOND, "<a>": FIRST, "hello": 264}},
    "special_tokens_map.json": {
        "tokenizer_config.json": {"pad_token": "<pad>", "eos_token": "</s>"},
        "special_tokens_map.json": {
            "pad_token": token("<a>", rstrip=True), "sep_token": "<b>", "extra_special_tokens": ["<c>"],
        },
        "added_tokens.json": {"<a>": FIRST, "<c>": SECOND},
    },
    "two files with extra tokens": {
        "tokenizer_config.json": {"extra_special_tokens": ["<b>", "<a>"]},
        "special_tokens_map.json": {"extra_special_tokens": ["<a>", "<c>"]},
    },
    "two files with extra tokens by their older name": {
        "tokenizer_config.json": {"additional_special_tokens": ["<b>"]},
        "special_tokens_map.json": {"additional_special_tokens": ["<a>"]},
    },
    "tokens by id beside the older files": {
        "tokenizer_config.json": {"added_tokens_decoder": {str(FIRST): token("<a>")}},
        "special_tokens_map.json": {"pad_token": "<pad>"},
        "added_tokens.json": {"<b>": FIRST},
    },
    "nothing": {"tokenizer_config.json": {"extra_special_tokens": [], "eos_token": "</s>"}},
}  # fmt: skip
TEXTS = [
    "hello <a> hello<b>hello",
    "<pad><image>x <c> </s>",
    "a word wordy <tool_call> €<a><a> <b> ",
    "hellohello hello",
]


def write(directory: Path, tokenizer: Tokenizer, files: dict[str, Any]) -> Path:
    save_tokenizer(tokenizer, directory)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory / "tokenizer.json"


def of_metaspace(files: dict[str, Any]) -> dict[str, Any]:
    """Returns the files with ids that follow the other vocabulary."""
    text = json.dumps(files)
    for number in (THIRD, SECOND, FIRST):
        text = text.replace(str(number), str(number + metaspace().get_vocab_size() - SIZE))
    made: dict[str, Any] = json.loads(text)
    return made


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        *((byte_level, files) for files in CASES.values()),
        # Others have ids within the first vocabulary.
        *((metaspace, of_metaspace(files)) for name, files in CASES.items() if "known" not in name),
    ],
)
def test_tokens_are_those_of_transformers(kind: Any, files: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, kind(), files)
    config = files.get("tokenizer_config.json", {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend", **config}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(path)
    assert ours.get_vocab(with_added_tokens=True) == theirs.get_vocab()
    assert {number: str(token) for number, token in ours.get_added_tokens_decoder().items()} == {
        number: str(token) for number, token in theirs.added_tokens_decoder.items()
    }
    assert [repr(token) for token in ours.get_added_tokens_decoder().values()] == [
        repr(token) for token in theirs.added_tokens_decoder.values()
    ]
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, add_special_tokens=False).ids == ids
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_files_beside_a_tokenizer_of_another_name_are_not_its_own(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), {"added_tokens.json": {"<a>": FIRST}})
    (tmp_path / "other.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    assert load_tokenizer(tmp_path / "other.json").token_to_id("<a>") is None
    assert load_tokenizer(tmp_path / "tokenizer.json").token_to_id("<a>") == FIRST


@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"])
def test_a_file_beside_it_is_at_most_64_mebibytes(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, byte_level(), {})
    with (tmp_path / name).open("wb") as file:
        file.truncate((64 << 20) + 1)  # a sparse file
    with pytest.raises(adaptrt.ConfigError, match=rf"{name}.* 67108865"):
        load_tokenizer(path)


def test_the_digest_tells_tokenizers_apart_by_what_they_do(tmp_path: Path) -> None:
    def digest(tokenizer: Tokenizer, **config: Any) -> bytes:
        path = write(tmp_path, tokenizer, {"tokenizer_config.json": config})
        return read_tokenizer(path, ()).content

    plain = digest(byte_level(), chat_template="a")
    assert digest(byte_level(), chat_template="b", eos_token="</s>", added_tokens_decoder={}) == plain
    others = [
        digest(metaspace()),
        digest(byte_level(), pad_token="<a>"),
        digest(byte_level(), eos_token="<b>"),
        digest(byte_level(), added_tokens_decoder={str(FIRST): token("<a>")}),
        digest(byte_level(), added_tokens_decoder={str(FIRST): token("<a>", lstrip=True)}),
    ]
    assert len({plain, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder is .*; expected an object of"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": token("<a>")}}, 'has key "x"; expected a token\'s id'),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1" * 5000: token("<a>")}}, "expected a token's id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": "<a>"}}, r'added_tokens_decoder\[1\] is "<a>"; exp'),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": 3}}}, r"added_tokens_decoder\[1\] is"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {**token("a"), "x": True}}}, r"\[1\]\.x is true; exp"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {**token("a"), "special": 1}}}, r"special is 1; exp"),
        ("tokenizer_config.json", {"extra_special_tokens": "<a>"}, 'extra_special_tokens is "<a>"; expected a list'),
        ("tokenizer_config.json", {"extra_special_tokens": [3]}, r"extra_special_tokens\[0\] is 3; expected a token"),
        ("tokenizer_config.json", {"extra_special_tokens": {"a": 3}}, r"extra_special_tokens\.a is 3; expected a tok"),
        ("tokenizer_config.json", {"eos_token": 3}, "eos_token is 3; expected a token's text, or an object"),
        ("special_tokens_map.json", {"eos_token": []}, "eos_token is"),
        ("added_tokens.json", {"<a>": "3"}, 'token "<a>" has id "3"; expected 0 or more'),
        ("added_tokens.json", {"<a>": -1}, 'token "<a>" has id -1; expected 0 or more'),
        ("added_tokens.json", {"<a>": FIRST + 1}, f"'<a>' has id {FIRST + 1}; expected {FIRST}, which follows the"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": token("<a>")}}, f"'<a>' has id 9; expected {FIRST}"),
    ],
)
def test_unusable_tokenizer_files_are_named(name: str, content: Any, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, byte_level(), {name: content})
    with pytest.raises(adaptrt.ConfigError, match=said) as raised:
        load_tokenizer(path)
    assert name in str(raised.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_only_regular_files_are_opened(name: str, tmp_path: Path) -> None:
    """A FIFO would wait for a writer."""
    path = write(tmp_path, byte_level(), {})
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(adaptrt.ConfigError, match=f"{name}: cannot be read: it is a FIFO; expected a regular file"):
        read_tokenizer(path, ())


def test_without_a_tokenizer_the_error_says_how_to_make_one(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    said = rf"{path}: there is no tokenizer; .*AutoTokenizer\.from_pretrained\(MODEL\)\.save_pretrained\('{tmp_path}'"
    with pytest.raises(adaptrt.ConfigError, match=said):
        load_tokenizer(path)
    with pytest.raises(adaptrt.ConfigError, match=said):
        read_tokenizer(path, ())


def test_files_that_are_too_large_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, byte_level(), {"tokenizer_config.json": {}})
    monkeypatch.setattr(tokenizer_files, "_MAX_SIDE_FILE_BYTES", 1)
    with pytest.raises(adaptrt.ConfigError, match=r"tokenizer_config\.json: cannot be read: it has 2 bytes; expected"):
        load_tokenizer(path)
    monkeypatch.setattr(tokenizer_files, "_MAX_FILE_BYTES", 1)
    with pytest.raises(adaptrt.ConfigError, match=r"tokenizer\.json: cannot be read: it has"):
        load_tokenizer(path)


def test_the_files_go_along_with_models_and_adapters(tmp_path: Path) -> None:
    assert "added_tokens.json" in COPIED_FILES
    (tmp_path / "added_tokens.json").write_text("{}")
    assert "added_tokens.json" in adapter_files(tmp_path)


def test_guides_know_the_same_tokens_as_far_as_the_model_has_them(tmp_path: Path) -> None:
    """A padding token that only the files name lies beyond the model's vocabulary."""
    pytest.importorskip("llguidance")
    extra = {"tokenizer_config.json": {"added_tokens_decoder": {str(FIRST): token("<a>")}, "pad_token": "<pad>"}}
    path = write(tmp_path, byte_level(), extra)
    files = TokenizerFiles.read(path)
    assert files.make().tokenizer.token_to_id("<pad>") == SECOND
    assert files.make().without_id == {"<pad>"}
    assert files.make(SECOND).tokenizer.get_vocab_size() == SECOND
    assert files.make(SECOND).tokenizer.token_to_id("<a>") == FIRST
    assert files.make(3).tokenizer.get_vocab_size() == SIZE
    grammar_compiler_of(None, path, SECOND, [1])
    with pytest.raises(adaptrt.ConfigError, match=f"the tokenizer has token {SIZE - 1}; the engine's vocabulary is"):
        grammar_compiler_of(None, path, SIZE - 1, [1])
