"""Describes a checkpoint, an engine or an adapter, after the checks that loading it makes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .._core import (
    AdapterError,
    ConfigError,
    EngineError,
    cpu_kernels,
    dtype_name,
    impossible_cpu_kernels,
    lora_modules,
)
from ..builder.adapter.peft_config import CONFIG_FILE as PEFT_CONFIG
from ..builder.adapter.peft_reader import read_peft_adapter
from ..builder.checkpoint.config import LEARNED_POSITIONS, CheckpointConfig
from ..builder.checkpoint.rank_file import rank_file
from ..builder.compile.engine_file import EngineFile
from ..builder.compile.tensorrt.compile import plan_file
from ..builder.compile.tensorrt.plan_config import TensorRow
from ..builder.engine_config import ENGINE_FILE, EngineConfig
from ..builder.engine_quality import EngineQuality
from ..builder.models.registry import load_config
from ..builder.progress import format_bytes
from ..builder.safetensors_stream import SafetensorsReader, TensorSpec

LORA_CONFIG: Final = "model.lora_config.npy"
LORA_WEIGHTS: Final = "model.lora_weights.npy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("path", type=Path, help="directory of a checkpoint, an engine, or an adapter in either form")
    parser.add_argument("--tensors", action="store_true", help="list the tensors of a checkpoint or an engine")


def run(args: argparse.Namespace) -> int:
    """Describes one directory on stdout."""
    _describer_of(args.path)(args.path, args.tensors)
    return 0


def _describer_of(path: Path) -> Callable[[Path, bool], None]:
    kinds = {
        PEFT_CONFIG: _describe_peft_adapter,
        LORA_CONFIG: _describe_converted_adapter,
        ENGINE_FILE: _describe_native_engine,
        plan_file("*"): _describe_tensorrt_engine,
        rank_file(0): _describe_checkpoint,
    }
    for file, describe in kinds.items():
        if any(found.is_file() for found in path.glob(file)):
            return describe
    if not path.is_dir():
        raise ConfigError(f"{path}: is not a checkpoint, engine or adapter, because it is not a directory")
    *files, last = kinds
    raise ConfigError(
        f"{path}: is not a checkpoint, engine or adapter; expected a directory with {', '.join(files)} or {last}"
    )


def _describe_checkpoint(path: Path, tensors: bool) -> None:
    config = load_config(path)
    readers = [SafetensorsReader(path / rank_file(rank)) for rank in range(config.mapping.world_size)]
    num_tensors = sum(len(reader.specs) for reader in readers)
    num_bytes = sum(reader.num_bytes for reader in readers)
    rows = {
        **_model_rows(config),
        "mapping": f"tp_size {config.mapping.tp_size}, pp_size {config.mapping.pp_size}",
        "weights": f"{num_tensors} tensors, {format_bytes(num_bytes)}",
    }
    _print_table(f"{path}: checkpoint", rows)
    for reader in readers if tensors else ():
        _print_tensors(reader.path.name, reader.specs.values())


def _describe_native_engine(path: Path, tensors: bool) -> None:
    config = EngineConfig.load(path)
    file = EngineFile(path / ENGINE_FILE, config.engine_checksum)
    rows = {
        "weights": f"{len(file.tensors)} tensors, {format_bytes(file.num_bytes)}",
        "activations": format_bytes(file.program.arena_bytes),
        "kernels": _describe_kernels(),
    }
    _print_table(f"{path}: engine", _engine_rows(config, rows))
    if tensors:
        specs = (TensorSpec(name, array.dtype, array.shape) for name, array in file.tensors.items())
        _print_tensors(ENGINE_FILE, specs)


def _describe_kernels() -> str:
    """Those that run the engine on this machine, and the others."""
    chosen, *others = cpu_kernels()
    refused = [f"{name}: {reason}" for name, reason in impossible_cpu_kernels()]
    on_request = [f"on request: {', '.join(others)}"] if others else []
    return "; ".join([f"{chosen} on this machine", *on_request, *refused])


def _describe_tensorrt_engine(path: Path, tensors: bool) -> None:
    config = EngineConfig.load(path)
    plans = config.tensorrt
    if plans is None:
        raise EngineError(f"{path}: has plans, which its config.json does not know")
    plans.check_files(path)
    rows = {"compiled by": f"{plans.package} {plans.package_version}, version {plans.plugin_version} of the plugins"}
    for plan in plans.files:
        rows[f"plan {plan.compute_capability}"] = f"{plan.stored.file}, {format_bytes(plan.stored.num_bytes)}"
    rows["weights"] = (
        "in each plan" if plans.weights is None else f"{plans.weights.file}, {format_bytes(plans.weights.num_bytes)}"
    )
    rows["profiles"] = ", ".join(plans.profiles)
    _print_table(f"{path}: TensorRT engine", _engine_rows(config, rows))
    if tensors:
        print("inputs and outputs, with the largest shape in each profile:")
        for tensor in plans.tensors:
            print(f"  {_describe_row(tensor, plans.profiles)}")


def _describe_row(tensor: TensorRow, profiles: Sequence[str]) -> str:
    text = f"{tensor.name}  {tensor.mode} {tensor.dtype} {list(tensor.shape)}"
    if tensor.alias is not None:
        text += f", written over {tensor.alias}"
    if tensor.profiles:
        for name, (_, _, largest) in zip(profiles, tensor.profiles, strict=True):
            text += f", {name} {list(largest)}"
    return text


def _engine_rows(config: EngineConfig, compiled: Mapping[str, str]) -> dict[str, str]:
    """What is said of an engine; `compiled` is what its compiler made."""
    build, lora = config.build_config, config.build_config.lora_config
    rows = {
        "built by": f"adaptrt {config.version}; every checksum holds",
        **_model_rows(config.pretrained_config),
        "limits": f"max_batch_size {build.max_batch_size}, max_num_tokens {build.max_num_tokens}, "
        f"max_input_len {build.max_input_len}, max_seq_len {build.max_seq_len}",
        "KV cache": f"{config.pretrained_config.describe_kv_cache()}, {build.tokens_per_block} tokens a block",
        **compiled,
        "LoRA": "none",
    }
    if build.lora_enabled:
        rows["LoRA"] = (
            f"max_lora_rank {lora.max_lora_rank}, {', '.join(lora.lora_target_modules)}"
            f"{', DoRA' if build.dora_enabled else ''}"
        )
        rows["adapters"] = ", ".join(lora.adapter_names) or "none in the engine directory"
    if config.quality is not None:
        rows["quality"] = _describe_quality(config.quality)
    return rows


def _describe_quality(quality: EngineQuality) -> str:
    text = f"perplexity {quality.perplexity:.4f}"
    if quality.reference is not None:
        text += f", {quality.reference.perplexity:.4f} of {quality.reference.engine}"
    return f"{text}, over {quality.tokens} tokens of {quality.text}"


def _describe_peft_adapter(path: Path, tensors: bool) -> None:
    del tensors  # the rows below are the tensors
    adapter = read_peft_adapter(path)
    kind = ("DoRA" if adapter.config.use_dora else "LoRA") + (", rsLoRA scaling" if adapter.config.use_rslora else "")
    rows = {"kind": kind, "weights": f"{len(adapter.tensors)} tensors, {format_bytes(adapter.file.stat().st_size)}"}
    if adapter.config.use_dora:
        rows["magnitudes"] = "normalised" if adapter.magnitudes_normalized else "not normalised by a base"
    _print_table(f"{path}: PEFT adapter", rows)
    _print_modules(
        (key.module.name, key.layer, tensors.rank, tensors.magnitude is not None)
        for key, tensors in adapter.modules.items()
    )


def _describe_converted_adapter(path: Path, tensors: bool) -> None:
    del tensors
    config, weights = (_load_array(path / name) for name in (LORA_CONFIG, LORA_WEIGHTS))
    config = config[0] if config.ndim == 3 and config.shape[0] == 1 else config
    if config.ndim != 2 or config.shape[1] not in (3, 4) or config.dtype != np.int32:
        raise AdapterError(
            f"{path / LORA_CONFIG}: is {config.dtype} {list(config.shape)}; expected int32 [rows, 3 or 4] or [1, ...]"
        )
    names = {module.id: module.name for module in lora_modules()}
    unknown = sorted(set(config[:, 0].tolist()) - set(names))
    if unknown:
        raise AdapterError(f"{path / LORA_CONFIG}: module ids {unknown} are unknown; accepted: 0 to {max(names)}")
    dtype = "bfloat16" if weights.dtype == np.dtype("V2") else weights.dtype.name
    _print_table(
        f"{path}: converted adapter",
        {"weights": f"{dtype} {list(weights.shape)}, {format_bytes(weights.nbytes)}", "rows": str(len(config))},
    )
    _print_modules((names[row[0]], row[1], row[2], len(row) == 4 and row[3] != 0) for row in config.tolist())


def _load_array(path: Path) -> np.ndarray[Any, np.dtype[Any]]:
    try:
        array: np.ndarray[Any, np.dtype[Any]] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError) as reason:
        raise AdapterError(f"{path}: cannot be read: {reason}") from None
    return array


def _model_rows(config: CheckpointConfig) -> dict[str, str]:
    attention = [
        f"{config.num_attention_heads} heads of {config.head_size}",
        f"{config.num_key_value_heads} for k and v",
    ]
    if config.qk_layernorm:
        attention.append("q and k normalised")
    if config.sliding_window is not None:
        attention.append(f"window of {config.sliding_window} in {len(config.sliding_window_layers)} layers")
    quantised = [] if config.quantization is None else [config.quantization.describe()]
    if config.int8_kv_cache:
        quantised.append("int8 KV cache")
    biases = {"qkv": config.attn_bias, "dense": config.attn_dense_bias, "mlp": config.mlp_bias}
    scaling = config.rotary_scaling
    return {
        "architecture": config.architecture,
        "dtype": dtype_name(config.dtype),
        "quantization": ", ".join(quantised) or "none",
        "layers": f"{config.num_hidden_layers} of hidden size {config.hidden_size}, mlp {config.intermediate_size}",
        "attention": ", ".join(attention),
        "biases": ", ".join(name for name, present in biases.items() if present) or "none",
        "positions": f"{config.max_position_embeddings}, "
        + (
            "learned"
            if config.position_embedding_type == LEARNED_POSITIONS
            else f"rotary base {config.rotary_base:g}, "
            + (f"{scaling.rope_type} scaling by {scaling.factor:g}" if scaling else "not scaled")
        ),
        "vocabulary": f"{config.vocab_size}, "
        + ("tied" if config.share_embedding_table else "not tied")
        + " to lm_head",
    }


def _print_table(title: str, rows: Mapping[str, str]) -> None:
    print(title)
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value}")


def _print_tensors(file: str, specs: Iterable[TensorSpec]) -> None:
    print(f"{file}:")
    for spec in specs:
        print(f"  {spec.name}  {spec.dtype} {list(spec.shape)}")


def _print_modules(modules: Iterable[tuple[str, int, int, bool]]) -> None:
    """One line for each module, rank and kind: the layers that have it."""
    layers_of: dict[tuple[str, int, bool], list[int]] = {}
    for name, layer, rank, is_dora in modules:
        layers_of.setdefault((name, rank, is_dora), []).append(layer)
    width = max((len(name) for name, _, _ in layers_of), default=0)
    for (name, rank, is_dora), layers in layers_of.items():
        magnitudes = " with magnitudes" if is_dora else ""
        print(f"  {name:<{width}}  rank {rank}{magnitudes} in layers {_ranges(sorted(layers))}")


def _ranges(numbers: list[int]) -> str:
    """0-3, 5 for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


if __name__ == "__main__":
    from ..builder.cli import run_command

    sys.exit(
        run_command(
            sys.modules[__name__], sys.argv[1:], prog="python -m adaptrt.tools.inspect", description=__doc__ or ""
        )
    )
