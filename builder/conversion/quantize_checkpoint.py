"""Quantises the weights of a checkpoint that is not quantised."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..._core import ConfigError, dtype_name
from ..checkpoint.casting import Array
from ..checkpoint.config import CONFIG_FILE, CheckpointConfig
from ..checkpoint.planned_tensor import PlannedTensor
from ..checkpoint.quantization import QuantConfig
from ..checkpoint.quantizer import QuantizationError
from ..checkpoint.rank_file import rank_file, rank_specs, write_rank
from ..checkpoint.tensor_names import EMBEDDING, LM_HEAD
from ..models.registry import declare
from ..network.checkpoint_tensors import plan_rank
from ..progress import Progress
from ..safetensors_stream import SafetensorsReader
from .convert import COPIED_FILES, check_quantization


def quantize_checkpoint(
    source: Path, config: CheckpointConfig, output: Path, quantization: QuantConfig, progress: Progress
) -> tuple[QuantizationError, ...]:
    """Writes a checkpoint of the directory `source`, whose config is `config`, to the empty directory `output`.

    The tensors are expected to be those of the config. Returns how far each quantised weight is from its own. Raises
    ConfigError for a checkpoint that is quantised already or of several ranks, and for a quantisation that it cannot
    have.
    """
    if config.quantization is not None:
        raise ConfigError(
            f"{source}: its weights are {config.quantization.quant_algo.name} already; leave quantization out to build "
            "them as they are"
        )
    if config.mapping.world_size > 1:
        raise ConfigError(f"{source}: has {config.mapping.world_size} ranks; quantise while converting it")
    quantized = replace(config, quantization=quantization)
    plan = plan_rank(declare(quantized), 0)
    check_quantization(quantized, [plan], str(source))
    reader = SafetensorsReader(source / rank_file(0))

    def pieces(tensor: PlannedTensor) -> Iterator[Array]:
        tied = tensor.name == LM_HEAD and config.lm_head_is_embedding
        return reader.rows(EMBEDDING if tied else tensor.name)

    dtype = np.dtype(dtype_name(config.dtype))
    num_bytes = sum(spec.num_bytes for spec in rank_specs(plan, dtype, quantization))
    with progress.task("Quantising", num_bytes) as advance:
        errors = write_rank(output / rank_file(0), plan, dtype, quantization, pieces, advance)
    for name in COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, output / name)
    (output / CONFIG_FILE).write_text(quantized.to_json(), encoding="utf-8")
    return tuple(errors)
