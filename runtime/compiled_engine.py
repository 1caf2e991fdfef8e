"""Base class of engines whose program and weights are in an engine file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .. import _core
from .._core import EngineError, MatrixLayout, QuantAlgo
from ..formats.checkpoint.config import CheckpointConfig
from ..formats.engine.bind import bind_program
from ..formats.engine.build_config import CUDA, LIMITS
from ..formats.engine.engine_config import EngineConfig, engine_file
from ..formats.engine.engine_file import EngineFile
from ..formats.engine.plan import ExpertsOp, LinearOp, LinearPart, Program
from .loaded_engine import LoadedEngine


@dataclass(frozen=True)
class CompiledEngine(LoadedEngine):
    """An engine that the native compiler made, for CPUs or for CUDA."""

    program: _core.Program
    """Its weights point into `storage`."""
    storage: EngineFile

    @property
    def rank(self) -> int:
        """Rank of the program."""
        return self.program.rank

    @property
    def lora(self) -> _core.LoraLayout:
        """LoRA layout of the program."""
        return self.program.lora

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Returns a view into the engine file."""
        found = self.storage.tensors.get(name)
        if found is None or found.dtype != np.float32:
            raise EngineError(f"{self.storage.path}: has no float32 tensor '{name}'")
        return found


def checked_program(directory: Path, config: EngineConfig, storage: EngineFile) -> _core.Program:
    """Binds the program of an engine file. Raises EngineError if it is inconsistent or disagrees with config.json."""
    _check_agreement(config, storage.program, directory)
    program = bind_program(storage.program, storage.tensors, str(storage.path))
    problems = program.validate()
    if problems:
        raise EngineError(f"{storage.path}: " + "; ".join(problems))
    return program


def _check_agreement(config: EngineConfig, program: Program, directory: Path) -> None:
    """Raises EngineError if config.json and the program disagree."""
    checkpoint, build = config.pretrained_config, config.build_config
    lora = program.lora
    stage = program.rank * program.num_stages // max(1, program.num_ranks)

    def layers_here(of_all: int) -> int:
        return _core.stage_layers(of_all, checkpoint.mapping.pp_size, min(stage, checkpoint.mapping.pp_size - 1))[1]

    pairs = {
        "dtype": (checkpoint.dtype, program.dtype),
        "matrix_layout": (MatrixLayout.ROWS if build.backend == CUDA else MatrixLayout.PANELS, program.matrix_layout),
        "quant_algo": (_quant_algo(checkpoint), _quant_algo_of_layers(program)),
        "vocab_size": (checkpoint.vocab_size, program.vocab_size),
        "num_hidden_layers": (layers_here(checkpoint.num_hidden_layers), program.num_layers),
        **{name: (getattr(build, name) or 0, getattr(program, name)) for name in LIMITS},
        "num_encoder_layers": (layers_here(checkpoint.num_encoder_layers), program.num_encoder_layers),
        "mapping.world_size": (checkpoint.mapping.world_size, program.num_ranks),
        "mapping.pp_size": (checkpoint.mapping.pp_size, program.num_stages),
        "int8_kv_cache": (checkpoint.int8_kv_cache, program.int8_kv_cache),
        "lora_plugin": (build.lora_enabled, lora is not None),
        "dora_plugin": (build.dora_enabled, lora is not None and lora.dora_enabled),
    }
    if lora is not None:
        pairs["max_lora_rank"] = (build.lora_config.max_lora_rank, lora.max_rank)
        pairs["max_extra_tokens"] = (build.lora_config.max_extra_tokens, lora.max_extra_tokens)
        factors = build.lora_config.long_lora_scaling_factors
        pairs["long_lora_scaling_factors"] = (factors, lora.rotary_factors)
        shared = any(site.num_shares > 1 for site in lora.sites)
        pairs["fully_sharded_loras"] = (build.lora_config.fully_sharded_loras, shared)
        if factors:
            pairs["max_position_embeddings"] = (checkpoint.max_position_embeddings, lora.max_base_positions)
    differing = [
        f"{name} is {ours} in config.json and {theirs} in the engine file"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
    if differing:
        raise EngineError(
            f"{directory / engine_file(program.rank)}: disagrees with config.json: " + "; ".join(differing)
        )


def _quant_algo(checkpoint: CheckpointConfig) -> str:
    if checkpoint.quantization is None:
        return QuantAlgo.NONE.name
    return ", ".join(sorted(algo.name for algo in checkpoint.quantization.layer_algos))


def _quant_algo_of_layers(program: Program) -> str:
    """Returns the quantisation of the decoder layers' linear layers; routers are never quantised."""
    parts: list[LinearPart] = []
    for op in (*program.encoder, *program.body):
        if isinstance(op, LinearOp):
            parts += op.parts
        elif isinstance(op, ExpertsOp):
            parts += (*op.gate_up, *op.down)
    how = {part.weight.quantization.algo.name for part in parts if part.weight.quantization is not None}
    return ", ".join(sorted(how)) or QuantAlgo.NONE.name
