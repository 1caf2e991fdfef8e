"""Crowds of requests for several adapters, and an engine's answers to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import adaptrt
from adaptrt import _core
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig, TensorRtBuildConfig
from adaptrt.runtime.engine import LoadedEngine, load_engine
from support.models import ATTENTION_MODULES, ModelSpec, save_adapter, save_model
from support.serving import Answer, collect, make_request

MAX_RANK = 16
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 4, "target_modules": ATTENTION_MODULES},
    {"r": 16, "use_rslora": True, "lora_alpha": 8},
    {"r": 3, "use_dora": True},
    {"r": 8},
    {"r": 12, "use_dora": True, "target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]},
)
_NUM_MODULES = 7
# Maximum difference of logits relative to their range. Both engines round weights and adapters alike. The native engine
# keeps activations of float16 models in float32; the network rounds them after every operator.
TOLERANCE = {"float16": 0.004, "bfloat16": 0.03}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request of a crowd."""

    prompt: list[int]
    adapter: int | None
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to serve, and how its engines are built."""

    spec: ModelSpec
    sizes: BuildConfig

    @classmethod
    def of(cls, spec: ModelSpec, **sizes: int) -> Model:
        """Returns a model whose engines support LoRA and DoRA up to MAX_RANK."""
        plugins = PluginConfig(lora_plugin="auto", dora_plugin="enable")
        return cls(
            spec, BuildConfig(**sizes, plugin_config=plugins, lora_config=LoraBuildConfig(max_lora_rank=MAX_RANK))
        )

    def executor_config(self, **cache: int) -> adaptrt.ExecutorConfig:
        """Returns a config whose device level has room for two adapters of maximum rank."""
        # Counted in pages, as in PeftCacheConfig.
        pages = 2 * MAX_RANK * self.spec.num_hidden_layers * _NUM_MODULES
        return adaptrt.ExecutorConfig(
            enable_chunked_context=True,
            num_threads=1,
            peft_cache_config=adaptrt.PeftCacheConfig(
                num_device_module_layer=pages, max_adapter_size=MAX_RANK, optimal_adapter_size=4, **cache
            ),
        )

    def ask(self, *requests: tuple[int, int | None, int], seed: int = 11) -> list[Asked]:
        """Makes a crowd with random prompts. requests: (prompt length, adapter or None, tokens to generate)."""
        rng = np.random.default_rng(seed)
        return [
            Asked(rng.integers(2, self.spec.vocab_size, length).tolist(), adapter, max_tokens)
            for length, adapter, max_tokens in requests
        ]


SMALL = Model.of(
    ModelSpec(
        vocab_size=97, hidden_size=64, num_attention_heads=2, head_dim=64, intermediate_size=80, num_hidden_layers=2
    ),
    max_batch_size=6,
    max_num_tokens=24,
    max_seq_len=96,
    tokens_per_block=16,
)
# Prompts from one token to several chunks. The last request decodes several steps without others.
SMALL_CROWD = (
    SMALL.ask(
        (40, 0, 6), (1, None, 9), (17, 1, 5), (9, 2, 8), (33, None, 4), (5, 3, 9), (12, 4, 6), (3, 1, 7), (26, 2, 5)
    ),
    SMALL.ask((6, 3, 8), seed=12),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Served:
    """A directory with a checkpoint, its adapters, and two engines: native/ and tensorrt/."""

    directory: Path
    adapters: list[Path]

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    def native(self) -> LoadedEngine:
        return load_engine(self.directory / "native")


def make_served(model: Model, dtype: str, directory: Path, capability: str) -> Served:
    """Builds both engines, with the weights next to the plan."""
    saved = save_model(model.spec, directory / "model")
    served = Served(
        directory,
        [
            save_adapter(saved, directory / f"adapter-{number}", seed=number, **lora)
            for number, lora in enumerate(ADAPTERS)
        ],
    )
    convert_checkpoint(saved, served.checkpoint, dtype=_core.dtype_from_name(dtype))
    build(served.checkpoint, model.sizes, directory / "native")
    options = TensorRtBuildConfig(compute_capability=(capability,), weights="external")
    tensorrt = dataclasses.replace(model.sizes, backend="tensorrt", tensorrt_config=options)
    build(served.checkpoint, tensorrt, directory / "tensorrt")
    return served


def answers_of(
    engine: LoadedEngine, adapters: Sequence[Path], config: adaptrt.ExecutorConfig, groups: Sequence[Sequence[Asked]]
) -> tuple[list[Answer], adaptrt.LoraCacheStats]:
    """Runs the groups one after the other; all requests of a group at once. Returns the answers and the final counters
    of the LoRA cache.
    """
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:

        def enqueue(asked: Asked) -> int:
            number = asked.adapter
            lora = None if number is None else adaptrt.LoraConfig.from_peft(number, adapters[number], engine)
            return executor.enqueue_request(make_request(asked.prompt, asked.max_tokens, lora))

        answers = []
        for group in groups:
            answers += [collect(executor, request_id) for request_id in [enqueue(asked) for asked in group]]
        return answers, executor.lora_cache_stats()
