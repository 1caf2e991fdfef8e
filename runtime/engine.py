"""Loads engine directories: maps the file, checks every byte of it, and makes the program that runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import _core
from .._core import EngineError
from ..builder.compile.bind import bind_program
from ..builder.compile.engine_file import EngineFile
from ..builder.compile.plan import Program
from ..builder.engine_config import ADAPTERS_DIRECTORY, ENGINE_FILE, EngineConfig


@dataclass(frozen=True)
class LoadedEngine:
    """An engine whose weights are mapped, not copied."""

    directory: Path
    config: EngineConfig
    program: _core.Program
    """Refers to bytes of `storage`."""
    storage: EngineFile
    adapters: Mapping[str, Path]
    """PEFT directories of the adapters that the engine carries, by the name they are served under."""


def load_engine(directory: str | Path) -> LoadedEngine:
    """Loads an engine that `adaptrt build` made.

    Raises EngineError with the path and the reason for a directory of another version, and one that is
    incomplete, damaged or inconsistent.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise EngineError(f"{directory}: is no directory")
    config = EngineConfig.load(directory)
    storage = EngineFile(directory / ENGINE_FILE, config.engine_checksum)
    _check_agreement(config, storage.program, directory)
    program = bind_program(storage.program, storage.tensors, str(storage.path))
    problems = program.validate()
    if problems:
        raise EngineError(f"{storage.path}: " + "; ".join(problems))
    return LoadedEngine(directory, config, program, storage, _adapters(config, directory))


def _check_agreement(config: EngineConfig, program: Program, directory: Path) -> None:
    """config.json and the program say the same of what both say."""
    checkpoint, build = config.pretrained_config, config.build_config
    lora = program.lora
    pairs = {
        "dtype": (checkpoint.dtype, program.dtype),
        "vocab_size": (checkpoint.vocab_size, program.vocab_size),
        "num_hidden_layers": (checkpoint.num_hidden_layers, program.num_layers),
        "max_batch_size": (build.max_batch_size, program.max_batch_size),
        "max_num_tokens": (build.max_num_tokens, program.max_num_tokens),
        "max_input_len": (build.max_input_len, program.max_input_len),
        "max_seq_len": (build.max_seq_len, program.max_seq_len),
        "max_beam_width": (build.max_beam_width, program.max_beam_width),
        "tokens_per_block": (build.tokens_per_block, program.tokens_per_block),
        "lora_plugin": (build.lora_enabled, lora is not None),
        "dora_plugin": (build.dora_enabled, lora is not None and lora.dora_enabled),
    }
    if lora is not None:
        pairs["max_lora_rank"] = (build.lora_config.max_lora_rank, lora.max_rank)
    differing = [
        f"{name} is {ours} there and {theirs} here" for name, (ours, theirs) in pairs.items() if ours != theirs
    ]
    if differing:
        raise EngineError(f"{directory / ENGINE_FILE}: disagrees with config.json: " + "; ".join(differing))


def _adapters(config: EngineConfig, directory: Path) -> dict[str, Path]:
    """The adapters' directories, which lie where build() put them and nowhere else."""
    lora = config.build_config.lora_config
    counts = {len(lora.lora_dir), len(config.adapter_checksums), len(lora.adapter_names), len(set(lora.adapter_names))}
    if len(counts) > 1:
        raise EngineError(
            f"{directory}: config.json has {len(lora.lora_dir)} directories of adapters for "
            f"{len(set(lora.adapter_names))} different names and {len(config.adapter_checksums)} checksums"
        )
    adapters = {}
    for number, (name, place) in enumerate(zip(lora.adapter_names, lora.lora_dir, strict=True)):
        path = directory.absolute() / place  # the process may change its directory before the adapter is read
        if place != Path(ADAPTERS_DIRECTORY) / str(number) or not path.is_dir() or path.is_symlink():
            raise EngineError(f"{directory}: adapter '{name}' is not at {ADAPTERS_DIRECTORY}/{number}")
        adapters[name] = path
    return adapters
