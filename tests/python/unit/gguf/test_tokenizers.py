"""Tokenizers from the metadata of GGUF files have the token ids and texts of the original ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from adaptrt import CheckpointError
from adaptrt.formats.gguf.metadata import Metadata
from adaptrt.formats.gguf.tokenizer import GgufTokenizer, read_tokenizer
from support.tokenizers import CORPUS

gguf_files = pytest.importorskip("support.gguf_files")

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
MARKED = ["<s>hello</s> world<|im_end|>", "x <s> y", "</s></s>"]


def read(keys: Mapping[str, Any], vocab_size: int = 4096) -> GgufTokenizer:
    """Reads a tokenizer from metadata as a file has it."""
    values = {
        key: np.array(value) if isinstance(value, list) and not isinstance(value[0], str) else value
        for key, value in keys.items()
    }
    metadata = Metadata({"general.architecture": "llama", **values}, "a.gguf")
    found = read_tokenizer(metadata, vocab_size)
    metadata.finish()
    assert found is not None
    return found


def loaded(found: GgufTokenizer) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(found.tokenizer))


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    content = json.loads(tokenizer.to_str())["model"]
    return content["vocab"], [tuple(pair) for pair in content["merges"]]


@pytest.mark.parametrize(("pre", "kind"), [("gpt-2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer")])
def test_byte_level_tokens_are_those_of_transformers(
    pre: str, kind: str, trained: tuple[dict[str, int], list[tuple[str, str]]]
) -> None:
    vocab, merges = trained
    original = getattr(transformers, kind)(
        vocab=dict(vocab), merges=list(merges), unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).backend_tokenizer
    original.add_special_tokens(SPECIAL)
    keys = gguf_files.tokenizer_keys(original, pre, bos_token_id=1, eos_token_id=2)
    found = loaded(read(keys))
    for text in [*CORPUS, *MARKED]:
        expected = original.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == expected, text
        assert found.decode(expected, skip_special_tokens=False) == original.decode(expected, skip_special_tokens=False)


def pieces(word_bytes: bool = True) -> tuple[list[str], list[int], list[float]]:
    """Tokens, kinds and scores of a SentencePiece vocabulary over the corpus, without some of its characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(
        [text.replace(" ", "▁") for text in CORPUS[:6] * 3], trainers.BpeTrainer(vocab_size=400, show_progress=False)
    )
    content = json.loads(tokenizer.to_str())["model"]
    made = sorted(content["vocab"], key=content["vocab"].__getitem__)
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *reversed(made)]
    kinds = [gguf_files.UNKNOWN, *[gguf_files.CONTROL] * 3, *[gguf_files.BYTE] * 256, *[gguf_files.NORMAL] * len(made)]
    scores = [0.0] * 260 + [-float(content["vocab"][piece]) for piece in reversed(made)]
    return [*tokens, "  ", "[PAD1]"], [*kinds, gguf_files.USER_DEFINED, gguf_files.UNUSED], [*scores, -1000.0, -1000.0]


def reference_ids(text: str, tokens: list[str], kinds: list[int], scores: list[float], *, prefix: bool) -> list[int]:
    """Tokens of a text without special tokens: SentencePiece merges the neighbours with the best score, leftmost
    first."""
    normal = {
        token: scores[number]
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == gguf_files.NORMAL
    }
    ids: list[int] = []
    parts = text.split("  ")
    for number, part in enumerate(parts):
        symbols = list((("▁" if prefix and part else "") + part).replace(" ", "▁"))
        while True:
            pairs = [
                (-normal[left + right], at)
                for at, (left, right) in enumerate(itertools.pairwise(symbols))
                if left + right in normal
            ]
            if not pairs:
                break
            at = min(pairs)[1]
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        for symbol in symbols:
            spelled = [symbol] if symbol in normal else [f"<0x{byte:02X}>" for byte in symbol.encode()]
            ids += map(tokens.index, spelled)
        if number + 1 < len(parts):
            ids.append(tokens.index("  "))
    return ids


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokens_are_those_of_its_algorithm(prefix: bool) -> None:
    tokens, kinds, scores = pieces()
    keys = gguf_files.sentencepiece_keys(tokens, kinds, scores, add_space_prefix=prefix)
    found = loaded(read(keys))
    for text in CORPUS:
        ids = reference_ids(text, tokens, kinds, scores, prefix=prefix)
        assert found.encode(text, add_special_tokens=False).ids == ids, text
        if "  " not in text:
            assert found.decode(ids) == text
    marked = found.encode("<s>hello</s>", add_special_tokens=False).ids
    assert marked[0] == 1
    assert marked[-1] == 2
    assert found.token_to_id("[PAD1]") is None


@pytest.mark.parametrize(
    ("stated", "ids"),
    [
        ({}, [1, 7]),
        ({"add_bos_token": False}, [7]),
        ({"add_eos_token": True}, [1, 7, 2]),
        ({"add_bos_token": False, "add_eos_token": True, "eos_token_id": 3}, [7, 3]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(stated: dict[str, Any], ids: list[int]) -> None:
    tokens = [*SPECIAL, "<0x00>", "▁", "a", "▁a"]
    kinds = [2, 3, 3, 3, 6, 1, 1, 1]
    keys = gguf_files.sentencepiece_keys(tokens, kinds, [0.0] * 8, **stated)
    assert loaded(read(keys)).encode("a").ids == ids


def test_special_tokens_and_ends_are_named() -> None:
    tokens = [*SPECIAL, "a"]
    keys = gguf_files.sentencepiece_keys(tokens, [2, 3, 3, 3, 1], [0.0] * 5, padding_token_id=0)
    found = read(keys)
    assert found.bos_id == 1
    assert found.end_ids == (2, 3)  # llama.cpp ends answers at <|im_end|> too
    assert found.pad_id == 0
    names = {name: found.config[name] for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    assert names == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}


def simple(**keys: Any) -> dict[str, Any]:
    tokens: list[str] = keys.pop("tokens", ["<s>", "a", "b", "ab"])
    own = {"tokens": tokens, "token_type": [3, 1, 1, 1], "merges": ["a b"], "model": "gpt2", "pre": "gpt-2", **keys}
    return {f"tokenizer.ggml.{name}": value for name, value in own.items() if value is not None}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": None}, "'tokenizer.ggml.pre' is missing, as in files of 2023; accepted: gpt-2"),
        ({"pre": "new"}, "'tokenizer.ggml.pre' is 'new', which is not known; accepted: gpt-2"),
        ({"model": "t5"}, "'tokenizer.ggml.model' is 't5'; expected one of gpt2, llama"),
        ({"model": None}, "'tokenizer.ggml.model' is needed; accepted: gpt2"),
        ({"merges": ["ab"]}, "'tokenizer.ggml.merges' has 'ab' at 0; expected two tokens and a space"),
        ({"merges": ["a c"]}, r"'tokenizer.ggml.merges' has \['a', 'c'\] at 0, but no token 'c'"),
        ({"tokens": ["<s>", "a", "a", "ab"]}, "'tokenizer.ggml.tokens' has 'a' twice, as 1 and 2; expected each once"),
        ({"tokens": ["<s>"] * 5000}, "'tokenizer.ggml.tokens' has 5000 tokens; expected 1 to 4096"),
        ({"token_type": [3, 1, 1]}, "'tokenizer.ggml.token_type' is no array of a kind from 1 to 6"),
        ({"token_type": [3, 1, 1, 9]}, "'tokenizer.ggml.token_type' is no array of a kind from 1 to 6"),
        ({"bos_token_id": 9}, "'tokenizer.ggml.bos_token_id' is 9, but there are 4 tokens"),
        ({"remove_extra_whitespaces": True}, "'tokenizer.ggml.remove_extra_whitespaces' is True; only False"),
        ({"model": "llama", "merges": None}, "'tokenizer.ggml.scores' has 0 scores; expected one per token"),
        ({"new_rule": 3}, "'tokenizer.ggml.new_rule' is 3: an unknown key"),
    ],
)
def test_unusual_tokenizers_are_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^a.gguf: .*{message}"):
        read(simple(**keys))


def test_a_tokenizer_that_nothing_is_wrong_with_is_read() -> None:
    assert loaded(read(simple(eos_token_id=2**32 - 1))).encode("ab").ids == [3]
