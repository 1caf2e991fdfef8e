"""Models for adapters that change lm_head and the embedding, and adapters of every such kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft

from adaptrt._core import VOCABULARY_SLICE
from adaptrt.formats.engine.build_config import BuildConfig
from support.families import FAMILIES, save_family
from support.kinds import save_kind
from support.models import ModelSpec, save_model
from support.served_kinds import ServedKinds, engine_of

# The vocabulary is larger than a slice, and not a multiple of a slice.
WIDE = ModelSpec(vocab_size=VOCABULARY_SLICE + 4099, hidden_size=24, num_attention_heads=2, intermediate_size=20)
# Names of the embedding, and of a layer in the decoder.
NAMES = {"llama": ("embed_tokens", "q_proj"), "gemma2": ("embed_tokens", "q_proj"), "gpt2": ("wte", "c_attn"),
         "qwen2-moe": ("embed_tokens", "q_proj"), "phi2": ("embed_tokens", "q_proj")}  # fmt: skip
TIED = ("gemma2", "gpt2")
WITHOUT_BIAS = tuple(name for name in NAMES if name != "phi2")
"""Models without a bias in lm_head, which PEFT would save and train with it."""


def vocabulary_of(name: str) -> int:
    """Returns the size of the model's vocabulary."""
    return WIDE.vocab_size if name == "llama" else 61


def hidden_size_of(name: str) -> int:
    """Returns the model's hidden size."""
    return WIDE.hidden_size if name == "llama" else 36


def lora_of(name: str, *targets: str, **fields: Any) -> peft.LoraConfig:
    """Returns PEFT's configuration for layers of the model."""
    _, layer = NAMES[name]
    conv1d = {"fan_in_fan_out": True} if layer == "c_attn" and layer in targets else {}
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(targets), **conv1d, **fields)


def serve_kinds(
    name: str,
    directory: Path,
    kinds: Mapping[str, Any],
    build: BuildConfig,
    *,
    extra_tokens: Mapping[str, int] | None = None,
    change: Callable[[Path, Mapping[str, Path]], None] = lambda model, adapters: None,
    first_tokens: tuple[int, ...] = (),
) -> ServedKinds:
    """Makes the model, its engine, and an adapter of each kind; `change` may change them before the comparisons."""
    if name == "llama":
        model = save_model(WIDE, directory / "model")
    else:
        model = save_family(FAMILIES[name], directory / "model")
    extra = extra_tokens or {}
    adapters = {
        kind: save_kind(model, directory / kind, config, seed, extra.get(kind, 0))
        for seed, (kind, config) in enumerate(kinds.items())
    }
    change(model, adapters)
    return ServedKinds(
        model,
        engine_of(model, directory, build),
        adapters,
        vocabulary=vocabulary_of(name),
        first_tokens=first_tokens,
        extra_tokens=extra,
    )
