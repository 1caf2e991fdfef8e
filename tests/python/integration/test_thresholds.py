"""Prompts and answers around each family's windows, and around lengths at which rotary angles change."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig
from support.families import FAMILIES, HALF_ROTATED, RELATIVES, Family, rope, save_family
from support.models import Reference
from support.serving import collect, make_request

# The same tolerance as in test_families.py; both sides round the angles of long positions alike.
FLOAT32_TOLERANCE = 1e-4
NEW_TOKENS = 5
THRESHOLD = 24


def dynamic(name: str, **parameters: float) -> Family:
    """Returns the family with rotary angles that depend on the length beyond THRESHOLD tokens."""
    family = {**FAMILIES, **RELATIVES}[name]
    rotary = rope("dynamic", factor=2.0, **parameters)
    fields = {**family.fields, "max_position_embeddings": THRESHOLD, "rope_parameters": rotary}
    return dataclasses.replace(family, fields=fields)


def family_of(name: str) -> Family:
    return {**FAMILIES, **RELATIVES}[name]


WINDOWS = {
    "gemma2": 10, "gemma3": 10, "phi3": 30, "starcoder2": 20, "qwen2.5-vl": 20, "mistral3": 20, "cohere2": 20,
    "olmo3": 20, "exaone4": 20, "ministral": 20, "cwm": 20,
}  # fmt: skip
HALF = {"partial_rotary_factor": HALF_ROTATED["partial_rotary_factor"]}
CASES = {
    **{f"window-{name}": (family_of(name), window) for name, window in WINDOWS.items()},
    "longrope": (family_of("phi4-mini-longrope"), THRESHOLD),
    "dynamic-phi2": (dynamic("phi2", **HALF), THRESHOLD),
    "dynamic-gpt-neox": (dynamic("gpt-neox", **HALF), THRESHOLD),
    "dynamic-stablelm": (dynamic("stablelm", **HALF), THRESHOLD),
    "dynamic-glm": (dynamic("glm", **HALF), THRESHOLD),
    "dynamic-cohere": (dynamic("cohere"), THRESHOLD),
    "dynamic-granite": (dynamic("granite"), THRESHOLD),
    "dynamic-olmo2": (dynamic("olmo2"), THRESHOLD),
}


@pytest.mark.parametrize("name", CASES)
def test_beyond_every_threshold(name: str, tmp_path: Path) -> None:
    family, threshold = CASES[name]
    model = save_family(family, tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint")
    config = BuildConfig(max_batch_size=8, max_num_tokens=128, max_seq_len=128, tokens_per_block=8)
    build(tmp_path / "checkpoint", config, tmp_path / "engine")
    rng = np.random.default_rng(3)
    # The second prompt crosses the threshold while it generates.
    lengths = (threshold - NEW_TOKENS - 1, threshold - 2, threshold, threshold + 1, 3 * threshold + 1)
    prompts = [rng.integers(2, 61, length).tolist() for length in lengths]
    executor_config = adaptrt.ExecutorConfig(enable_chunked_context=True, max_num_tokens=16)
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, executor_config) as executor:
        ids = executor.enqueue_requests([make_request(prompt, NEW_TOKENS) for prompt in prompts])
        answers = [collect(executor, request_id) for request_id in ids]
    for prompt, answer in zip(prompts, answers, strict=True):
        # Each prompt needs a new reference: one with dynamic angles remembers the longest sequence so far.
        expected = Reference(model).logits(prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        scale = expected.max() - expected.min()
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * scale, len(prompt)
        assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()
