"""The tokenizer of a GGUF file as Hugging Face's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...common.shown_value import shown
from .encoder_tokenizers import unigram_parts, word_piece_parts, word_piece_text
from .metadata import Metadata
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from .tokens import PREFIX, Kind, Tokens, special_tokens_around

_BPE: Final = "gpt2"
_SENTENCEPIECE: Final = "llama"
_WORD_PIECE: Final = "bert"
_UNIGRAM: Final = "t5"
_DEFAULT_IDS: Final[Mapping[str, Mapping[str, int]]] = {
    _BPE: {},
    _SENTENCEPIECE: {"bos": 1, "eos": 2, "unknown": 0},
    _WORD_PIECE: {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    _UNIGRAM: {"eos": 1, "unknown": 2, "padding": 0},
}
"""Ids of special tokens that a file need not state, by the names of tokenizers (tokenizer.ggml.model)."""
_SPACE: Final = "▁"
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
    model = metadata.text(f"{PREFIX}model", choices=(*_DEFAULT_IDS, "none", "no_vocab"))
    if model in (None, "none", "no_vocab"):
        if model is None:
            metadata.problem(
                f"{PREFIX}model",
                f"is needed; accepted: {_BPE} (BPE), {_SENTENCEPIECE} (SentencePiece), {_WORD_PIECE} (WordPiece) and "
                f"{_UNIGRAM} (Unigram)",
            )
        return None
    tokens = Tokens.read(metadata, vocab_size, word_piece_text if model == _WORD_PIECE else None)
    ids = _read_ids(metadata, len(tokens.texts), _DEFAULT_IDS[model])
    metadata.ignore([f"{PREFIX}token_type_count", "tokenizer.huggingface.json"])
    if model == _WORD_PIECE:
        parts, post_processor = _word_piece(metadata, tokens, ids)
    else:
        parts, post_processor = _others(metadata, model, tokens, ids)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens.added(),
        **parts,
        "post_processor": post_processor,
    }
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{field: tokens.texts[ids[name]] for field, name in named.items() if name in ids},
    }
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    ends += [number for number in tokens.of_kind(Kind.CONTROL) if tokens.texts[number] in _ENDS]
    return GgufTokenizer(content, config, ids.get("bos"), tuple(dict.fromkeys(ends)), ids.get("padding"))


def _word_piece(
    metadata: Metadata, tokens: Tokens, ids: Mapping[str, int]
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The parts of BERT's tokenizer, and its post-processor.

    As in llama.cpp, tokens around a text are always added: some files deny it, although their models have them.
    """
    metadata.ignore([f"{PREFIX}add_{name}_token" for name in ("bos", "eos", "sep")])
    metadata.ignore([f"{PREFIX}pre", f"{PREFIX}scores"])
    begin, separator = ids.get("cls", ids.get("bos")), ids.get("seperator")
    if begin is None or separator is None:
        metadata.problem(f"{PREFIX}{'cls' if begin is None else 'seperator'}_token_id", "is missing; expected a token")
        begin = separator = 0
    around = special_tokens_around(tokens, [begin], [separator], between=[separator])
    return word_piece_parts(metadata, tokens, ids.get("unknown")), around


def _others(
    metadata: Metadata, model: str, tokens: Tokens, ids: Mapping[str, int]
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The parts of the other tokenizers, and their post-processor."""
    default_bos, default_eos = True, False
    if model == _BPE:
        pre = _pre_tokenizer(metadata)
        default_bos = pre.adds_bos
        parts = _byte_level_parts(metadata, tokens, pre)
        metadata.expect(f"{PREFIX}add_space_prefix", [False])
        metadata.ignore([f"{PREFIX}scores"])
    elif model == _UNIGRAM:
        default_bos, default_eos = False, True
        parts = unigram_parts(metadata, tokens, ids.get("unknown"))
        metadata.text(f"{PREFIX}pre")
    else:
        parts = _sentencepiece_parts(metadata, tokens, ids.get("unknown"))
        metadata.text(f"{PREFIX}pre")
    metadata.ignore([f"{PREFIX}normalizer.lowercase"])
    if metadata.is_unused(f"{PREFIX}remove_extra_whitespaces"):
        metadata.expect(f"{PREFIX}remove_extra_whitespaces", [False])
    adds_bos = metadata.boolean(f"{PREFIX}add_bos_token", default_bos)
    adds_eos = metadata.boolean(f"{PREFIX}add_eos_token", default_eos)
    begin = [ids["bos"]] if adds_bos and "bos" in ids else []
    end = [ids["eos"]] if adds_eos and "eos" in ids else []
    if not metadata.boolean(f"{PREFIX}add_sep_token", False):
        return parts, special_tokens_around(tokens, begin, end)
    separator = [ids[name] for name in ("seperator", "eos") if name in ids][:1]
    # RoBERTa's second text has no token type of its own.
    return parts, special_tokens_around(tokens, begin, end, between=[*end, *separator], second_type=0)


def _read_ids(metadata: Metadata, count: int, defaults: Mapping[str, int]) -> dict[str, int]:
    """Ids of special tokens, by the names of their keys."""
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "unknown", "padding", *_OTHER_TOKENS):
        key = f"{PREFIX}{name}_token_id"
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
    key = f"{PREFIX}pre"
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


def _byte_level_parts(metadata: Metadata, tokens: Tokens, pre: PreTokenizer) -> dict[str, Any]:
    merges = []
    for number, merge in enumerate(metadata.texts(f"{PREFIX}merges")):
        space = merge.find(" ", 1)
        if space < 0:
            metadata.problem(f"{PREFIX}merges", f"has {shown(merge)} at {number}; expected two tokens and a space")
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


def _sentencepiece_parts(metadata: Metadata, tokens: Tokens, unknown: int | None) -> dict[str, Any]:
    vocabulary = tokens.vocabulary()
    scores = metadata.numbers(f"{PREFIX}scores")
    stated = metadata.texts(f"{PREFIX}merges")
    if stated:
        merges = [list(merge.split(" ", 1)) for merge in stated if " " in merge]
    elif scores is None or len(scores) != len(tokens.texts):
        metadata.problem(
            f"{PREFIX}scores", f"has {0 if scores is None else len(scores)} scores; expected one per token"
        )
        merges = []
    else:
        merges = list(_merges_of_scores(tokens, scores))
    _check_merges(metadata, vocabulary, merges)
    prepended = metadata.boolean(f"{PREFIX}add_space_prefix", True)
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prepended else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepended else []
    has_bytes = sum(_BYTE.fullmatch(tokens.texts[number]) is not None for number in tokens.of_kind(Kind.BYTE)) == 256
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


def _merges_of_scores(tokens: Tokens, scores: np.ndarray[Any, np.dtype[Any]]) -> Iterator[list[str]]:
    """Merges that make each piece from two others, those with the highest score first, as SentencePiece merges."""
    pieces = {tokens.texts[number]: number for number in tokens.of_kind(Kind.NORMAL)}
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
            metadata.problem(f"{PREFIX}merges", f"has {shown(pair)} at {number}, but no token {shown(absent)}")
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
