"""Engines of the native compiler: maps the file, checks every byte of it, and makes the program that runs on it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from .. import _core
from .._core import CpuEngine, EngineError, ExecutorConfig, QuantAlgo
from ..builder.checkpoint.config import CheckpointConfig
from ..builder.compile.bind import bind_program
from ..builder.compile.engine_file import EngineFile
from ..builder.compile.plan import ExpertsOp, LinearOp, LinearPart, Program
from ..builder.engine_config import ENGINE_FILE, EngineConfig
from .engine_weights import EngineBase
from .kv_identity import kv_identity
from .loaded_engine import LoadedEngine, engine_adapters

_LOG: Final = logging.getLogger("adaptrt")


@dataclass(frozen=True)
class NativeEngine(LoadedEngine):
    """An engine whose weights are mapped, not copied."""

    program: _core.Program
    """Refers to bytes of `storage`."""
    storage: EngineFile

    @property
    def lora(self) -> _core.LoraLayout:
        """That of the program."""
        return self.program.lora

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A view of the file's."""
        found = self.storage.tensors.get(name)
        if found is None or found.dtype != np.float32:
            raise EngineError(f"{self.storage.path}: has no float32 tensor '{name}'")
        return found

    def base_weights(self) -> EngineBase:
        """The packed weights."""
        return self._base

    @cached_property
    def _base(self) -> EngineBase:
        return EngineBase(self.program, self.storage, self.directory)

    def start(self, config: ExecutorConfig, *, beside: _core.Engine | None = None) -> CpuEngine:
        """Threads over the mapped weights: those of `beside`, where that is a native engine too."""
        num_threads = config.num_threads or len(os.sched_getaffinity(0))
        identity = kv_identity(self.config.engine_checksum) if config.kv_cache_config.host_cache_size else ""
        shared = beside if isinstance(beside, CpuEngine) else None
        engine = CpuEngine(
            self.program, self.storage, num_threads, kernels=config.kernels, identity=identity, beside=shared
        )
        said = "asked for" if config.kernels else _why_chosen()
        _LOG.info("%s: kernels %s (%s), threads %d", self.directory, engine.info.kernels, said, num_threads)
        return engine


def _why_chosen() -> str:
    """Of the kernels that are chosen for this CPU: what keeps it from the first of those that it cannot run."""
    return "; ".join(["chosen", *(f"not {name}: {reason}" for name, reason in _core.impossible_cpu_kernels()[:1])])


def load_native_engine(directory: Path, config: EngineConfig) -> NativeEngine:
    """Raises EngineError for an engine file that is damaged or disagrees with config.json."""
    storage = EngineFile(directory / ENGINE_FILE, config.engine_checksum)
    return _checked(directory, config, storage, engine_adapters(config, directory))


def native_engine_in_memory(
    subject: Path, config: EngineConfig, engine: bytes | bytearray | memoryview
) -> NativeEngine:
    """The same of an engine file's bytes, which are copied; it carries no adapters. `subject` is for messages."""
    return _checked(subject, config, EngineFile(subject / ENGINE_FILE, config.engine_checksum, engine), {})


def _checked(directory: Path, config: EngineConfig, storage: EngineFile, adapters: Mapping[str, Path]) -> NativeEngine:
    _check_agreement(config, storage.program, directory)
    program = bind_program(storage.program, storage.tensors, str(storage.path))
    problems = program.validate()
    if problems:
        raise EngineError(f"{storage.path}: " + "; ".join(problems))
    return NativeEngine(directory, config, adapters, program, storage)


def _check_agreement(config: EngineConfig, program: Program, directory: Path) -> None:
    """config.json and the program say the same of what both say."""
    checkpoint, build = config.pretrained_config, config.build_config
    lora = program.lora
    pairs = {
        "dtype": (checkpoint.dtype, program.dtype),
        "quant_algo": (_quant_algo(checkpoint), _quant_algo_of_layers(program)),
        "vocab_size": (checkpoint.vocab_size, program.vocab_size),
        "num_hidden_layers": (checkpoint.num_hidden_layers, program.num_layers),
        "max_batch_size": (build.max_batch_size, program.max_batch_size),
        "max_num_tokens": (build.max_num_tokens, program.max_num_tokens),
        "max_input_len": (build.max_input_len, program.max_input_len),
        "max_seq_len": (build.max_seq_len, program.max_seq_len),
        "max_beam_width": (build.max_beam_width, program.max_beam_width),
        "num_encoder_layers": (checkpoint.num_encoder_layers, program.num_encoder_layers),
        "max_encoder_input_len": (build.max_encoder_input_len or 0, program.max_encoder_input_len),
        "tokens_per_block": (build.tokens_per_block, program.tokens_per_block),
        "int8_kv_cache": (checkpoint.int8_kv_cache, program.int8_kv_cache),
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


def _quant_algo(checkpoint: CheckpointConfig) -> str:
    return QuantAlgo.NONE.name if checkpoint.quantization is None else checkpoint.quantization.quant_algo.name


def _quant_algo_of_layers(program: Program) -> str:
    """That of the linear layers of decoder layers; routers stay as they are."""
    parts: list[LinearPart] = []
    for op in (*program.encoder, *program.body):
        if isinstance(op, LinearOp):
            parts += op.parts
        elif isinstance(op, ExpertsOp):
            parts += (*op.gate_up, *op.down)
    how = {part.weight.quantization.algo.name for part in parts if part.weight.quantization is not None}
    return ", ".join(sorted(how)) or QuantAlgo.NONE.name
