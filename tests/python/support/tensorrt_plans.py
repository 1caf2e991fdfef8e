"""Checkpoints that plans are built from, and the content of plans that is visible without a GPU."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

from adaptrt._core import DType, dtype_name
from adaptrt.builder.network.checkpoint_tensors import plan_rank
from adaptrt.common.safetensors_stream import SafetensorsWriter, TensorSpec
from adaptrt.formats.checkpoint.config import CheckpointConfig
from adaptrt.formats.engine.build_config import BuildConfig, PluginConfig, TensorRtBuildConfig
from adaptrt.formats.models.registry import declare

needs_tensorrt_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed"
)

CAPABILITIES = ("8.0", "8.6", "8.9", "12.0", "12.1")
"""Compute capabilities that TensorRT for RTX offers and the kernels support."""

ADAPTERS = {
    "none": PluginConfig(),
    "lora": PluginConfig(lora_plugin="auto"),
    "dora": PluginConfig(lora_plugin="auto", dora_plugin="enable"),
}
"""Adapters that an engine accepts: none, LoRA, LoRA and DoRA."""


def tensorrt_config(
    *capabilities: str, adapters: str = "none", weights: str = "constants", **sizes: int
) -> BuildConfig:
    """Returns a build config for TensorRT."""
    return BuildConfig(
        backend="tensorrt",
        tensorrt_config=TensorRtBuildConfig(compute_capability=capabilities, weights=weights),
        plugin_config=ADAPTERS[adapters],
        **sizes,
    )


def save_random_checkpoint(directory: Path, dtype: DType, **sizes: int) -> Path:
    """Saves a Llama checkpoint of random weights, 125 million with the default sizes.

    Weights must differ, because TensorRT stores equal constants only once.
    """
    config = CheckpointConfig(
        architecture="LlamaForCausalLM",
        dtype=dtype,
        **{
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_size": 64,
            "intermediate_size": 2048,
            **sizes,
        },
        norm_epsilon=1e-5,
        rotary_base=1e4,
    )
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(config.to_json())
    specs = [
        TensorSpec(tensor.name, np.dtype(dtype_name(dtype)), tensor.shape) for tensor in plan_rank(declare(config), 0)
    ]
    random = np.random.default_rng(0)
    with SafetensorsWriter(directory / "rank0.safetensors", specs) as writer:
        for spec in specs:
            writer.write(spec.name, random.random(spec.shape, np.float32).astype(spec.dtype))
    return directory


def attention_layers(layers: str, *, profile: int) -> dict[str, tuple[str, str]]:
    """Returns inputs and outputs of each PagedAttention node from TensorRT's list of a plan's layers."""
    suffix = f" [profile {profile}]" if profile else ""
    found = {}
    for line in layers.splitlines():
        match = re.fullmatch(r"Layer\(PluginV3\): ([^ ,]+)( \[profile \d+\])?, Tactic: \w+, (.*) -> (.*)", line)
        if match is not None and (match[2] or "") == suffix:
            found[match[1]] = (match[3].replace(suffix, ""), match[4].replace(suffix, ""))
    return found


def adapter_nodes(plan: Path) -> set[str]:
    """Returns the names of a plan's Lora and Dora nodes. They are inside larger layers, whose programs name them."""
    names = re.findall(rb'name="([^"]*/(?:Lora|Dora)_\d+)_U\d+_pluginType"', plan.read_bytes())
    return {name.decode() for name in names}
