"""Requests to engines of backend cuda on an emulated device, alone and in crowds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import BuildConfig

from .adapter_crowds import Asked
from .emulated_cuda import emulate
from .families import Family, save_family
from .models import save_adapter
from .serving import Answer, collect, make_request

ADAPTERS: tuple[dict[str, Any], ...] = ({"r": 4}, {"r": 3, "use_dora": True})


def ask(prompt_length: int, adapter: int | None, max_tokens: int) -> Asked:
    """Returns a request for a model of at least 96 tokens."""
    rng = np.random.default_rng(100 * prompt_length + max_tokens)
    return Asked(rng.integers(2, 96, prompt_length).tolist(), adapter, max_tokens)


CROWD = (ask(27, 0, 2), ask(2, None, 3), ask(17, 1, 2))


@dataclasses.dataclass(frozen=True)
class ServedCuda:
    """A model's adapters and its engine, and the answers to the requests of CROWD alone."""

    directory: Path
    alone: list[Answer]


def answers(
    directory: Path, groups: Sequence[Sequence[Asked]], **fields: Any
) -> tuple[list[Answer], list[adaptrt.IterationStats]]:
    """Runs the groups one after the other; all requests of a group at once. fields: of ExecutorConfig."""
    config = adaptrt.ExecutorConfig(**{"enable_chunked_context": True, **fields})
    with adaptrt.Executor(directory / "engine", adaptrt.ModelType.DECODER_ONLY, config) as executor:
        loras = [
            adaptrt.LoraConfig.from_peft(number, directory / f"adapter-{number}", executor.engine)
            for number in range(len(ADAPTERS))
        ]
        found, stats = [], []
        for group in groups:
            requests = [
                make_request(one.prompt, one.max_tokens, None if one.adapter is None else loras[one.adapter])
                for one in group
            ]
            ids = [executor.enqueue_request(request) for request in requests]
            found += [collect(executor, request_id) for request_id in ids]
            stats += executor.get_latest_iteration_stats()
        return found, stats


def serve_alone(family: Family, config: BuildConfig, directory: Path) -> ServedCuda:
    """Builds an engine in bfloat16 and its adapters, and serves the requests of CROWD one after the other."""
    model = save_family(family, directory / "model", dtype=torch.bfloat16)
    for number, lora in enumerate(ADAPTERS):
        save_adapter(model, directory / f"adapter-{number}", seed=number, target_modules=family.targets, **lora)
    build(Checkpoint.of_model(model), config, directory / "engine")
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        none = adaptrt.KvCacheConfig(enable_block_reuse=False)
        return ServedCuda(directory, answers(directory, [[asked] for asked in CROWD], kv_cache_config=none)[0])
