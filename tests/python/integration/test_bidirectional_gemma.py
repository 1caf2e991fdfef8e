"""Gemma 3 without lm_head: attention in both directions (EmbeddingGemma) or causal, with adapters."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import adaptrt
from adaptrt import CheckpointError, PoolingParams, PoolingType
from adaptrt.formats.checkpoint.config import CheckpointConfig
from adaptrt.formats.models.registry import read_config as read_checkpoint_config
from support.encoders import Encoder, engine_of, save_encoder
from support.families import GEMMA, LLAMA, rope
from support.hf_configs import EMBEDDING_GEMMA, read_config
from support.pooled import (
    Dense,
    apply_dense,
    hidden_states,
    load_bare,
    pooled,
    run_pooled,
    save_pooled_adapter,
    save_sentence_transformer,
    save_word_tokenizer,
)

FIELDS = {
    **GEMMA, "sliding_window": 11, "pad_token_id": 0, "max_position_embeddings": 200, "rope_parameters": {
        "full_attention": rope(theta=5000.0), "sliding_attention": rope(theta=300.0)},
}  # fmt: skip
KIND = Encoder(transformers.Gemma3TextConfig, FIELDS, LLAMA, "embed_tokens")
# One token; as long as half of the window, and longer; beyond the whole window.
PROMPTS = [[7], [2, 44, 5, 60, 7, 3], [*range(2, 9)], [*range(2, 60)]]
ADAPTERS = {"lora": {"r": 5}, "dora": {"r": 4, "use_dora": True}}


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return partial(read_config, tmp_path)


@pytest.mark.parametrize("is_bidirectional", [True, False])
def test_rows_are_transformers_hidden_states(is_bidirectional: bool, tmp_path: Path) -> None:
    model = save_encoder(KIND, tmp_path / "model", use_bidirectional_attention=is_bidirectional)
    assert json.loads((model / "config.json").read_text())["architectures"] == ["Gemma3TextModel"]
    adapters: dict[str | None, Path | None] = {None: None}
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        settings = {"task_type": "FEATURE_EXTRACTION", "target_modules": LLAMA, **fields}
        adapters[name] = save_pooled_adapter(load_bare(model), tmp_path / name, seed, **settings)
    engine = engine_of(model, tmp_path / "engine")
    kind = adaptrt.ModelType.ENCODER_ONLY if is_bidirectional else adaptrt.ModelType.DECODER_ONLY
    with adaptrt.Executor(engine, kind) as executor:
        assert executor.engine_info.has_kv_cache is not is_bidirectional
        for name, directory in adapters.items():
            if directory is not None:
                executor.add_adapter(name, directory)
            reference = load_bare(model, directory)
            for prompt in PROMPTS:
                states = hidden_states(reference, prompt)
                for pooling_type in (PoolingType.MEAN, PoolingType.ALL):
                    expected = pooled(states, pooling_type, normalize=False)
                    found = run_pooled(executor, prompt, PoolingParams(pooling_type), name)
                    assert np.abs(found - expected).max() <= 1e-4 * float(np.ptp(expected)), (name, len(prompt))


def test_embedding_gemma_has_dense_layers(tmp_path: Path) -> None:
    """The text's mean goes through two linear layers, before it is normalised."""
    model = save_encoder(KIND, tmp_path / "model", use_bidirectional_attention=True)
    dense = [Dense(36, 50), Dense(50, 38, "activation.Tanh")]
    save_sentence_transformer(model, "mean_tokens", normalize=True, dense=dense)
    save_word_tokenizer(model, 61)
    engine = engine_of(model, tmp_path / "engine")
    expected = pooled(hidden_states(load_bare(model), [2, 5, 7, 1]), PoolingType.MEAN)
    expected = apply_dense(model, expected, dense)
    expected /= np.linalg.norm(expected)
    with adaptrt.LLM(engine, tokenizer=model) as llm:
        row = llm.embed("t2 t5 t7")
    assert row.shape == (38,)
    assert np.abs(row - expected).max() <= 1e-5
    (model / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"2_Dense/model\.safetensors"):
        engine_of(model, tmp_path / "other")


@pytest.mark.parametrize("is_bidirectional", [True, False])
def test_classifiers(is_bidirectional: bool, tmp_path: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    fields = {"use_bidirectional_attention": is_bidirectional, "num_labels": 3}
    model = save_encoder(KIND, tmp_path / "model", kind, **fields)
    assert json.loads((model / "config.json").read_text())["architectures"] == ["Gemma3TextForSequenceClassification"]
    save_word_tokenizer(model, 61)
    reference = kind.from_pretrained(model, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = reference(torch.tensor([[2, 5, 7, 1]])).logits[0].softmax(-1).numpy()
    with adaptrt.LLM(engine_of(model, tmp_path / "engine"), tokenizer=model) as llm:
        found = llm.classify("t2 t5 t7")
    assert np.abs(found.probs - expected).max() <= 1e-5


def test_dense_layers_of_other_sizes_are_refused(tmp_path: Path) -> None:
    model = save_encoder(KIND, tmp_path / "model", use_bidirectional_attention=True)
    save_sentence_transformer(model, "mean_tokens", normalize=True, dense=[Dense(36, 50), Dense(40, 38)])
    with pytest.raises(CheckpointError, match="3_Dense has 40 inputs, but gets 50"):
        engine_of(model, tmp_path / "engine")


def test_a_published_config_is_read(load: Any) -> None:
    config = load(EMBEDDING_GEMMA)
    assert (config.is_encoder_only, config.has_lm_head, config.sliding_window) == (True, False, 257)
    assert config.describe_depth() == "6 encoder layers"
    assert (config.rotary_base, config.rotary_local_base, config.sliding_window_layers) == (1e6, 1e4, (0, 1, 2, 3, 4))
    causal = load(EMBEDDING_GEMMA, use_bidirectional_attention=False)
    assert (causal.is_encoder_only, causal.has_lm_head, causal.sliding_window) == (False, False, 512)


def test_older_checkpoints_are_causal(load: Any) -> None:
    data = load(EMBEDDING_GEMMA, use_bidirectional_attention=False).to_dict()
    del data["is_bidirectional"]
    read = read_checkpoint_config(data, subject="config.json")
    assert isinstance(read, CheckpointConfig)
    assert not read.is_encoder_only


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"use_bidirectional_attention": 1}, "use_bidirectional_attention is 1; expected true or false"),
        (
            {"architectures": ["Gemma3ForCausalLM"]},
            "has_lm_head is true; this Gemma3ForCausalLM attends to later tokens, so it cannot generate",
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "has_lm_head is true; this Gemma3ForConditionalGeneration attends to later tokens",
        ),
    ],
)
def test_fields_that_cannot_be_served_are_named(load: Any, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        load(EMBEDDING_GEMMA, **changes)
