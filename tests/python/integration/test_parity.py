"""Engines against transformers + PEFT in float32: the same greedy tokens, logits within a stated tolerance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import adaptrt
from support.models import ATTENTION_MODULES, ModelSpec, Reference, save_adapter
from support.serving import build_random_engine, collect, make_request

# Both sides sum in float32 in different orders. Over a few layers the differences stay near 1e-6 of the range.
FLOAT32_TOLERANCE = 1e-4
# Weights are rounded once to 8 or 11 significant bits, and activations (bfloat16 only) at every linear layer. The
# relative error of one dot product of random terms is about 2^-9 (2^-12). It adds up over the layers like a random
# walk, and the largest of about ten thousand logits is about four deviations away.
BFLOAT16_TOLERANCE = 0.06
FLOAT16_TOLERANCE = 0.006

MODELS = {
    "llama-odd-mqa": ModelSpec(),
    "llama-head80-biased-llama3": ModelSpec(
        hidden_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=80, vocab_size=311,
        extra=(("attention_bias", True), ("rope_parameters", {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        })),
    ),
    "llama-tied-large-vocabulary": ModelSpec(vocab_size=50257, tie_word_embeddings=True, num_hidden_layers=1),
    "llama-linear-rope": ModelSpec(extra=(
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),)),
    "llama-dynamic-rope": ModelSpec(max_position_embeddings=48, extra=(
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),)),
    "llama-yarn-rope": ModelSpec(extra=(("rope_parameters", {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}),)),
    "mistral-sliding-window": ModelSpec(family="mistral", num_attention_heads=6, num_key_value_heads=3, extra=(
        ("sliding_window", 24),)),
    "qwen2-biases": ModelSpec(family="qwen2", hidden_size=48, num_attention_heads=4, num_key_value_heads=4),
    "qwen3-head-norms": ModelSpec(family="qwen3", head_dim=16, num_attention_heads=4, num_key_value_heads=2, extra=(
        ("sliding_window", None),)),
}  # fmt: skip

ADAPTERS = {
    "lora": {"r": 4, "target_modules": ATTENTION_MODULES},
    "lora-all": {"r": 9},
    "rslora": {"r": 16, "use_rslora": True},
    "patterns": {
        "r": 8,
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 1},
        "alpha_pattern": {"v_proj": 5},
    },
    "one-layer": {"r": 32, "layers_to_transform": [1], "target_modules": ["down_proj", "o_proj"]},
    "dora": {"r": 5, "use_dora": True},
    "dora-attention": {"r": 12, "use_dora": True, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
}
PROMPT_LENGTHS = [1, 2, 7, 31, 32, 33, 90]


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, length)).integers(2, vocab_size, length).tolist()


def assert_parity(answer, reference: Reference, prompt: list[int], tolerance: float, same_tokens: bool) -> None:
    """Compares teacher-forced: the reference reads the engine's own tokens, so one early tie cannot hide later
    errors."""
    expected = reference.logits(prompt, answer.tokens).numpy()
    actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
    assert actual.shape == expected.shape
    scale = expected.max() - expected.min()
    assert np.abs(actual - expected).max() <= tolerance * scale
    np.testing.assert_array_equal(answer.generation_logits[0], answer.context_logits[-1])
    if same_tokens:
        assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_every_family_and_adapter_kind_in_one_batch(name: str, tmp_path: Path) -> None:
    spec = MODELS[name]
    model, engine = build_random_engine(spec, tmp_path)
    kinds = {"base": None, **ADAPTERS} if spec.num_hidden_layers > 1 else {"base": None, "dora": ADAPTERS["dora"]}
    directories = {
        kind: save_adapter(model, tmp_path / kind, seed, **settings) if settings else None
        for seed, (kind, settings) in enumerate(kinds.items())
    }
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        requests = {}
        for task_id, (kind, directory) in enumerate(directories.items()):
            lora = adaptrt.LoraConfig.from_peft(task_id, directory, engine) if directory else None
            prompt = prompt_of(PROMPT_LENGTHS[task_id % len(PROMPT_LENGTHS)], spec.vocab_size, task_id)
            requests[kind] = (prompt, make_request(prompt, 10, lora))
        ids = executor.enqueue_requests([request for _, request in requests.values()])
        answers = {kind: collect(executor, request_id) for kind, request_id in zip(requests, ids, strict=True)}
    for kind, (prompt, _) in requests.items():
        reference = Reference(model, directories[kind])
        assert_parity(answers[kind], reference, prompt, FLOAT32_TOLERANCE, same_tokens=True)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 255, 600])
def test_prompts_longer_than_a_chunk(length: int, long_prompt_engine, tmp_path: Path) -> None:
    spec, model, engine, adapter = long_prompt_engine
    config = adaptrt.ExecutorConfig(enable_chunked_context=True, max_num_tokens=64)
    prompt = prompt_of(length, spec.vocab_size)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        lora = adaptrt.LoraConfig.from_peft(1, adapter, engine)
        answer = collect(executor, executor.enqueue_request(make_request(prompt, 6, lora)))
    assert_parity(answer, Reference(model, adapter), prompt, FLOAT32_TOLERANCE, same_tokens=True)


@pytest.fixture(scope="module")
def long_prompt_engine(tmp_path_factory):
    spec = ModelSpec(num_key_value_heads=3)
    directory = tmp_path_factory.mktemp("long")
    model, engine = build_random_engine(spec, directory)
    return spec, model, engine, save_adapter(model, directory / "adapter", 5, r=8, use_dora=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", BFLOAT16_TOLERANCE), ("float16", FLOAT16_TOLERANCE)])
def test_sixteen_bit_engines(dtype: str, tolerance: float, tmp_path: Path) -> None:
    spec = ModelSpec(hidden_size=72, head_dim=24, intermediate_size=131, vocab_size=509)
    model, engine = build_random_engine(spec, tmp_path, dtype)
    for task_id, settings in enumerate(({"r": 8}, {"r": 16, "use_dora": True}, None), start=1):
        directory = save_adapter(model, tmp_path / f"adapter-{task_id}", task_id, **settings) if settings else None
        prompt = prompt_of(40, spec.vocab_size, task_id)
        with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
            lora = adaptrt.LoraConfig.from_peft(task_id, directory, engine) if directory else None
            answer = collect(executor, executor.enqueue_request(make_request(prompt, 6, lora)))
        assert_parity(answer, Reference(model, directory), prompt, tolerance, same_tokens=False)
