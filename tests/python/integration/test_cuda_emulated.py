"""Engines of backend cuda served by the ordinary executor on an emulated device, against transformers + PEFT."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import adaptrt_cuda_emulated
import numpy as np
import pytest
import torch
import transformers

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.common.file_digest import sha256_of
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.runtime.receipts import differences, environment_of
from support.adapter_crowds import Asked
from support.emulated_cuda import emulate
from support.models import (
    ALL_MODULES,
    ATTENTION_MODULES,
    ModelSpec,
    Reference,
    save_adapter,
    save_model,
)
from support.serving import Answer, collect, make_request

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Maximum difference of logits relative to their range. The reference has the engine's weights, in float32. The engine
# rounds adapters, and activations after every kernel. bfloat16 has 8 bits, of which each of some ten roundings in a row
# may lose one half.
TOLERANCE = {"float16": 0.004, "bfloat16": 0.03}
# Engines that round activations differently also round some keys and values to neighbouring integers, and an integer is
# one of 127 steps. tests/cpp/cuda compares the integers themselves.
INT8_TOLERANCE = 0.02
VOCABULARY = ("lm_head", "embed_tokens")
ADAPTERS = (
    {"r": 4, "target_modules": ATTENTION_MODULES, "lora_bias": True, "trainable_token_indices": list(range(40, 48))},
    {"r": 8, "target_modules": [*ALL_MODULES, *VOCABULARY], "use_rslora": True, "lora_alpha": 8},
    # Qwen2 has biases.
    {"r": 3, "target_modules": ALL_MODULES, "use_dora": True, "bias": "lora_only"},
    {"r": 8, "target_modules": ["o_proj", "down_proj", *VOCABULARY], "use_dora": True},
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
    "qwen2-bfloat16": (dataclasses.replace(SPEC, family="qwen2"), "bfloat16"),
    "mistral-bfloat16": (
        dataclasses.replace(SPEC, family="mistral", extra=(("sliding_window", 16),)),
        "bfloat16",
    ),
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


# Prompts from one token to two chunks, and each adapter. Emulated threads are slow, so there are few tokens.
CROWD = (
    ask(30, 0, 3), ask(1, None, 4), ask(17, 1, 3), ask(9, 2, 4), ask(20, None, 2), ask(5, 3, 3), ask(12, 2, 2),
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


# The other models differ from these in ops that are computed row by row.
COMPARED_BIT_BY_BIT = pytest.mark.parametrize(
    "served", [pytest.param("llama-float16", marks=pytest.mark.nightly), "mistral-bfloat16"], indirect=True
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.nightly) if name == "llama-bfloat16" else name for name in MODELS],
)
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
    check_difference(answer, expected, TOLERANCE[served.dtype])


def check_difference(answer: Answer, expected: np.ndarray, tolerance: float) -> None:
    actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
    assert actual.shape == expected.shape
    assert difference(actual, expected) <= tolerance


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


@COMPARED_BIT_BY_BIT
def test_bits_are_the_same_alone_and_in_a_crowd(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    together = answers(served, [CROWD])
    alone = answers(served, [[asked] for asked in CROWD])
    for asked, first, second in zip(CROWD, together, alone, strict=True):
        assert first.same_bits(second), asked


@COMPARED_BIT_BY_BIT
def test_bits_are_the_same_in_other_chunks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    asked = [each for each in CROWD if len(each.prompt) > 16]
    whole = answers(served, [[each] for each in asked])
    small = answers(served, [[each] for each in asked], config(max_num_tokens=16))
    for first, second in zip(whole, small, strict=True):
        assert first.same_bits(second)


@pytest.mark.parametrize("served", ["llama-float16"], indirect=True)
def test_bits_are_the_same_with_and_without_graphs(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        emulated = emulate(patch, cuda_graphs=True)
        with_graphs = answers(served, [CROWD])
        assert emulated.devices[0].calls("capture") > 0
        assert emulated.devices[0].calls("launch") > 0
    with monkeypatch.context() as patch:
        emulated = emulate(patch, cuda_graphs=False)
        without = answers(served, [CROWD])
        assert emulated.devices[0].calls("capture") == 0
    for first, second in zip(with_graphs, without, strict=True):
        assert first.same_bits(second)


def test_bits_are_the_same_if_steps_are_begun_ahead(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are greedy, with and without an adapter, with end tokens and stop words; a sampled one waits."""
    output = adaptrt.OutputConfig(return_log_probs=True, top_log_probs=2, exclude_input_from_output=True)

    def request(number: int, **fields: Any) -> adaptrt.Request:
        lora = adaptrt.LoraConfig.from_peft(0, llama.adapter(0), llama.engine) if number % 2 else None
        prompt = ask(5 + number, None, 9).prompt
        return adaptrt.Request(prompt, 9, output_config=output, lora_config=lora, **fields)

    def served(requests: list[Any], **settings: Any) -> tuple[list[Answer], int]:
        with monkeypatch.context() as patch:
            emulate(patch, **settings)
            with adaptrt.Executor(llama.engine, adaptrt.ModelType.DECODER_ONLY, config()) as executor:
                answers = [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]
                return answers, sum(step.begun_ahead for step in executor.get_latest_iteration_stats())

    whole, _ = served([request(number) for number in range(4)], look_ahead=False)
    ends: list[dict[str, Any]] = [
        {},
        {"end_id": whole[1].tokens[4]},
        {"stop_words": [whole[2].tokens[2:4]]},
        {},
    ]
    crowd = [request(number, **fields) for number, fields in enumerate(ends)]
    expected, num_ahead = served(crowd, look_ahead=False)
    assert num_ahead == 0
    assert len(expected[1].tokens) < 9
    for settings in ({}, {"cuda_graphs": False}):
        found, num_ahead = served(crowd, **settings)
        assert num_ahead > 3
        for first, second in zip(expected, found, strict=True):
            assert first.same_log_probs(second)
    sampled = request(4, sampling_config=adaptrt.SamplingConfig(top_k=20, seed=3))
    expected, _ = served([*crowd, sampled], look_ahead=False)
    found, _ = served([*crowd, sampled])
    for first, second in zip(expected, found, strict=True):
        assert first.same_log_probs(second)


SAMPLING = (
    {},
    {"top_k": 20, "temperature": 1.5, "seed": 3},
    {"top_k": 50, "top_p": 0.8, "temperature": 2.0, "seed": 4},
    {"top_k": 40, "min_p": 0.05, "seed": 5},
)


def test_tokens_and_log_probs_are_those_of_whole_rows(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that return logits get whole rows; the others what the device finds in them."""
    emulate(monkeypatch)
    prompts = [ask(10, None, length).prompt for length in range(1, 1 + len(SAMPLING))]
    with adaptrt.Executor(llama.engine, adaptrt.ModelType.DECODER_ONLY, config()) as executor:

        def served_with(*, with_logits: bool) -> list[Answer]:
            ids = [
                executor.enqueue_request(
                    make_request(prompt, 5, with_logits=with_logits, sampling_config=adaptrt.SamplingConfig(**sampling))
                )
                for prompt, sampling in zip(prompts, SAMPLING, strict=True)
            ]
            return [collect(executor, request_id) for request_id in ids]

        for row, found in zip(served_with(with_logits=True), served_with(with_logits=False), strict=True):
            assert row.same_log_probs(found)
            assert row.generation_logits.size > 0
            assert found.generation_logits.size == 0


def test_bits_are_the_same_if_layers_are_copied_ahead_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(dataclasses.replace(SPEC, num_hidden_layers=4), tmp_path / "model", dtype=torch.bfloat16)
    save_adapter(model, tmp_path / "adapter-0", seed=0, r=4)
    build(Checkpoint.of_model(model), SIZES, tmp_path / "engine")
    deep, crowd = Served(tmp_path, "bfloat16"), (ask(18, 0, 3), ask(5, None, 2))
    emulated = emulate(monkeypatch)
    with pytest.raises(adaptrt.ConfigError, match="weight_memory is 1; expected at least") as refused:
        answers(deep, [crowd], config(weight_memory=1))
    least = int(str(refused.value).split("expected at least ")[1].split(":")[0])
    all_on_gpu = answers(deep, [crowd])
    assert emulated.devices[-1].calls("wait") == 0
    limited = answers(deep, [crowd], config(weight_memory=least))
    assert emulated.devices[-1].calls("wait") > 0
    assert emulated.devices[-1].calls("capture") == 0
    for first, second in zip(all_on_gpu, limited, strict=True):
        assert first.same_bits(second)


@pytest.mark.parametrize("served", ["mistral-bfloat16"], indirect=True)
def test_a_reused_prompt_has_the_same_bits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    asked = dataclasses.replace(CROWD[0], adapter=2)
    first, second = answers(served, [[asked], [asked]])
    assert first.tokens == second.tokens
    assert first.generation_logits.tobytes() == second.generation_logits.tobytes()


@dataclasses.dataclass(frozen=True)
class Other:
    """A family whose network has ops that those above do not have."""

    settings: Any
    targets: tuple[str, ...] = tuple(ALL_MODULES)

    def config(self) -> Any:
        return self.settings


SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 80, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
LONG = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
OTHERS = {
    "scaled residuals": Other(
        transformers.GraniteConfig(
            **SHAPE, residual_multiplier=0.6, logits_scaling=3.0, embedding_multiplier=2.0, attention_multiplier=0.3
        )
    ),
    "layers without positions": Other(transformers.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0])),
    "a part of each head rotated": Other(
        transformers.Phi3Config(
            **SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
        ),
        ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    ),
    "GELU and scaled embeddings": Other(transformers.GemmaConfig(**SHAPE, head_dim=32)),
    "ReLU": Other(transformers.LlamaConfig(**SHAPE, hidden_act="relu")),
    "angles that depend on the prompt's length": Other(
        transformers.LlamaConfig(**{**SHAPE, "max_position_embeddings": 32}, rope_parameters=LONG)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ops_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    other = OTHERS[name]
    model = save_model(other, tmp_path / "model", dtype=torch.bfloat16)
    save_adapter(model, tmp_path / "adapter-0", seed=0, r=4, target_modules=list(other.targets))
    save_adapter(model, tmp_path / "adapter-1", seed=1, r=4, target_modules=list(other.targets), use_dora=True)
    build(Checkpoint.of_model(model), SIZES, tmp_path / "engine")
    other_served = Served(tmp_path, "bfloat16")
    crowd = (ask(40, 0, 2), ask(12, None, 2), ask(9, 1, 2))
    for asked, answer in zip(crowd, answers(other_served, [crowd]), strict=True):
        check_logits(other_served, asked, answer)


def test_an_adapter_acts_from_its_invocation_on(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """An aLoRA, in a batch with others, whose prompt is cut before, within and behind its invocation."""
    emulate(monkeypatch)
    invocation = [7, 3, 9]
    prompt = [*ask(19, None, 4).prompt, *invocation, *ask(12, None, 4).prompt]
    directory = llama.directory / "alora"
    save_adapter(
        llama.directory / "model", directory, 5, 3.0, r=4, alora_invocation_tokens=invocation,
        target_modules=ALL_MODULES,
    )  # fmt: skip
    start = adaptrt.invocation_start(directory, prompt)
    with adaptrt.Executor(llama.engine, adaptrt.ModelType.DECODER_ONLY, config(max_num_tokens=16)) as executor:
        lora = adaptrt.LoraConfig.from_peft(5, directory, executor.engine, active_from=start)
        other = executor.enqueue_request(make_request(CROWD[2].prompt, 4))
        answer = collect(executor, executor.enqueue_request(make_request(prompt, 4, lora)))
        collect(executor, other)
    # PEFT looks for the invocation in the tokens of each forward pass.
    expected = Reference(llama.directory / "model", directory).logits([*prompt, *answer.tokens[:-1]]).numpy()
    check_difference(answer, expected, TOLERANCE[llama.dtype])
    base = Reference(llama.directory / "model").logits([*prompt, *answer.tokens[:-1]]).numpy()
    assert difference(base, expected) > 2 * TOLERANCE[llama.dtype]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = tmp_path_factory.mktemp("llama")
    model = save_model(SPEC, directory / "model", dtype=torch.bfloat16)
    save_adapter(model, directory / "adapter-0", seed=0, r=4)
    build(Checkpoint.of_model(model), SIZES, directory / "engine")
    return Served(directory, "bfloat16")


def test_int8_keys_and_values_are_those_of_the_cpu_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, decodes, and reused blocks; the same bits alone."""
    emulate(monkeypatch)
    model = save_model(SPEC, tmp_path / "model", dtype=torch.float16)
    adapter = save_adapter(model, tmp_path / "adapter-0", seed=0, r=4)
    crowd = (ask(30, 0, 4), ask(9, None, 4), ask(1, 0, 3))
    engines = {}
    for name, backend, int8 in (("cuda", "cuda", True), ("native", "native", True), ("plain", "cuda", False)):
        directory = tmp_path / name
        sizes = dataclasses.replace(SIZES, backend=backend)
        build(Checkpoint.of_model(model), sizes, directory / "engine", int8_kv_cache=int8)
        (directory / "adapter-0").symlink_to(adapter)
        engines[name] = Served(directory, "float16")
    together, expected, plain = (answers(served, [crowd]) for served in engines.values())
    alone = answers(engines["cuda"], [[asked] for asked in crowd])
    for answer, by_itself, native, without in zip(together, alone, expected, plain, strict=True):
        assert answer.same_bits(by_itself)
        assert not answer.same_bits(without)
        assert answer.tokens == native.tokens
        assert difference(logits_of(answer), logits_of(native)) <= INT8_TOLERANCE
    _, reused = answers(engines["cuda"], [[crowd[0]], [crowd[0]]])
    assert reused.generation_logits.tobytes() == together[0].generation_logits.tobytes()


def logits_of(answer: Answer) -> np.ndarray:
    return np.concatenate([answer.context_logits, answer.generation_logits[1:]])


def test_a_device_without_the_memory_is_refused(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, total_bytes=10_000)
    with pytest.raises(adaptrt.ConfigError, match="of 10000 bytes are free"):
        adaptrt.Executor(llama.engine, adaptrt.ModelType.DECODER_ONLY, config())


def test_memory_of_the_chosen_gpu_is_given_back(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = emulate(monkeypatch)
    chosen = adaptrt.ParallelConfig(device_ids=[1])
    with adaptrt.Executor(llama.engine, adaptrt.ModelType.DECODER_ONLY, config(parallel_config=chosen)) as executor:
        assert emulated.indices == [1]
        collect(executor, executor.enqueue_request(make_request([5, 6, 7], 2)))
        (device,) = emulated.devices
        assert device.memory().free_bytes < device.memory().total_bytes
        # Receipts have the GPU of this number, and tell another one.
        here = environment_of(executor)
    expected = {"library": sha256_of(Path(adaptrt_cuda_emulated.__file__)), "compute_capability": "8.0"}
    assert (here["gpu"], emulated.indices) == (expected, [1, 1])
    (said,) = differences(here | {"gpu": expected | {"compute_capability": "9.0"}}, here)
    assert said.startswith("gpu is ")
    del executor
    assert device.memory().free_bytes == device.memory().total_bytes


def test_adapters_are_kept_in_pinned_memory(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    with adaptrt.Executor(llama.engine, adaptrt.ModelType.DECODER_ONLY, config()) as executor:
        assert executor.lora_cache_stats().pinned_bytes == 0
        lora = adaptrt.LoraConfig.from_peft(7, llama.adapter(0), executor.engine)
        collect(executor, executor.enqueue_request(make_request([5, 6, 7], 2, lora)))
        stats = executor.lora_cache_stats()
    assert stats.pinned_bytes >= stats.host_bytes_used > 0
    assert (stats.device_misses, stats.staged_loads) == (1, 0)


def test_a_lost_device_ends_the_executor_with_its_reason(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = emulate(monkeypatch)
    executor = adaptrt.Executor(llama.engine, adaptrt.ModelType.DECODER_ONLY, config())
    emulated.devices[0].fail("synchronize", for_good=True)
    request_id = executor.enqueue_request(adaptrt.Request([5, 6, 7], 3))
    failed = executor.await_responses(request_id)[-1]
    assert "the device cannot be used any more" in failed.error_msg
    with pytest.raises(adaptrt.ExecutorClosedError, match="the device cannot be used any more"):
        executor.await_responses(executor.enqueue_request(adaptrt.Request([5, 6, 7], 3)))


def test_a_second_level_of_the_kv_cache_is_refused(
    llama: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    kv = adaptrt.KvCacheConfig(host_cache_size=1 << 20, host_cache_dir=str(tmp_path))
    with pytest.raises(adaptrt.ConfigError, match=r"kv_cache_config\.host_cache_size is \d+; accepted: None and 0"):
        adaptrt.Executor(llama.engine, adaptrt.ModelType.DECODER_ONLY, config(kv_cache_config=kv))


def test_prompt_tables_are_refused(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    with adaptrt.Executor(llama.engine, adaptrt.ModelType.DECODER_ONLY, config()) as executor:
        tuning = adaptrt.PromptTuningConfig(np.zeros((1, SPEC.hidden_size), np.float32))
        with pytest.raises(adaptrt.RequestError, match="prompt_tuning_config is given; accepted: None"):
            executor.enqueue_request(adaptrt.Request([3], 1, prompt_tuning_config=tuning))
