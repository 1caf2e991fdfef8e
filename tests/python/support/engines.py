"""Checkpoints, compiled networks and engine directories of small random models, made in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from adaptrt._core import DType
from adaptrt.builder.build import BuildReport, build
from adaptrt.builder.compile.native import CompiledNetwork, compile_network
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_graph import NetworkOptions, onnx_graph
from adaptrt.builder.network.stored_tensors import stored_tensors
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.models import ModelSpec, save_model

ADAPTABLE = NetworkOptions(tokens_per_block=4, max_lora_rank=8, dora=True)
SMALL = BuildConfig(max_batch_size=8, max_num_tokens=64, max_seq_len=96, tokens_per_block=4)
WITH_ADAPTERS = replace(
    SMALL,
    max_input_len=64,
    lora_config=LoraBuildConfig(max_lora_rank=8, lora_target_modules=("attn_q", "attn_k", "attn_v")),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)


def make_checkpoint(spec: ModelSpec, directory: Path, dtype: DType | None = None) -> Path:
    """Makes a checkpoint of a random model. Its Hugging Face directory is `directory`/model."""
    save_model(spec, directory / "model")
    convert_checkpoint(directory / "model", directory / "checkpoint", dtype=dtype)
    return directory / "checkpoint"


def make_network(checkpoint: Path, options: NetworkOptions = ADAPTABLE) -> tuple[Checkpoint, onnx.ModelProto]:
    """Returns an opened checkpoint and its graph."""
    opened = Checkpoint.open(checkpoint)
    return opened, make_graph(opened, options)


def make_graph(checkpoint: Checkpoint, options: NetworkOptions) -> onnx.ModelProto:
    """Returns the graph of a checkpoint in a directory."""
    stored = stored_tensors(checkpoint.ranks[0].reader, checkpoint.config.quantization)
    return onnx_graph(checkpoint.network, stored, options)


def compile_model(checkpoint: Checkpoint, config: BuildConfig = WITH_ADAPTERS) -> CompiledNetwork:
    """Compiles a checkpoint with the native compiler."""
    return compile_network(checkpoint.network, checkpoint.ranks[0], config.with_defaults(checkpoint.config))


def make_engine(
    spec: ModelSpec, directory: Path, config: BuildConfig = SMALL, dtype: DType | None = None, **options: Any
) -> BuildReport:
    """Makes the engine directory `directory`/engine of a random model."""
    return build(make_checkpoint(spec, directory, dtype), config, directory / "engine", **options)
