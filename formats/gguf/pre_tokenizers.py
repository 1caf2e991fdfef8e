"""Pre-tokenizers of byte-level BPE, by the names that llama.cpp's converter gives them (tokenizer.ggml.pre).

Each is the one in the tokenizer.json of the models that the name stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_ENDINGS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD: Final = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3: Final = rf"{_ENDINGS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2: Final = rf"{_ENDINGS}|{_LEAD}\p{{L}}+|\p{{N}}|{_REST}"
_GPT4O: Final = (
    rf"{_LEAD}[{_UPPER}]*[{_LOWER}]+{_ENDINGS}?|{_LEAD}[{_UPPER}]+[{_LOWER}]*{_ENDINGS}?|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_TEKKEN: Final = rf"{_LEAD}[{_UPPER}]*[{_LOWER}]+|{_LEAD}[{_UPPER}]+[{_LOWER}]*|\p{{N}}|{_CASED_REST}"


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is split into words before BPE."""

    steps: tuple[Mapping[str, Any], ...]
    """The steps of tokenizer.json's pre_tokenizer."""
    ignore_merges: bool = False
    """True: a word that is a token becomes this token without merges."""
    adds_bos: bool = False
    """True if texts begin with the bos token unless the file says otherwise."""
    normalizer: Mapping[str, Any] | None = None


def _byte_level(*, splits: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}


def _split(*patterns: str, **fields: Any) -> PreTokenizer:
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return PreTokenizer((*steps, _byte_level(splits=False)), **fields)


_DIGITS: Final = {"type": "Digits", "individual_digits": True}
_NFC: Final = {"type": "NFC"}
_GPT2: Final = PreTokenizer((_byte_level(splits=True),))
_STARCODER: Final = PreTokenizer((_DIGITS, _byte_level(splits=True)))
_LLAMA3_BPE: Final = _split(_LLAMA3, ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "exaone4", "trillion", "roberta-bpe"), _GPT2),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "granite"), _STARCODER
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _split(_LLAMA3)),
    "glm4": _split(_LLAMA3, ignore_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _split(_QWEN2, normalizer=_NFC)),
    **dict.fromkeys(("stablelm2", "hunyuan"), _split(_QWEN2)),
    **dict.fromkeys(("gpt-4o", "llama4"), _split(_GPT4O)),
    "tekken": _split(_TEKKEN, ignore_merges=True, adds_bos=True),
}
"""By the values of tokenizer.ggml.pre."""
