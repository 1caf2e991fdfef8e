"""Builds an engine directory from a checkpoint directory."""

from __future__ import annotations

import fnmatch
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import onnx

from .._core import ConfigError, EngineError
from .carried_adapters import copy_adapters, with_adapters
from .checkpoint.config import CONFIG_FILE, PRODUCER, CheckpointConfig
from .checkpoint.convert import COPIED_FILES
from .compile.assemble import LoraOptions, ProgramLimits
from .compile.checkpoint import Checkpoint
from .compile.native import CompiledNetwork, compile_network
from .compile.tensorrt.compile import (
    WEIGHTS_FILE,
    CompiledPlans,
    PlanOptions,
    compile_plans,
    plan_file,
)
from .compile.tensorrt.package import Package
from .compile.tensorrt.plan_config import TensorRtPlans
from .compile.tensorrt.process import describe_package
from .compile.tensorrt.profiles import make_profiles
from .compile.tensorrt.targets import resolve_targets, target_problems
from .config import EXTERNAL, TENSORRT, BuildConfig
from .engine_config import ADAPTERS_DIRECTORY, ENGINE_FILE, EngineConfig
from .network.decoder import build_network
from .network.onnx_file import dump_onnx, external_bytes
from .network_options import network_options
from .output_directory import producer_of, replaced_directory
from .progress import Progress, SilentProgress

ENGINE_KIND: Final = "an engine of AdaptRT"
"""What people read of the directories that may be replaced."""


@dataclass(frozen=True)
class BuildReport:
    """What build() made."""

    directory: Path
    checkpoint: CheckpointConfig
    config: BuildConfig
    engine_bytes: int
    """Of the engine file, or of the plans and their weights."""
    num_nodes: int
    compiled: CompiledNetwork | CompiledPlans
    """What the backend made of the network."""
    seconds: float


def build(
    checkpoint_dir: str | Path,
    config: BuildConfig,
    output_dir: str | Path,
    *,
    workers: int = 1,
    timing_cache: Path | None = None,
    dump_onnx_to: Path | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Compiles a checkpoint into an engine directory.

    `output_dir` must be absent, empty, or an engine that this function wrote, which is replaced; it stays as it
    was when anything goes wrong. `dump_onnx_to` also writes the network as an ONNX file. `workers` plans of a TensorRT
    engine are built at a time; `timing_cache` is TensorRT's, read where it is there and written. Raises
    CheckpointError, ConfigError, AdapterError (an adapter of lora_dir that the engine could not serve) or EngineError.
    """
    began = time.monotonic()
    checkpoint_dir, output_dir = Path(checkpoint_dir), Path(output_dir)
    progress = progress or SilentProgress()
    checkpoint = Checkpoint.open(checkpoint_dir)
    config, package = checked_config(config, checkpoint, workers, timing_cache)
    network = build_network(checkpoint.config, checkpoint.stored_tensors(), network_options(config))
    native = _compile_native(network, checkpoint, config) if package is None else None
    with replaced_directory(output_dir, is_ours=is_engine_directory, kind=ENGINE_KIND, error=EngineError) as directory:
        if dump_onnx_to is not None:
            with progress.task("Writing ONNX", external_bytes(network)) as advance:
                dump_onnx(network, checkpoint_dir, dump_onnx_to, advance)
        compiled: CompiledNetwork | CompiledPlans
        engine: str | TensorRtPlans
        if native is not None:
            compiled = native
            with progress.task("Packing", native.num_bytes) as advance:
                engine = native.write(directory / ENGINE_FILE, advance)
            engine_bytes = (directory / ENGINE_FILE).stat().st_size
        else:
            assert package is not None
            plan_options = _plan_options(config, checkpoint.config, workers, timing_cache)
            compiled = compile_plans(network, checkpoint.reader, package, plan_options, directory, progress)
            engine, engine_bytes = compiled.plans, compiled.plans.num_bytes
        for name in COPIED_FILES:
            if (checkpoint_dir / name).is_file():
                shutil.copyfile(checkpoint_dir / name, directory / name)
        stored, adapter_checksums = copy_adapters(config, directory)
        EngineConfig.of_this_release(checkpoint.config, stored, engine, adapter_checksums).save(directory)
    return BuildReport(
        directory=output_dir,
        checkpoint=checkpoint.config,
        config=stored,
        engine_bytes=engine_bytes,
        num_nodes=len(network.graph.node),
        compiled=compiled,
        seconds=time.monotonic() - began,
    )


def is_engine_directory(directory: Path) -> bool:
    """Whether a directory holds what build() writes and nothing else, so that it may be replaced."""
    if producer_of(directory / CONFIG_FILE) != PRODUCER:
        return False
    engine_files = (ENGINE_FILE, plan_file("*"), WEIGHTS_FILE)
    known = (CONFIG_FILE, ADAPTERS_DIRECTORY, *COPIED_FILES, *engine_files)
    names = [entry.name for entry in directory.iterdir() if not entry.is_symlink()]
    return (
        len(names) == len(list(directory.iterdir()))
        and all(any(fnmatch.fnmatchcase(name, pattern) for pattern in known) for name in names)
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in engine_files for name in names)
    )


def checked_config(
    config: BuildConfig, checkpoint: Checkpoint, workers: int, timing_cache: Path | None
) -> tuple[BuildConfig, Package | None]:
    """The config with everything filled in, and the package that compiles it; None: the native compiler.

    Raises ConfigError with everything that cannot be, AdapterError for adapters that the engine could not serve.
    """
    config = config.with_defaults(checkpoint.config)
    problems = config.problems(checkpoint.config)
    package = None
    if workers < 1:
        problems.append(f"workers is {workers}; it must be at least 1")
    if config.tensorrt_config is not None and config.backend == TENSORRT:
        try:
            package = describe_package()
            problems += target_problems(config.tensorrt_config.compute_capability, timing_cache, package)
        except ConfigError as error:
            problems.append(str(error))
    elif timing_cache is not None:
        problems.append(f"timing_cache {timing_cache} needs backend {TENSORRT}")
    if problems:
        raise ConfigError(f"{checkpoint.directory}: " + "; ".join(problems))
    if package is not None and config.tensorrt_config is not None:
        targets = resolve_targets(config.tensorrt_config.compute_capability, package)
        config = replace(config, tensorrt_config=replace(config.tensorrt_config, compute_capability=targets))
    return with_adapters(config, checkpoint.config), package


def _compile_native(network: onnx.ModelProto, checkpoint: Checkpoint, config: BuildConfig) -> CompiledNetwork:
    assert config.max_input_len is not None
    assert config.max_seq_len is not None
    limits = ProgramLimits(
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_input_len=config.max_input_len,
        max_seq_len=config.max_seq_len,
        max_beam_width=config.max_beam_width,
        tokens_per_block=config.tokens_per_block,
    )
    lora = None
    if config.lora_enabled:
        lora = LoraOptions(
            max_rank=config.lora_config.max_lora_rank,
            dora_enabled=config.dora_enabled,
            target_modules=tuple(config.lora_config.target_module_ids()),
        )
    return compile_network(network, checkpoint.config, checkpoint.reader, limits=limits, lora=lora)


def _plan_options(
    config: BuildConfig, checkpoint: CheckpointConfig, workers: int, timing_cache: Path | None
) -> PlanOptions:
    assert config.tensorrt_config is not None
    return PlanOptions(
        compute_capabilities=config.tensorrt_config.compute_capability,
        profiles=make_profiles(config, checkpoint),
        external_weights=config.tensorrt_config.weights == EXTERNAL,
        timing_cache=timing_cache,
        workers=workers,
    )
