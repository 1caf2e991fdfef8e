"""Tokenizers of encoders in GGUF files, as parts of a tokenizer.json: WordPiece (BERT) and Unigram (XLM-RoBERTa)."""

from __future__ import annotations

import base64
import re
from typing import Any, Final

from .metadata import Metadata
from .tokens import PREFIX, Kind, Tokens

_SPACE: Final = "▁"
_CONTINUES: Final = "##"
_BRACKETED: Final = re.compile(r"\[.+\]", re.DOTALL)
_CAPITAL: Final = re.compile(r"[A-Z]")
_LONGEST_WORD: Final = 100
"""BERT's words of more characters are unknown."""
_CHARSMAP: Final = f"{PREFIX}precompiled_charsmap"
_SIZE_BYTES: Final = 4


def word_piece_text(text: str, kind: int) -> str:
    """Returns the text of a token in BERT's vocabulary.

    Converters mark pieces that begin a word by ▁, whereas BERT marks the others by ##. Older converters left tokens in
    brackets unchanged.
    """
    if kind == Kind.CONTROL:
        return text
    if text.startswith(_SPACE):
        return text.removeprefix(_SPACE)
    return text if _BRACKETED.fullmatch(text) else _CONTINUES + text


def word_piece_parts(metadata: Metadata, tokens: Tokens, unknown: int | None) -> dict[str, Any]:
    """Returns the parts of BERT's tokenizer. Problems are noted in `metadata`."""
    # Files do not say that a model keeps capitals, but a vocabulary with capitals is of no use without them.
    has_capitals = any(
        _CAPITAL.search(tokens.texts[number]) and not _BRACKETED.fullmatch(tokens.texts[number])
        for number in tokens.of_kind(Kind.NORMAL)
    )
    lowercase = metadata.boolean(f"{PREFIX}normalizer.lowercase", not has_capitals)
    strips_accents = metadata.boolean(f"{PREFIX}normalizer.strip_accents", lowercase)
    if unknown is None:
        metadata.problem(f"{PREFIX}unknown_token_id", "is missing; expected the token of unknown words")
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": strips_accents,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": _CONTINUES, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": tokens.texts[unknown or 0],
            "continuing_subword_prefix": _CONTINUES,
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": tokens.vocabulary(),
        },
    }


def unigram_parts(metadata: Metadata, tokens: Tokens, unknown: int | None) -> dict[str, Any]:
    """Returns the parts of a tokenizer of SentencePiece's unigrams. Problems are noted in `metadata`."""
    scores = metadata.numbers(f"{PREFIX}scores")
    if scores is None or len(scores) < len(tokens.texts):
        found = 0 if scores is None else len(scores)
        metadata.problem(f"{PREFIX}scores", f"has {found} scores; expected one per token")
        values = [0.0] * len(tokens.texts)
    else:
        values = [float(score) for score in scores.tolist()]
    if unknown is None:
        metadata.problem(f"{PREFIX}unknown_token_id", "is missing; expected the token of unknown characters")
    normalizers = _charsmap(metadata)
    has_prefix = metadata.boolean(f"{PREFIX}add_space_prefix", True)
    metaspace = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "always" if has_prefix else "never",
        "split": True,
    }
    # XLM-RoBERTa removes spaces at the ends and before other spaces. From some models, converters write a setting of
    # decoding here.
    metadata.boolean(f"{PREFIX}remove_extra_whitespaces", True)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": unknown, "byte_fallback": False, "vocab": _pieces(tokens, values)},
    }


def _charsmap(metadata: Metadata) -> list[dict[str, Any]]:
    """The normaliser of the characters; none if the file has no table of them."""
    numbers = metadata.numbers(_CHARSMAP)
    if numbers is None:
        return []
    table = numbers.tobytes()
    size = int.from_bytes(table[:_SIZE_BYTES], "little")
    if numbers.dtype.itemsize != 1 or not _SIZE_BYTES <= _SIZE_BYTES + size <= len(table) or size % _SIZE_BYTES:
        metadata.problem(_CHARSMAP, f"has {len(table)} bytes; expected those of a table of characters")
    return [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}]


def _pieces(tokens: Tokens, scores: list[float]) -> list[list[Any]]:
    """Pieces and scores by number. Numbers without a token, such as those at the end, have no piece in a text."""
    lowest = min((scores[number] for number in tokens.of_kind(Kind.NORMAL)), default=0.0)
    pieces: list[list[Any]] = [
        # No normalised text has a space. The score of unknown characters depends on the lowest of all scores.
        [text, scores[number]] if tokens.is_known(number) else [f" {text}", lowest]
        for number, text in enumerate(tokens.texts)
    ]
    known = [number for number in range(len(pieces)) if tokens.is_known(number)]
    return pieces[: known[-1] + 1] if known else pieces
