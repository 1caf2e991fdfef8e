"""Opens a checkpoint for a build."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from onnx import TensorProto, helper

from ..._core import CheckpointError, QuantAlgo, dtype_name
from ..checkpoint.config import CheckpointConfig
from ..checkpoint.rank_file import rank_file, rank_specs
from ..models.registry import declare, load_config
from ..network.checkpoint_tensors import plan_rank
from ..network.graph import StoredTensor
from ..network.network import Network
from ..safetensors_stream import SafetensorsReader

# TensorRT-LLM's static scale of a layer's int8 KV cache.
_KV_CACHE_SCALE: Final = ".attention.kv_cache_scaling_factor"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory whose tensors are those that its config.json makes."""

    directory: Path
    config: CheckpointConfig
    reader: SafetensorsReader

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Raises CheckpointError with everything that is wrong, and for a checkpoint of several ranks."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: is no directory")
        config = load_config(directory)
        if config.mapping.world_size > 1:
            raise CheckpointError(
                f"{directory}: was converted with tp_size {config.mapping.tp_size} and pp_size "
                f"{config.mapping.pp_size}; engines of several ranks cannot be built yet: convert with 1 and 1"
            )
        path = directory / rank_file(0)
        reader = SafetensorsReader(path)
        dtype = np.dtype(dtype_name(config.dtype))
        expected = {spec.name: spec for spec in rank_specs(plan_rank(declare(config), 0), dtype, config.quantization)}
        problems = [f"tensor '{name}' is missing" for name in expected if name not in reader.specs]
        for name, spec in reader.specs.items():
            if name.endswith(_KV_CACHE_SCALE):
                problems.append(
                    f"tensor '{name}' is a calibrated scale, but those of an int8 KV cache are made at run time; "
                    "remove the tensor"
                )
            elif name not in expected:
                problems.append(f"tensor '{name}' is used by nothing")
            elif spec != expected[name]:
                problems.append(
                    f"tensor '{name}' is {spec.dtype} {list(spec.shape)}, but config.json makes it "
                    f"{expected[name].dtype} {list(expected[name].shape)}"
                )
        if problems:
            raise CheckpointError(f"{path}: " + "; ".join(problems))
        return cls(directory, config, reader)

    @cached_property
    def network(self) -> Network:
        """What the checkpoint's family declares."""
        return declare(self.config)

    def with_int8_kv_cache(self, int8: bool) -> Checkpoint:
        """The same tensors for an engine whose keys and values are int8, or of its own type."""
        return replace(self, config=replace(self.config, int8_kv_cache=int8))

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Where the network finds each weight."""
        reader, quantization = self.reader, self.config.quantization
        stored = {}
        for name, spec in reader.specs.items():
            element_type, shape = int(helper.np_dtype_to_tensor_dtype(spec.dtype)), spec.shape
            how = quantization.of_tensor(name) if quantization is not None else None
            if how is not None and how.quant_algo is QuantAlgo.W4A16:
                # Two elements in a byte; ONNX counts elements.
                element_type = TensorProto.UINT4 if how.has_zero_point else TensorProto.INT4
                shape = (shape[0], 2 * shape[1])
            stored[name] = StoredTensor(element_type, shape, reader.path.name, reader.offset(name), spec.num_bytes)
        return stored
