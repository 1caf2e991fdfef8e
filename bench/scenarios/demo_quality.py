"""Measures the quality of engines of the demo's model on the documents that it was trained on."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from adaptrt.runtime.adapter_tokenizers import load_tokenizer
from adaptrt.runtime.text_quality import Quality, measure
from adaptrt.tools.demo_corpus import STYLES, document, facts

DEMO_MODEL: Final = Path(__file__).parents[2] / "examples" / "demo" / "model"


def demo_quality(engines: Sequence[Path], tokens: int) -> list[Quality]:
    """Quality of each engine on at least `tokens` tokens; divergences are from the first engine.

    Each document is a text of its own.
    """
    tokenizer = load_tokenizer(DEMO_MODEL / "tokenizer.json")
    documents = [document(fact, style, tagged=style != "plain") for style in STYLES for fact in facts()]
    random.Random(0).shuffle(documents)
    by_length: dict[int, list[int]] = defaultdict(list)
    for text in documents:
        ids = tokenizer.encode(text).ids
        if tokens > 0:
            by_length[len(ids)] += ids
        tokens -= len(ids)
    whole = [Quality() for _ in engines]
    for length, ids in by_length.items():
        for quality, measured in zip(whole, measure(engines, ids, length), strict=True):
            quality.tokens += measured.tokens
            quality.negative_log_likelihood += measured.negative_log_likelihood
            quality.divergence += measured.divergence
            quality.same_choices += measured.same_choices
    return whole
