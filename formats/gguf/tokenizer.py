"""The tokenizer of a GGUF file as Hugging Face's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np

from ...common.shown_value import shown
from .metadata import Metadata
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_PREFIX: Final = "tokenizer.ggml."
_BPE: Final = "gpt2"
_SENTENCEPIECE: Final = "llama"
_SPACE: Final = "▁"
_PADDING: Final = re.compile(r"\[PAD\d+\]")
_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")
_LONGEST_PIECE: Final = 512
"""Maximum length of a piece that is made by merges; a longer one would take quadratic time."""
_ENDS: Final = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<EOT>",
        "_<EOT>",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_utterance>",
    }
)
"""Control tokens that end an answer, also if the file does not name them: llama.cpp knows them by their texts."""
_OTHER_TOKENS: Final = (
    "seperator",
    "mask",
    "cls",
    "eot",
    "eom",
    "prefix",
    "suffix",
    "middle",
    "fim_pre",
    "fim_suf",
    "fim_mid",
    "fim_pad",
    "fim_rep",
    "fim_sep",
    "fsep",
)
"""Special tokens that a file may name, in addition to bos, eos, unknown and padding. Prompts use most of them by their
texts."""


class _Kind(IntEnum):
    """Kinds of tokens in tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer, and the ids of its special tokens."""

    tokenizer: dict[str, Any]
    """Content of tokenizer.json."""
    config: dict[str, Any]
    """Content of tokenizer_config.json."""
    bos_id: int | None
    end_ids: tuple[int, ...]
    """Ids that end an answer, that of the eos token first."""
    pad_id: int | None


def read_tokenizer(metadata: Metadata, vocab_size: int) -> GgufTokenizer | None:
    """Reads the tokenizer; None if the file has none. Problems are noted in `metadata`."""
    model = metadata.text(f"{_PREFIX}model", choices=(_BPE, _SENTENCEPIECE, "none", "no_vocab"))
    if model in (None, "none", "no_vocab"):
        if model is None:
            metadata.problem(
                f"{_PREFIX}model", f"is needed; accepted: {_BPE} (BPE) and {_SENTENCEPIECE} (SentencePiece)"
            )
        return None
    tokens = _Tokens.read(metadata, vocab_size)
    ids = _read_ids(metadata, len(tokens.texts), has_defaults=model == _SENTENCEPIECE)
    metadata.ignore([f"{_PREFIX}token_type_count", "tokenizer.huggingface.json", f"{_PREFIX}normalizer.lowercase"])
    if model == _BPE:
        pre = _pre_tokenizer(metadata)
        parts = _byte_level_parts(metadata, tokens, pre)
        adds_bos = metadata.boolean(f"{_PREFIX}add_bos_token", pre.adds_bos)
        metadata.expect(f"{_PREFIX}add_space_prefix", [False])
        metadata.ignore([f"{_PREFIX}scores"])
    else:
        parts = _sentencepiece_parts(metadata, tokens, ids.get("unknown"))
        adds_bos = metadata.boolean(f"{_PREFIX}add_bos_token", True)
        metadata.text(f"{_PREFIX}pre")
    metadata.expect(f"{_PREFIX}remove_extra_whitespaces", [False])
    metadata.expect(f"{_PREFIX}add_sep_token", [False])
    adds_eos = metadata.boolean(f"{_PREFIX}add_eos_token", False)
    begin = [ids["bos"]] if adds_bos and "bos" in ids else []
    end = [ids["eos"]] if adds_eos and "eos" in ids else []
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens.added(),
        **parts,
        "post_processor": _template(tokens, begin, end),
    }
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{field: tokens.texts[ids[name]] for field, name in named.items() if name in ids},
    }
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    ends += [number for number in tokens.of_kind(_Kind.CONTROL) if tokens.texts[number] in _ENDS]
    return GgufTokenizer(content, config, ids.get("bos"), tuple(dict.fromkeys(ends)), ids.get("padding"))


@dataclass(frozen=True)
class _Tokens:
    """Texts and kinds of the tokens."""

    texts: Sequence[str]
    kinds: Sequence[int]

    @classmethod
    def read(cls, metadata: Metadata, vocab_size: int) -> _Tokens:
        texts = metadata.texts(f"{_PREFIX}tokens")
        given = metadata.numbers(f"{_PREFIX}token_type")
        kinds = [int(_Kind.NORMAL)] * len(texts) if given is None else [int(kind) for kind in given.tolist()]
        if len(kinds) != len(texts) or not set(kinds) <= set(_Kind):
            metadata.problem(f"{_PREFIX}token_type", "is no array of a kind from 1 to 6 for each token; expected one")
            kinds = [int(_Kind.NORMAL)] * len(texts)
        tokens = cls(texts, kinds)
        size = len(texts)
        # Converters of Gemma 3 shorten the embedding, but not the list of tokens.
        while size > vocab_size and not tokens.is_known(size - 1):
            size -= 1
        tokens = cls(texts[:size], kinds[:size])
        if not 1 <= size <= vocab_size:
            metadata.problem(f"{_PREFIX}tokens", f"has {size} tokens; expected 1 to {vocab_size}, the vocabulary's")
        first: dict[str, int] = {}
        for number, text in enumerate(tokens.texts):
            if first.setdefault(text, number) != number and tokens.is_known(number):
                metadata.problem(
                    f"{_PREFIX}tokens", f"has {shown(text)} twice, as {first[text]} and {number}; expected each once"
                )
                break
        return tokens

    def is_known(self, number: int) -> bool:
        """False for places in the vocabulary that no token has."""
        return self.kinds[number] != int(_Kind.UNUSED) or not _PADDING.fullmatch(self.texts[number])

    def of_kind(self, *kinds: _Kind) -> list[int]:
        wanted = set(map(int, kinds))
        return [number for number, kind in enumerate(self.kinds) if kind in wanted]

    def vocabulary(self) -> dict[str, int]:
        """Ids by the texts of the tokens."""
        vocabulary = {text: number for number, text in enumerate(self.texts)}
        for number in self.of_kind(_Kind.UNUSED):
            if not self.is_known(number) and vocabulary.get(self.texts[number]) == number:
                del vocabulary[self.texts[number]]
        return vocabulary

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before it is split, as tokenizer.json lists them."""
        numbers = self.of_kind(_Kind.UNKNOWN, _Kind.CONTROL, _Kind.USER_DEFINED)
        common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": number, "content": self.texts[number], **common,
             "special": self.kinds[number] != _Kind.USER_DEFINED}
            for number in numbers if self.texts[number]
        ]  # fmt: skip


def _read_ids(metadata: Metadata, count: int, *, has_defaults: bool) -> dict[str, int]:
    """Ids of special tokens, by the names of their keys."""
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if has_defaults else {}
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "unknown", "padding", *_OTHER_TOKENS):
        key = f"{_PREFIX}{name}_token_id"
        stated = metadata.raw(key)
        # Converters write -1 or 2^32 - 1 for a token that a tokenizer does not have.
        number = defaults.get(name) if stated is None or stated in (-1, 2**32 - 1) else metadata.integer(key, minimum=0)
        if number is None:
            continue
        if number < count:
            ids[name] = number
        elif stated is not None:
            metadata.problem(key, f"is {number}, but there are {count} tokens")
    return ids


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    key = f"{_PREFIX}pre"
    name = metadata.text(key)
    found = None if name is None else PRE_TOKENIZERS.get(name)
    if found is None:
        stated = "is missing, as in files of 2023" if name is None else f"is {shown(name)}, which is not known"
        metadata.problem(
            key,
            f"{stated}; accepted: {', '.join(PRE_TOKENIZERS)}. Convert the model again with a newer llama.cpp, or take "
            "the model that the file was made from",
        )
        return next(iter(PRE_TOKENIZERS.values()))
    return found


def _byte_level_parts(metadata: Metadata, tokens: _Tokens, pre: PreTokenizer) -> dict[str, Any]:
    merges = []
    for number, merge in enumerate(metadata.texts(f"{_PREFIX}merges")):
        space = merge.find(" ", 1)
        if space < 0:
            metadata.problem(f"{_PREFIX}merges", f"has {shown(merge)} at {number}; expected two tokens and a space")
            break
        merges.append([merge[:space], merge[space + 1 :]])
    vocabulary = tokens.vocabulary()
    _check_merges(metadata, vocabulary, merges)
    return {
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**_bpe(vocabulary, merges), "ignore_merges": pre.ignore_merges},
    }


def _sentencepiece_parts(metadata: Metadata, tokens: _Tokens, unknown: int | None) -> dict[str, Any]:
    vocabulary = tokens.vocabulary()
    scores = metadata.numbers(f"{_PREFIX}scores")
    stated = metadata.texts(f"{_PREFIX}merges")
    if stated:
        merges = [list(merge.split(" ", 1)) for merge in stated if " " in merge]
    elif scores is None or len(scores) != len(tokens.texts):
        metadata.problem(
            f"{_PREFIX}scores", f"has {0 if scores is None else len(scores)} scores; expected one per token"
        )
        merges = []
    else:
        merges = list(_merges_of_scores(tokens, scores))
    _check_merges(metadata, vocabulary, merges)
    prepended = metadata.boolean(f"{_PREFIX}add_space_prefix", True)
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prepended else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepended else []
    has_bytes = sum(_BYTE.fullmatch(tokens.texts[number]) is not None for number in tokens.of_kind(_Kind.BYTE)) == 256
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            **_bpe(vocabulary, merges),
            "unk_token": None if unknown is None else tokens.texts[unknown],
            "fuse_unk": True,
            "byte_fallback": has_bytes,
        },
    }


def _merges_of_scores(tokens: _Tokens, scores: np.ndarray[Any, np.dtype[Any]]) -> Iterator[list[str]]:
    """Merges that make each piece from two others, those with the highest score first, as SentencePiece merges."""
    pieces = {tokens.texts[number]: number for number in tokens.of_kind(_Kind.NORMAL)}
    order = (-scores.astype(np.float64)).tolist()
    for number in sorted(pieces.values(), key=lambda number: (order[number], number)):
        piece = tokens.texts[number]
        if len(piece) > _LONGEST_PIECE:
            continue
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        made = [(pieces[left], pieces[right]) for left, right in halves if left in pieces and right in pieces]
        for left, right in sorted(made):
            yield [tokens.texts[left], tokens.texts[right]]


def _check_merges(metadata: Metadata, vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]) -> None:
    for number, pair in enumerate(merges):
        left, right = pair
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            absent = next(token for token in (left, right, left + right) if token not in vocabulary)
            metadata.problem(f"{_PREFIX}merges", f"has {shown(pair)} at {number}, but no token {shown(absent)}")
            return


def _bpe(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(vocabulary),
        "merges": [list(pair) for pair in merges],
    }


def _template(tokens: _Tokens, begin: Sequence[int], end: Sequence[int]) -> dict[str, Any] | None:
    """A post-processor that adds tokens around each text."""
    if not begin and not end:
        return None

    def around(sequence: str, number: int) -> list[dict[str, Any]]:
        special = [
            [{"SpecialToken": {"id": tokens.texts[each], "type_id": number}} for each in ids] for ids in (begin, end)
        ]
        return [*special[0], {"Sequence": {"id": sequence, "type_id": number}}, *special[1]]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            tokens.texts[each]: {"id": tokens.texts[each], "ids": [each], "tokens": [tokens.texts[each]]}
            for each in (*begin, *end)
        },
    }
