"""The network's graph, evaluated by onnx.reference, against transformers + PEFT in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.models.registry import declare, load_config
from support.models import ATTENTION_MODULES, ModelSpec, Reference, save_adapter, save_model
from support.oracle import AdapterTables, NetworkOracle, SequenceChunk

# Both sides compute in float32, in different orders.
TOLERANCE = 1e-4
TOKENS_PER_BLOCK = 4
BLOCKS = [5, 3, 9, 1, 30, 2, 7, 8]


def rope(kind: str, **parameters) -> tuple:
    return (("rope_parameters", {"rope_type": kind, "rope_theta": 10000.0, **parameters}),)


MODELS = {
    "llama": ModelSpec(),
    "llama-head80-biases": ModelSpec(
        hidden_size=40, num_attention_heads=2, num_key_value_heads=2, head_dim=80,
        extra=(("attention_bias", True), ("mlp_bias", True)),
    ),
    "llama-tied-linear": ModelSpec(tie_word_embeddings=True, extra=rope("linear", factor=4.0)),
    "llama-dynamic": ModelSpec(max_position_embeddings=20, extra=rope("dynamic", factor=2.0)),
    "llama3": ModelSpec(extra=rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)),
    "llama-yarn": ModelSpec(extra=rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "mistral-window": ModelSpec(family="mistral", extra=(("sliding_window", 5),)),
    "qwen2-window-by-layer": ModelSpec(family="qwen2", extra=(
        ("use_sliding_window", True), ("sliding_window", 6), ("max_window_layers", 1))),
    "qwen3": ModelSpec(family="qwen3", num_attention_heads=4, num_key_value_heads=2),
}  # fmt: skip

ADAPTERS = {
    "lora": {"r": 4, "target_modules": ATTENTION_MODULES},
    "rslora-all": {"r": 6, "use_rslora": True},
    "dora-all": {"r": 3, "use_dora": True},
}


def tokens_of(spec: ModelSpec, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, spec.vocab_size, count).tolist()


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= TOLERANCE * (expected.max() - expected.min())


@pytest.mark.parametrize("name", MODELS)
def test_base_model_in_chunks(name: str, tmp_path: Path) -> None:
    spec = MODELS[name]
    model = save_model(spec, tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint")
    oracle = NetworkOracle(tmp_path / "checkpoint", tmp_path, NetworkOptions(tokens_per_block=TOKENS_PER_BLOCK))
    tokens = tokens_of(spec, 27, 1)
    # transformers uses the length of its input, so "dynamic" is compared only on the prompt.
    ends = [7, 18, 27] if "dynamic" in name else [7, 18, 23, 24, 25, 26, 27]
    prompt_length = 27 if "dynamic" in name else 23
    actual, begin = [], 0
    for end in ends:
        actual.append(oracle.step([SequenceChunk(tokens[begin:end], begin, prompt_length, BLOCKS)]))
        begin = end
    assert_close(np.concatenate(actual), Reference(model).logits(tokens).numpy())


def test_dynamic_frequencies_grow_with_each_generated_token(tmp_path: Path) -> None:
    spec = MODELS["llama-dynamic"]
    model = save_model(spec, tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint")
    options = NetworkOptions(tokens_per_block=TOKENS_PER_BLOCK)
    tokens = tokens_of(spec, 27, 2)
    one_by_one = NetworkOracle(tmp_path / "checkpoint", tmp_path, options)
    whole = NetworkOracle(tmp_path / "checkpoint", tmp_path, options)
    grown = [one_by_one.step([SequenceChunk([token], at, 1, BLOCKS)]) for at, token in enumerate(tokens)]
    at_once = whole.step([SequenceChunk(tokens, 0, 1, BLOCKS)])
    np.testing.assert_allclose(np.concatenate(grown), at_once, atol=1e-4)
    as_prompt = whole.step([SequenceChunk(tokens, 0, len(tokens), BLOCKS)])
    assert np.abs(as_prompt[:20] - at_once[:20]).max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_mixed_batch_of_adapters(family: str, tmp_path: Path) -> None:
    spec = ModelSpec(family=family)
    model = save_model(spec, tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint")
    directories = [save_adapter(model, tmp_path / name, 3, **kind) for name, kind in ADAPTERS.items()]
    flattened = [convert_adapter(directory, storage_dtype="float32", base=model) for directory in directories]
    tables = AdapterTables([(a.weights, a.config) for a in flattened], declare(load_config(tmp_path / "checkpoint")))
    oracle = NetworkOracle(
        tmp_path / "checkpoint", tmp_path, NetworkOptions(tokens_per_block=TOKENS_PER_BLOCK, max_lora_rank=8, dora=True)
    )
    prompts = [tokens_of(spec, 9 + slot, slot) for slot in range(4)]
    blocks = np.random.default_rng(0).permutation(32).reshape(4, 8).tolist()
    answers: list[list[np.ndarray]] = [[] for _ in prompts]
    for begin, end in ((0, 5), (5, 8), (8, 9)):
        chunks = [
            SequenceChunk(prompt[begin:end], begin, len(prompt), blocks[slot], slot if slot < 3 else -1)
            for slot, prompt in enumerate(prompts)
        ]
        for slot, logits in enumerate(np.split(oracle.step(chunks, tables), 4)):
            answers[slot].append(logits)
    for slot, directory in enumerate([*directories, None]):
        expected = Reference(model, directory).logits(prompts[slot][:9]).numpy()
        assert_close(np.concatenate(answers[slot]), expected)
