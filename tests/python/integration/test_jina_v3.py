"""Jina embeddings v3 against transformers + PEFT: hidden states with adapters, classifiers, and fused layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt import CheckpointError, PoolingParams, PoolingType
from adaptrt.formats.adapter import convert_adapter
from support.encoders import Encoder, engine_of, save_encoder
from support.families import rope
from support.pooled import hidden_states, load_bare, run_pooled, save_pooled_adapter, save_word_tokenizer

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]
FIELDS = {
    "vocab_size": 61, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 38,
    "max_position_embeddings": 200, "type_vocab_size": 2, "layer_norm_eps": 1e-3, "pad_token_id": 0,
    "rope_parameters": rope(theta=300.0),
}  # fmt: skip
KIND = Encoder(transformers.JinaEmbeddingsV3Config, FIELDS, TARGETS, "word_embeddings")
PROMPTS = [[7], [2, 44, 5, 60, 7, 3], [*range(2, 60), *range(2, 60)]]
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"r": 5, "target_modules": [*TARGETS, "word_embeddings"]},
    "dora": {"r": 4, "use_dora": True, "target_modules": TARGETS},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(KIND, tmp_path_factory.mktemp("jina") / "model")


def test_rows_are_transformers_hidden_states(model: Path, tmp_path: Path) -> None:
    adapters: dict[str | None, Path | None] = {None: None}
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        settings = {"task_type": "FEATURE_EXTRACTION", **fields}
        adapters[name] = save_pooled_adapter(load_bare(model), tmp_path / name, seed, **settings)
    engine = engine_of(model, tmp_path / "engine")
    with adaptrt.Executor(engine, adaptrt.ModelType.ENCODER_ONLY) as executor:
        for name, directory in adapters.items():
            if directory is not None:
                executor.add_adapter(name, directory)
            reference = load_bare(model, directory)
            for prompt in PROMPTS:
                expected = hidden_states(reference, prompt)
                found = run_pooled(executor, prompt, PoolingParams(PoolingType.ALL), name)
                assert np.abs(found - expected).max() <= 1e-4 * float(np.ptp(expected)), (name, len(prompt))


def test_weights_of_the_base_are_found(model: Path, tmp_path: Path) -> None:
    """DoRA is normalised by the weights of q, k and v, which files hold fused."""
    settings = {"task_type": "FEATURE_EXTRACTION", **ADAPTERS["dora"]}
    adapter = save_pooled_adapter(load_bare(model), tmp_path / "dora", 1, **settings)
    engine = engine_of(model, tmp_path / "engine")
    by_engine = adaptrt.LoraConfig.from_peft(1, adapter, engine)
    by_model = convert_adapter(adapter, storage_dtype="float32", base=model)
    np.testing.assert_array_equal(by_model.config, by_engine.config)
    np.testing.assert_allclose(by_model.weights, by_engine.weights, rtol=1e-5, atol=1e-6)


def test_classifiers(tmp_path: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    model = save_encoder(KIND, tmp_path / "model", kind, num_labels=3)
    save_word_tokenizer(model, 61)
    reference = kind.from_pretrained(model, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = reference(torch.tensor([[2, 5, 7, 1]])).logits[0].softmax(-1).numpy()
    with adaptrt.LLM(engine_of(model, tmp_path / "engine"), tokenizer=model) as llm:
        assert np.abs(llm.classify("t2 t5 t7").probs - expected).max() <= 1e-5


def test_a_fused_layer_that_cannot_be_split_is_refused(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("Wqkv.weight"))
    tensors[name] = tensors[name][:-1]
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}': is \[107, 36\]; expected a multiple of 3 outputs"):
        engine_of(tmp_path, tmp_path / "engine")
