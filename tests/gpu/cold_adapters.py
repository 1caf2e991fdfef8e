"""Times to the first token of a prompt whose adapter is on the device, on the host level, or in files."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import Row
from safetensors.torch import save_file

from adaptrt import LoraConfig, OutputConfig, Request, _core
from adaptrt.common.parallel import num_part_threads, use_threads
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.network.adapter_sites import AdaptedModules

TARGET = 1 / 1.15
"""Minimum of the time with an adapter on the device, relative to that with one that is not."""


def first_token_rows(
    name: str, executor: _core.Executor, adapter: Any, modules: AdaptedModules, prompt: Sequence[int], resident: int,
    cold: Sequence[int], from_disk: Sequence[int],
) -> Iterator[Row]:  # fmt: skip
    """adapter: a RandomAdapter, whose values all adapters have. resident: an adapter on the device. cold: adapters that
    only the host level has. from_disk: numbers that no adapter has yet.

    Raises RuntimeError if the logits of an adapter that was loaded differ from those of one on the device.
    """
    executor.pin_adapter(resident)
    logits: list[bytes] = []

    def seconds(configs: Sequence[Callable[[], LoraConfig]]) -> float:
        times = []
        for config in configs:
            begin = time.monotonic()
            logits.append(_first_logits(executor, prompt, config()))
            times.append(time.monotonic() - begin)
        return statistics.median(times)

    seconds([lambda: LoraConfig(resident)] * 2)
    warm = seconds([lambda: LoraConfig(resident)] * len(cold))
    begin = executor.lora_cache_stats()
    from_host = seconds([lambda task=task: LoraConfig(task) for task in cold])  # type: ignore[misc]
    end = executor.lora_cache_stats()
    if end.device_misses - begin.device_misses != len(cold):
        raise RuntimeError(f"{end.device_misses - begin.device_misses} of {len(cold)} cold adapters were loaded")
    with tempfile.TemporaryDirectory(prefix="adaptrt-") as directory:
        write_peft(Path(directory), adapter, modules)

        def read(task: int) -> LoraConfig:
            with use_threads(num_part_threads()):
                converted = convert_adapter(directory, storage_dtype="bfloat16", modules=modules)
            return LoraConfig(task, converted.weights, converted.config)

        begin_read = time.monotonic()
        read(0)
        reading = time.monotonic() - begin_read
        on_disk = seconds([lambda task=task: read(task) for task in from_disk])  # type: ignore[misc]
    executor.unpin_adapter(resident)
    if len(set(logits)) != 1:
        raise RuntimeError(f"{len(set(logits))} different logits of one prompt, with adapters on and off the device")
    note = f"{end.staged_loads} staged loads, {end.pinned_bytes / 1e6:.0f} MB pinned; same logits"
    what = f"{name}: first token of {len(prompt)}"
    for where, found in (("host level", from_host), ("files in the page cache", on_disk)):
        yield Row(
            f"{what}, adapter from {where} / on the device", found * 1e6, "us", warm * 1e6, warm / found, TARGET, note
        )
    yield Row(f"{what}: read and convert the adapter", reading * 1e6, "us", note=f"{num_part_threads()} threads")


def write_peft(directory: Path, adapter: Any, modules: AdaptedModules) -> None:
    """Writes a RandomAdapter as a PEFT directory."""
    path_of = {(module.layer, module.module): path for path, module in modules.by_path.items()}
    names = {info.id: info.name for info in _core.lora_modules()}
    tensors, rank = {}, 0
    for row, (module_id, layer, rank, _) in zip(adapter.weights, adapter.config, strict=True):
        path = f"base_model.model.{path_of[layer, names[module_id]]}"
        sizes = modules.sizes_of(layer, names[module_id])
        assert sizes is not None
        inputs, outputs = sizes
        values = torch.from_numpy(np.ascontiguousarray(row).view(np.int16)).view(torch.bfloat16)
        a, b = values[: rank * inputs], values[rank * inputs : rank * (inputs + outputs)]
        tensors[f"{path}.lora_A.weight"] = a.reshape(rank, inputs).clone()
        tensors[f"{path}.lora_B.weight"] = b.reshape(outputs, rank).clone()
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted({path.rpartition(".")[2] for path in path_of.values()} - {"lm_head", "embed_tokens"})
    fields = {"peft_type": "LORA", "r": int(rank), "lora_alpha": int(rank), "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(fields))


def _first_logits(executor: _core.Executor, prompt: Sequence[int], lora: LoraConfig) -> bytes:
    output = OutputConfig(exclude_input_from_output=True, return_generation_logits=True)
    request = Request(list(prompt), 1, output_config=output, lora_config=lora)
    for response in executor.await_responses(executor.enqueue_request(request)):
        if response.has_error():
            raise RuntimeError(response.error_msg)
        logits = response.result.generation_logits
    return bytes(np.asarray(logits).tobytes())
