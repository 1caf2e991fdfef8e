"""Engines of backend cuda served by the ordinary executor on an emulated device, against transformers + PEFT."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.adapter_crowds import Asked
from support.emulated_cuda import emulate
from support.models import ALL_MODULES, ATTENTION_MODULES, ModelSpec, Reference, save_adapter, save_model
from support.serving import Answer, collect, make_request

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Maximum difference of logits relative to their range. The reference has the engine's weights, in float32. The engine
# rounds adapters, and activations after every kernel. bfloat16 has 8 bits, of which each of some ten roundings in a row
# may lose one half.
TOLERANCE = {"float16": 0.004, "bfloat16": 0.03}
ADAPTERS = (
    {"r": 4, "target_modules": ATTENTION_MODULES},
    {"r": 8, "target_modules": ALL_MODULES, "use_rslora": True, "lora_alpha": 8},
    {"r": 3, "target_modules": ALL_MODULES, "use_dora": True},
    {"r": 8, "target_modules": ["o_proj", "down_proj"], "use_dora": True},
)
SPEC = ModelSpec(
    vocab_size=96,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    intermediate_size=80,
    max_position_embeddings=256,
)
MODELS = {
    "llama-float16": (SPEC, "float16"),
    "llama-bfloat16": (dataclasses.replace(SPEC, tie_word_embeddings=True), "bfloat16"),
}
SIZES = BuildConfig(
    max_batch_size=6,
    max_num_tokens=24,
    max_seq_len=96,
    tokens_per_block=16,
    backend="cuda",
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)


def ask(prompt_length: int, adapter: int | None, max_tokens: int) -> Asked:
    rng = np.random.default_rng(100 * prompt_length + max_tokens)
    return Asked(rng.integers(2, SPEC.vocab_size, prompt_length).tolist(), adapter, max_tokens)


# Prompts from one token to several chunks, and more requests than fit into a batch.
CROWD = (
    ask(40, 0, 6), ask(1, None, 9), ask(17, 1, 5), ask(9, 2, 8), ask(33, None, 4), ask(5, 3, 9), ask(12, 2, 6),
    ask(27, 1, 5),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Served:
    """A model, its adapters and its engine."""

    directory: Path
    dtype: str

    @property
    def engine(self) -> Path:
        return self.directory / "engine"

    def adapter(self, number: int) -> Path:
        return self.directory / f"adapter-{number}"

    def reference(self, adapter: int | None) -> Reference:
        return Reference(self.directory / "model", None if adapter is None else self.adapter(adapter))


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    spec, dtype = MODELS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    model = save_model(spec, directory / "model", dtype=DTYPES[dtype])
    for number, lora in enumerate(ADAPTERS):
        save_adapter(model, directory / f"adapter-{number}", seed=number, **lora)
    build(Checkpoint.of_model(model), SIZES, directory / "engine")
    return Served(directory, dtype)


def config(**fields: object) -> adaptrt.ExecutorConfig:
    """Returns a config whose device level has room for two adapters of the largest rank."""
    pages = 2 * 8 * SPEC.num_hidden_layers * len(ALL_MODULES)
    cache = adaptrt.PeftCacheConfig(num_device_module_layer=pages, max_adapter_size=8, optimal_adapter_size=4)
    return adaptrt.ExecutorConfig(enable_chunked_context=True, peft_cache_config=cache, **fields)


def answers(
    served: Served, groups: Sequence[Sequence[Asked]], executor_config: adaptrt.ExecutorConfig | None = None
) -> list[Answer]:
    """Runs the groups one after the other; all requests of a group at once."""
    executor_config = config() if executor_config is None else executor_config
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, executor_config) as executor:

        def enqueue(asked: Asked) -> int:
            number = asked.adapter
            path = None if number is None else served.adapter(number)
            lora = None if path is None else adaptrt.LoraConfig.from_peft(number, path, executor.engine)
            return executor.enqueue_request(make_request(asked.prompt, asked.max_tokens, lora))

        found = []
        for group in groups:
            found += [collect(executor, request_id) for request_id in [enqueue(asked) for asked in group]]
        return found


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the maximum difference relative to the range of the expected values."""
    return float(np.abs(actual - expected).max() / (expected.max() - expected.min()))


def check_logits(served: Served, asked: Asked, answer: Answer) -> None:
    expected = served.reference(asked.adapter).logits(asked.prompt, answer.tokens).numpy()
    actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
    assert actual.shape == expected.shape
    assert difference(actual, expected) <= TOLERANCE[served.dtype], asked


def test_logits_are_those_of_transformers_and_peft(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch of requests for the base model, LoRA and DoRA, with prompts in chunks."""
    emulate(monkeypatch)
    for asked, answer in zip(CROWD, answers(served, [CROWD]), strict=True):
        check_logits(served, asked, answer)


def test_adapters_change_the_logits_by_more_than_the_tolerance(served: Served) -> None:
    """So the comparison would notice an adapter that has no effect."""
    prompt = CROWD[0].prompt
    base = served.reference(None).logits(prompt).numpy()
    for number in range(len(ADAPTERS)):
        assert difference(served.reference(number).logits(prompt).numpy(), base) > 2 * TOLERANCE[served.dtype]
