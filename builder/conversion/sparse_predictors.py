"""Predictors of active MLP neurons, in PowerInfer's file format.

A directory has `model_{layer}.pt` or `model_{layer}.safetensors` for every layer, each with `fc1.weight` [rank,
hidden_size] and `fc2.weight` [intermediate_size, rank]. It may have a `config.json` with `sparse_threshold`, the
minimum score of an active neuron (default: 0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..._core import CheckpointError, can_have_rows, dtype_name
from ...common.json_fields import JsonFields, load_json_object
from ...common.safetensors_stream import SafetensorsReader
from ...formats.checkpoint.casting import CHECKPOINT_DTYPES, Array, cast
from ...formats.checkpoint.hf_weights import WeightFile
from ...formats.checkpoint.pickled_file import PickledFile
from ...formats.checkpoint.quantizer import QuantizedRows
from ...formats.checkpoint.rank_tensors import RankTensors
from ...formats.network.network import Network
from ..network.predictors import GatedLayer, gated_layers, predictor_weights, with_predictors

_CONFIG_FILE: Final = "config.json"
_READERS: Final[dict[str, type[Any]]] = {".pt": PickledFile, ".safetensors": SafetensorsReader}
_GREATEST_SCORE: Final = 1e9
"""Larger than any score, and small enough for a program."""
_FIRST, _SECOND = "fc1.weight", "fc2.weight"


@dataclass(frozen=True)
class SparsePredictors:
    """A directory of predictors that fit a network."""

    directory: Path
    least_score: float
    ranks: tuple[int, ...]
    """Rank of each layer's predictor."""
    _files: Mapping[str, tuple[WeightFile, Path, str]]
    """The file that has a tensor, the file's path, and the tensor's name there, by its name in an engine."""

    @classmethod
    def open(cls, directory: Path, network: Network) -> SparsePredictors:
        """Opens a directory. Raises CheckpointError for files, fields and tensors that are missing, unknown or do not
        fit."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: is not a directory of sparse predictors")
        layers = _checked_layers(directory, network)
        paths = _paths(directory, len(layers))
        files: dict[str, tuple[WeightFile, Path, str]] = {}
        ranks = []
        for gated, path in zip(layers, paths, strict=True):
            opened: WeightFile = _READERS[path.suffix](path)
            rank = _checked_rank(opened, path, gated)
            ranks.append(rank)
            for weight, stored in zip(predictor_weights(gated, rank), (_FIRST, _SECOND), strict=True):
                files[f"{weight.name}.weight"] = (opened, path, stored)
        return cls(directory, _least_score(directory), tuple(ranks), files)

    def added_to(self, network: Network) -> Network:
        """The network with the predictors; it must be the network that they were opened for."""
        return with_predictors(network, self.ranks, self.least_score)

    def tensors_beside(self, tensors: RankTensors, dtype: np.dtype[Any]) -> RankTensors:
        """The predictors' tensors, in `dtype`, in addition to those of a checkpoint."""
        return _TensorsWithPredictors(tensors, self._files, dtype)


class _TensorsWithPredictors:
    """Implements RankTensors."""

    def __init__(
        self, others: RankTensors, files: Mapping[str, tuple[WeightFile, Path, str]], dtype: np.dtype[Any]
    ) -> None:
        self._others = others
        self._files = files
        self._dtype = dtype

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        if name not in self._files:
            yield from self._others.rows(name, rows, step)
            return
        file, path, stored = self._files[name]
        for piece in file.rows(stored, rows.start, rows.stop, step=step):
            yield cast(piece, self._dtype, f"{path}: tensor '{stored}'")

    def quantized_rows(self, name: str, rows: range, step: int | None = None) -> Iterator[QuantizedRows]:
        return self._others.quantized_rows(name, rows, step)

    def permutations(self, name: str) -> Array:
        return self._others.permutations(name)


def _checked_layers(directory: Path, network: Network) -> list[GatedLayer]:
    """The MLPs that get a predictor: all of the network's."""
    config = network.config
    layers = gated_layers(network)
    if [gated.layer for gated in layers] != list(range(config.num_hidden_layers)):
        raise CheckpointError(
            f"{directory}: sparse predictors need a ReLU MLP after a norm in every layer, which "
            f"{config.architecture} with {config.hidden_act} does not have"
        )
    for gated in layers:
        if not all(can_have_rows(config.dtype, weight.outputs, weight.inputs) for weight in gated.op.weights):
            gate = gated.op.weights[0]
            raise CheckpointError(
                f"{directory}: sparse predictors need MLPs that can be read neuron by neuron: float32 or "
                "bfloat16, an intermediate_size that is a multiple of 64, an even hidden_size; the model is "
                f"{dtype_name(config.dtype)} with {gate.outputs} and {gate.inputs}"
            )
    return layers


def _paths(directory: Path, num_layers: int) -> list[Path]:
    """The file of each layer. Hidden files and documentation may be in the directory too."""
    found = {
        path.name: path
        for path in sorted(directory.iterdir())
        if not path.name.startswith(".") and path.suffix != ".md" and not path.name.startswith("LICENSE")
    }
    found.pop(_CONFIG_FILE, None)
    paths = []
    problems = []
    for layer in range(num_layers):
        names = [f"model_{layer}{suffix}" for suffix in _READERS]
        here = [found.pop(name) for name in names if name in found]
        paths += here
        if not here:
            problems.append(f"there is no {' or '.join(names)}")
        elif len(here) > 1:
            problems.append(f"holds both {' and '.join(names)}; remove one of them")
    problems += [f"'{name}' is not a file of predictors for {num_layers} layers; remove it" for name in found]
    if problems:
        raise CheckpointError(f"{directory}: " + "; ".join(problems))
    return paths


def _checked_rank(file: WeightFile, path: Path, gated: GatedLayer) -> int:
    specs = file.specs
    problems = [f"tensor '{name}' is missing" for name in (_FIRST, _SECOND) if name not in specs]
    problems += [f"unexpected tensor '{name}'" for name in specs if name not in (_FIRST, _SECOND)]
    for name, spec in specs.items():
        if spec.dtype not in CHECKPOINT_DTYPES:
            accepted = ", ".join(map(str, CHECKPOINT_DTYPES))
            problems.append(f"tensor '{name}' is {spec.dtype}; accepted: {accepted}")
    if not problems:
        gates, width = gated.op.weights[0].outputs, gated.stream.width
        first, second = specs[_FIRST].shape, specs[_SECOND].shape
        if len(first) != 2 or first[0] < 1 or first[1] != width:
            problems.append(f"tensor '{_FIRST}' is {list(first)}; expected [rank, {width}]")
        elif second != (gates, first[0]):
            problems.append(f"tensor '{_SECOND}' is {list(second)}; expected {[gates, first[0]]}")
    if problems:
        raise CheckpointError(f"{path}: " + "; ".join(problems))
    return int(specs[_FIRST].shape[0])


def _least_score(directory: Path) -> float:
    path = directory / _CONFIG_FILE
    if not path.exists():
        return 0.0
    fields = JsonFields(load_json_object(path, CheckpointError))
    least = fields.number("sparse_threshold", minimum=-_GREATEST_SCORE, default=0.0)
    if least > _GREATEST_SCORE:
        fields.problem("sparse_threshold", f"is {least}; it must be at most {_GREATEST_SCORE}")
    fields.finish(str(path), CheckpointError)
    return least
