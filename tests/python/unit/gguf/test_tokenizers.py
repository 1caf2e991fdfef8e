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
from support.tokenizers import CORPUS, roberta, unigram, word_piece

gguf_files = pytest.importorskip("support.gguf_files")

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
MARKED = ["<s>hello</s> world<|im_end|>", "x <s> y", "</s></s>"]


def read(keys: Mapping[str, Any], vocab_size: int = 4096) -> GgufTokenizer:
    """Reads a tokenizer from metadata as a file has it."""
    values = {
        key: np.frombuffer(value, np.uint8)
        if isinstance(value, bytes)
        else np.array(value)
        if isinstance(value, list) and not isinstance(value[0], str)
        else value
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
        ({"model": "rwkv"}, "'tokenizer.ggml.model' is 'rwkv'; expected one of gpt2, llama, bert, t5"),
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


PAIRS = [("Hello world", "the cat's 12345"), ("", "x"), ("Zwölf é", "你好")]


def assert_same_tokens(found: Tokenizer, original: Tokenizer, texts: list[str] = CORPUS) -> None:
    """Compares the tokens and types of texts and pairs, with the tokens around them."""
    for given in [*texts, *PAIRS]:
        ids = given if isinstance(given, tuple) else (given,)
        expected, same = original.encode(*ids), found.encode(*ids)
        assert (same.ids, same.type_ids) == (expected.ids, expected.type_ids), given
        for skips in (True, False):
            decoded = [one.decode(expected.ids, skip_special_tokens=skips) for one in (found, original)]
            assert decoded[0] == decoded[1]


@pytest.mark.parametrize(
    ("normalizer", "stated"),
    [
        ({}, {"normalizer.lowercase": True}),
        ({}, {}),
        ({"lowercase": False}, {}),
        ({"lowercase": False, "strip_accents": True}, {"normalizer.strip_accents": True}),
        ({"lowercase": True, "strip_accents": False},
         {"normalizer.lowercase": True, "normalizer.strip_accents": False}),
    ],
)  # fmt: skip
def test_word_pieces_are_those_of_the_original(normalizer: dict[str, bool], stated: dict[str, bool]) -> None:
    original = word_piece(**normalizer)
    found = read(gguf_files.word_piece_keys(original, **stated))
    assert_same_tokens(loaded(found), original, [*CORPUS, "ÉCOLE Straße", "[CLS] a[MASK]b [unused1]", "w" * 101])
    assert (found.bos_id, found.pad_id) == (original.token_to_id("[CLS]"), original.token_to_id("[PAD]"))


def test_word_pieces_of_old_files_are_read() -> None:
    """They have no kinds and no flags, their ids are BERT's, and tokens in brackets have no mark."""
    vocabulary = [*(f"[unused{number}]" for number in range(100)), "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"]
    vocabulary[0] = "[PAD]"
    tokens = [
        text if text.startswith("[") else text.removeprefix("##") if "##" in text else f"▁{text}" for text in vocabulary
    ]
    for flags in ({}, {f"tokenizer.ggml.add_{name}_token": False for name in ("bos", "eos", "sep")}):
        found = loaded(read({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens, **flags}))
        assert found.encode("A ab abb c").ids == [101, 104, 104, 105, 104, 105, 105, 100, 102]
        assert found.get_vocab() == {text: number for number, text in enumerate(vocabulary)}


def test_special_word_pieces_keep_their_texts() -> None:
    keys = {
        "model": "bert", "tokens": ["<u>", "<c>", "[b]", "<s>", "▁a", "b"], "token_type": [3, 3, 3, 3, 1, 1],
        "unknown_token_id": 0, "cls_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3,
    }  # fmt: skip
    found = loaded(read({f"tokenizer.ggml.{name}": value for name, value in keys.items()}))
    assert found.encode("ab c <s>").tokens == ["<c>", "a", "##b", "<u>", "<s>", "<s>"]


WIDE_A, WIDE_B = "\uff21", "\uff22"


def charsmap() -> bytes:
    """SentencePiece's table of characters with one rule: a fullwidth A becomes an A."""
    units = np.zeros(1024, "<u4")
    units[0] = 0x100 << 10
    place, label_bases = 0x100, zip(WIDE_A.encode(), (0x200, 0x300, 0x80), strict=True)
    for label, base in label_bases:
        place ^= label
        has_leaf = (base == 0x80) << 8
        units[place] = (place ^ base) << 10 | has_leaf | label
        place = base
    units[place] = 1 << 31  # the place of the replacement
    table = units.tobytes()
    return len(table).to_bytes(4, "little") + table + b"A\0"


def test_unigrams_are_those_of_the_original() -> None:
    original = unigram(charsmap())
    texts = [*CORPUS, f"{WIDE_A}{WIDE_B} {WIDE_A}Hello", "<s> a</s>", " a\tb \n"]
    keys = gguf_files.unigram_keys(original, precompiled_charsmap=charsmap())
    assert loaded(read(keys)).normalizer.normalize_str(WIDE_A + WIDE_B) == f"A{WIDE_B}"
    assert_same_tokens(loaded(read(keys)), original, texts)
    # Places without a token have no effect: the converter's list ends with some, and <mask> is one of them.
    size = len(keys["tokenizer.ggml.tokens"])
    for name, more in (("tokens", ["[PAD300]", "x y z", "[PAD302]"]), ("scores", [-1e4, -2.0, -1e4]),
                       ("token_type", [gguf_files.UNUSED, gguf_files.NORMAL, gguf_files.UNUSED])):  # fmt: skip
        keys[f"tokenizer.ggml.{name}"] = [*keys[f"tokenizer.ggml.{name}"], *more]
    longer = loaded(read({**keys, "tokenizer.ggml.mask_token_id": size + 2}))
    assert_same_tokens(longer, original, [*texts, "[PAD300] [PAD302]"])
    assert longer.get_vocab_size() == size + 2


@pytest.mark.parametrize("stated", [True, False, None])
def test_spaces_of_unigrams_are_those_of_xlm_roberta(stated: bool | None) -> None:
    """Whatever the file says, as converters write another field there."""
    original = unigram()
    keys = gguf_files.unigram_keys(original, remove_extra_whitespaces=stated)
    keys = {name: value for name, value in keys.items() if value is not None}
    assert_same_tokens(loaded(read(keys)), original, ["  a  b ", "a\t\n b"])
    found = loaded(read({**keys, "tokenizer.ggml.add_space_prefix": False}))
    assert found.encode("a b", add_special_tokens=False).tokens[0] == "a"


def test_robertas_tokens_are_those_of_the_original() -> None:
    original = roberta()
    ids = {name: original.token_to_id(text) for name, text in (
        ("bos_token_id", "<s>"), ("eos_token_id", "</s>"), ("seperator_token_id", "</s>"))}  # fmt: skip
    adds = {f"add_{name}_token": True for name in ("bos", "eos", "sep")}
    assert_same_tokens(loaded(read(gguf_files.tokenizer_keys(original, "roberta-bpe", **ids, **adds))), original)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"unknown_token_id": None}, "'tokenizer.ggml.unknown_token_id' is missing; expected the token of unknown"),
        ({"cls_token_id": 9000}, "'tokenizer.ggml.cls_token_id' is 9000, but there are 4 tokens"),
        ({"bos_token_id": None}, "'tokenizer.ggml.cls_token_id' is missing; expected a token"),
        ({"seperator_token_id": None}, "'tokenizer.ggml.seperator_token_id' is missing; expected a token"),
        ({"normalizer.lowercase": 1}, "'tokenizer.ggml.normalizer.lowercase' is 1; expected a boolean"),
        ({"normalizer.nfc": True}, "'tokenizer.ggml.normalizer.nfc' is True: an unknown key"),
        ({"tokens": ["[UNK]", "[CLS]", "[SEP]", "▁[SEP]"]}, r"has '\[SEP\]' twice, as 2 and 3; expected each once"),
    ],
)
def test_unusual_word_pieces_are_refused_by_name(keys: dict[str, Any], message: str) -> None:
    own = {
        "tokens": ["[UNK]", "[CLS]", "[SEP]", "▁a"],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "seperator_token_id": 2,
    }
    small = {
        f"tokenizer.ggml.{name}": value for name, value in {**own, **keys, "model": "bert"}.items() if value is not None
    }
    with pytest.raises(CheckpointError, match=f"^a.gguf: .*{message}"):
        read(small)
    assert loaded(read({f"tokenizer.ggml.{name}": value for name, value in {**own, "model": "bert"}.items()}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scores": [-1.0]}, "'tokenizer.ggml.scores' has 1 scores; expected one per token"),
        (
            {"tokens": ["<s>", "a"], "token_type": [3, 1], "unknown_token_id": -1},
            "'tokenizer.ggml.unknown_token_id' is missing",
        ),
        ({"precompiled_charsmap": b"abc"}, "'tokenizer.ggml.precompiled_charsmap' has 3 bytes; expected those of"),
        ({"precompiled_charsmap": b"\x08\0\0\0abcd"}, "'tokenizer.ggml.precompiled_charsmap' has 8 bytes; expected"),
        ({"precompiled_charsmap": b"\x03\0\0\0abcd"}, "'tokenizer.ggml.precompiled_charsmap' has 8 bytes; expected"),
        ({"precompiled_charsmap": [2.0, 3.0]}, "'tokenizer.ggml.precompiled_charsmap' has 16 bytes; expected"),
        ({"precompiled_charsmap": "abc"}, "'tokenizer.ggml.precompiled_charsmap' is 'abc'; expected an array"),
    ],
)
def test_unusual_unigrams_are_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^a.gguf: .*{message}"):
        read(gguf_files.unigram_keys(unigram(), **keys))
