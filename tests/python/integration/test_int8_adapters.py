"""Adapters that are stored as int8: the engine computes with the rounded values, as PEFT does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import adaptrt
from support.models import ModelSpec, Reference, save_adapter
from support.serving import Answer, build_random_engine, collect, make_request

SPEC = ModelSpec(hidden_size=72, head_dim=24, intermediate_size=131, vocab_size=257)
# Both sides sum in float32 in different orders.
FLOAT32_TOLERANCE = 1e-4
PROMPT = list(range(2, 60))
NUM_TOKENS = 8
INT8 = adaptrt.PeftCacheConfig(lora_storage="int8")


def rounded(values: np.ndarray, axis: int) -> np.ndarray:
    """The values as integers times one scale along `axis`: that of A's rows or B's columns."""
    scales = np.abs(values).max(axis=axis, keepdims=True) / np.float32(127)
    result: np.ndarray = np.rint(values / scales).clip(-127, 127) * scales
    return result


def save_rounded(adapter: Path, directory: Path) -> Path:
    """Writes the adapter with the values that int8 keeps."""
    directory.mkdir()
    (directory / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, values in tensors.items():
        tensors[name] = rounded(values, 1 if "lora_A" in name else 0)
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Path]]:
    """Returns a model, its engine, and adapters whose scale is a power of two, so that B rounds as in PEFT."""
    directory = tmp_path_factory.mktemp("int8")
    model, engine = build_random_engine(SPEC, directory)
    ranks = (7, 16)
    return model, engine, [save_adapter(model, directory / f"adapter-{rank}", rank, r=rank) for rank in ranks]


def answers_of(engine: Path, adapters: list[Path], cache: adaptrt.PeftCacheConfig) -> tuple[list[Answer], int]:
    """Returns the answer with each adapter, and the bytes that the cache saves."""
    with adaptrt.Executor(
        engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(peft_cache_config=cache)
    ) as executor:
        requests = [
            make_request(PROMPT, NUM_TOKENS, adaptrt.LoraConfig.from_peft(task_id, adapter, engine))
            for task_id, adapter in enumerate(adapters)
        ]
        answers = [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]
        return answers, executor.lora_cache_stats().saved_bytes


def test_an_engine_computes_what_peft_does_with_the_rounded_values(
    served: tuple[Path, Path, list[Path]], tmp_path: Path
) -> None:
    model, engine, adapters = served
    answers, saved = answers_of(engine, adapters, INT8)
    exact, saved_without = answers_of(engine, adapters, adaptrt.PeftCacheConfig())
    assert saved > 0
    assert saved_without == 0
    for number, (adapter, answer) in enumerate(zip(adapters, answers, strict=True)):
        reference = Reference(model, save_rounded(adapter, tmp_path / f"rounded-{number}"))
        expected = reference.logits(PROMPT, answer.tokens).numpy()
        found = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        tolerance = FLOAT32_TOLERANCE * (expected.max() - expected.min())
        assert np.abs(found - expected).max() <= tolerance
        assert answer.tokens == expected[len(PROMPT) - 1 :].argmax(axis=1).tolist()
        # The rounding itself is larger than the tolerance, so the comparison sees it.
        assert np.abs(exact[number].context_logits - expected[: len(PROMPT)]).max() > 2 * tolerance
