"""Builds an engine directory from a checkpoint directory."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .._core import AdapterError, ConfigError, EngineError, ModelShape, dtype_name, lora_modules
from .adapter import convert_adapter
from .adapter_copy import copy_adapter
from .checkpoint.config import CONFIG_FILE, PRODUCER, CheckpointConfig
from .checkpoint.convert import COPIED_FILES
from .compile.arena import Arena
from .compile.assemble import LoraOptions, ProgramLimits
from .compile.checkpoint import Checkpoint
from .compile.native import compile_network
from .config import DEFAULT_TARGET_MODULES, BuildConfig
from .engine_config import ADAPTERS_DIRECTORY, ENGINE_FILE, EngineConfig
from .network.decoder import NetworkOptions, build_network
from .network.onnx_file import dump_onnx, external_bytes
from .output_directory import producer_of, replaced_directory
from .progress import Progress, SilentProgress


@dataclass(frozen=True)
class BuildReport:
    """What build() made."""

    directory: Path
    checkpoint: CheckpointConfig
    config: BuildConfig
    engine_bytes: int
    num_nodes: int
    num_ops: int
    num_sites: int
    arena: Arena
    seconds: float


def build(
    checkpoint_dir: str | Path,
    config: BuildConfig,
    output_dir: str | Path,
    *,
    dump_onnx_to: Path | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Compiles a checkpoint into an engine directory.

    `output_dir` must be absent, empty, or an engine that this function wrote, which is replaced; it stays as it
    was when anything goes wrong. `dump_onnx_to` also writes the network as an ONNX file. Raises CheckpointError,
    ConfigError, AdapterError (an adapter of lora_dir that the engine could not serve) or EngineError.
    """
    began = time.monotonic()
    checkpoint_dir, output_dir = Path(checkpoint_dir), Path(output_dir)
    progress = progress or SilentProgress()
    checkpoint = Checkpoint.open(checkpoint_dir)
    config = config.with_defaults(checkpoint.config)
    problems = config.problems(checkpoint.config)
    if problems:
        raise ConfigError(f"{checkpoint_dir}: " + "; ".join(problems))
    config = _with_adapters(config, checkpoint.config)
    options = NetworkOptions(
        tokens_per_block=config.tokens_per_block,
        max_lora_rank=config.lora_config.max_lora_rank if config.lora_enabled else None,
        dora=config.dora_enabled,
    )
    network = build_network(checkpoint.config, checkpoint.stored_tensors(), options)
    compiled = compile_network(
        network,
        checkpoint.config,
        checkpoint.reader,
        limits=_limits(config),
        lora=_lora_options(config) if config.lora_enabled else None,
    )
    with replaced_directory(
        output_dir, is_ours=is_engine_directory, kind="an engine of AdaptRT", error=EngineError
    ) as directory:
        if dump_onnx_to is not None:
            with progress.task("Writing ONNX", external_bytes(network)) as advance:
                dump_onnx(network, checkpoint_dir, dump_onnx_to, advance)
        with progress.task("Packing", compiled.num_bytes) as advance:
            checksum = compiled.write(directory / ENGINE_FILE, advance)
        engine_bytes = (directory / ENGINE_FILE).stat().st_size
        for name in COPIED_FILES:
            if (checkpoint_dir / name).is_file():
                shutil.copyfile(checkpoint_dir / name, directory / name)
        stored, adapter_checksums = _copy_adapters(config, directory)
        EngineConfig.of_this_release(checkpoint.config, stored, checksum, adapter_checksums).save(directory)
    return BuildReport(
        directory=output_dir,
        checkpoint=checkpoint.config,
        config=stored,
        engine_bytes=engine_bytes,
        num_nodes=compiled.num_nodes,
        num_ops=compiled.num_ops,
        num_sites=len(compiled.program.lora.sites) if compiled.program.lora else 0,
        arena=compiled.arena,
        seconds=time.monotonic() - began,
    )


def is_engine_directory(directory: Path) -> bool:
    """Whether a directory holds what build() writes and nothing else, so that it may be replaced."""
    if producer_of(directory / CONFIG_FILE) != PRODUCER or not (directory / ENGINE_FILE).is_file():
        return False
    known = {CONFIG_FILE, ENGINE_FILE, ADAPTERS_DIRECTORY, *COPIED_FILES}
    return all(entry.name in known and not entry.is_symlink() for entry in directory.iterdir())


def _limits(config: BuildConfig) -> ProgramLimits:
    assert config.max_input_len is not None
    assert config.max_seq_len is not None
    return ProgramLimits(
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_input_len=config.max_input_len,
        max_seq_len=config.max_seq_len,
        max_beam_width=config.max_beam_width,
        tokens_per_block=config.tokens_per_block,
    )


def _lora_options(config: BuildConfig) -> LoraOptions:
    ids = {info.name: info.id for info in lora_modules()}
    return LoraOptions(
        max_rank=config.lora_config.max_lora_rank,
        dora_enabled=config.dora_enabled,
        target_modules=tuple(sorted(ids[name] for name in config.lora_config.lora_target_modules)),
    )


def _with_adapters(config: BuildConfig, checkpoint: CheckpointConfig) -> BuildConfig:
    """The config with target modules and adapter names, after the adapters were found fit for the engine."""
    if not config.lora_enabled:
        return config
    lora = config.lora_config
    directories = [Path(directory) for directory in lora.lora_dir]
    names = lora.adapter_names or tuple(Path(os.path.realpath(directory)).name for directory in directories)
    _check_names(names, directories)
    used = _modules_of_adapters(directories, config, checkpoint)
    modules = lora.lora_target_modules or tuple(
        info.name for info in lora_modules() if any(info.name in adapter for adapter in used)
    )
    modules = modules or DEFAULT_TARGET_MODULES
    problems = []
    for directory, adapter in zip(directories, used, strict=True):
        missing = [name for name in adapter if name not in modules]
        if missing:
            problems.append(f"{directory} adapts {', '.join(missing)}, which lora_target_modules does not name")
    if problems:
        raise AdapterError("; ".join(problems))
    return replace(config, lora_config=replace(lora, lora_target_modules=modules, adapter_names=names))


def _check_names(names: Sequence[str], directories: Sequence[Path]) -> None:
    """Adapters are served by name, so names are plain, and each is one adapter's."""
    if len(names) != len(directories):
        raise ConfigError(f"there are {len(names)} adapter_names for {len(directories)} lora_dir")
    for name, directory in zip(names, directories, strict=True):
        if not re.fullmatch(r"[^\x00-\x1f/]+", name):
            raise ConfigError(f"lora_dir {directory}: {name!r} cannot be the name of an adapter")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ConfigError(f"lora_dir: adapters are served by their directories' names; {', '.join(twice)} occurs twice")


def _modules_of_adapters(
    directories: Sequence[Path], config: BuildConfig, checkpoint: CheckpointConfig
) -> list[list[str]]:
    """_adapter_modules() of each; the error has what is wrong with all of them."""
    used, problems = [], []
    for directory in directories:
        try:
            used.append(_adapter_modules(directory, config, checkpoint))
        except AdapterError as error:
            problems.append(str(error))
    if problems:
        raise AdapterError("; ".join(problems))
    return used


def _adapter_modules(directory: Path, config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    """Names of the modules that an adapter changes. Raises AdapterError if the engine could not serve it."""
    adapter = convert_adapter(
        directory,
        storage_dtype=dtype_name(checkpoint.dtype),
        shape=ModelShape(
            hidden_size=checkpoint.hidden_size,
            num_attention_heads=checkpoint.num_attention_heads,
            num_key_value_heads=checkpoint.num_key_value_heads,
            head_dim=checkpoint.head_size,
            intermediate_size=checkpoint.intermediate_size,
        ),
        num_layers=checkpoint.num_hidden_layers,
        # Raw ones are normalised when the adapter is served: the engine holds the weights.
        magnitudes_normalized=True,
    )
    rows = adapter.config[0]
    problems = []
    if rows[:, 2].max() > config.lora_config.max_lora_rank:
        problems.append(f"its rank {rows[:, 2].max()} is above max_lora_rank {config.lora_config.max_lora_rank}")
    if rows[:, 3].any() and not config.dora_enabled:
        problems.append("it is a DoRA adapter; build with dora_plugin enable")
    if problems:
        raise AdapterError(f"{directory}: " + "; ".join(problems))
    return [info.name for info in lora_modules() if info.id in rows[:, 0]]


def _copy_adapters(config: BuildConfig, directory: Path) -> tuple[BuildConfig, tuple[str, ...]]:
    """Copies the adapters into the engine directory; the config with their places in it, and their checksums."""
    sources = config.lora_config.lora_dir
    places = tuple(Path(ADAPTERS_DIRECTORY) / str(number) for number in range(len(sources)))
    checksums = tuple(copy_adapter(source, directory / place) for source, place in zip(sources, places, strict=True))
    return replace(config, lora_config=replace(config.lora_config, lora_dir=places)), checksums
