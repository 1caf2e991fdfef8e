"""Checkpoints that engines are built from: config and tensors, from disk or converted while they are read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ..._core import CheckpointError, ConfigError, DType, dtype_name
from ...common.progress import Progress
from ...common.safetensors_stream import SafetensorsReader
from ...formats.checkpoint.config import CheckpointConfig
from ...formats.checkpoint.config_file import ConfigFile
from ...formats.checkpoint.quantization import QuantConfig
from ...formats.checkpoint.quantizer import QuantizationError
from ...formats.checkpoint.rank_file import rank_file, rank_specs, write_rank
from ...formats.checkpoint.rank_tensors import CheckpointFile
from ...formats.checkpoint.tensor_names import EMBEDDING, LM_HEAD
from ...formats.hugging_face.hf_config import HfConfig
from ...formats.models.registry import declare, read_config
from ...formats.network.network import Network
from ..network.checkpoint_tensors import plan_rank
from .hf_model import HfModel, check_quantization, model_config
from .left_out import NOTHING_LEFT_OUT, LeftOut
from .published.dequantized import Dequantization, check_dequantized
from .published.kept_layers import KeptLayers, linear_weights
from .published.kept_tensors import KeptTensors
from .quantizing_tensors import QuantizingTensors

# Name of TensorRT-LLM's static scale for a layer's int8 KV cache.
_KV_CACHE_SCALE: Final = ".attention.kv_cache_scaling_factor"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose tensors match its config."""

    directory: Path
    """Source directory: the checkpoint's own, or the Hugging Face model's."""
    network: Network
    """The network that the checkpoint's family declares."""
    ranks: tuple[CheckpointFile | QuantizingTensors | KeptTensors, ...]
    """The tensors of each rank."""
    left_out: LeftOut = NOTHING_LEFT_OUT
    """For a Hugging Face model: tensors that are ignored."""
    dequantization: Dequantization | None = None
    """For a Hugging Face model published quantised: the layers that are dequantised."""
    kept: KeptLayers | None = None
    """For a Hugging Face model published quantised: the layers that keep their quantised weights."""
    model: HfConfig | None = None
    """Config of the Hugging Face model that the tensors are made of; None if the checkpoint has files of its own."""
    origin: str | None = None
    """For a model of the Hugging Face Hub: its name with the commit."""

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Opens a checkpoint that convert_checkpoint() wrote.

        Raises CheckpointError that lists all problems.
        """
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: is not a directory")
        file = ConfigFile.read(directory)
        if file.is_of_hugging_face:
            raise CheckpointError(
                f"{directory}: is a Hugging Face model; build it with --model_dir, or convert it to a checkpoint first"
            )
        return cls.of_config(read_config(file.data, subject=str(file.path)), directory)

    @classmethod
    def of_config(cls, config: CheckpointConfig, directory: Path, known: Network | None = None) -> Checkpoint:
        """Opens a checkpoint directory whose config.json has been read and checked.

        known: a network for declare(). Raises as open().
        """
        network = declare(config, known)
        _check_quantized_layers(network, directory)
        files = tuple(_rank_of(directory, network, rank) for rank in range(config.mapping.world_size))
        return cls(directory, network, files)

    @classmethod
    def of_model(
        cls, model: Path | HfConfig, dtype: DType | None = None, *, keeps_published: bool = True
    ) -> Checkpoint:
        """The checkpoint that convert_checkpoint() would write of a Hugging Face model; tensors are converted while
        they are read.

        model: the model's directory, or its config.json if that has been read.
        dtype: for a directory. None: the type in the model's config.json.
        keeps_published: see HfModel.open().

        Raises CheckpointError that lists all problems of the model.
        """
        source = model if isinstance(model, HfConfig) else model_config(model, dtype=dtype)
        opened = HfModel.open(source, keeps_published=keeps_published)
        return cls(
            source.directory,
            opened.network,
            (opened.tensors(0),),
            opened.left_out,
            opened.dequantization,
            opened.kept,
            source,
        )

    @classmethod
    def of_dequantized_model(cls, model: Path | HfConfig, dtype: DType | None = None) -> Checkpoint:
        """of_model() with all layers in the checkpoint's type.

        Raises as of_model(), and ConfigError for a model without layers that were published quantised.
        """
        made = cls.of_model(model, dtype, keeps_published=False)
        check_dequantized(made.dequantization, made.directory)
        return made

    @property
    def config(self) -> CheckpointConfig:
        """Config of the network."""
        return self.network.config

    @property
    def quantization_errors(self) -> tuple[QuantizationError, ...]:
        """Quantisation error of each weight that was quantised while it was read."""
        made = (tensors for tensors in self.ranks if not isinstance(tensors, CheckpointFile))
        return tuple(error for tensors in made for error in tensors.errors)

    def with_int8_kv_cache(self, int8: bool) -> Checkpoint:
        """The same tensors, for an engine with an int8 KV cache or one of the engine's own type."""
        return self.with_config(replace(self.config, int8_kv_cache=int8))

    def dequantized(self) -> Checkpoint:
        """The checkpoint without layers that keep their published numbers."""
        if self.kept is None:
            return self
        assert self.model is not None
        plain = Checkpoint.of_model(self.model, keeps_published=False).with_int8_kv_cache(self.config.int8_kv_cache)
        return replace(plain, origin=self.origin)

    def quantized(self, quantization: QuantConfig) -> Checkpoint:
        """The checkpoint with quantised linear layers. Layers that were published quantised are dequantised first.

        Raises ConfigError if the checkpoint was quantised during its conversion, or cannot be quantised this way.
        """
        if self.kept is not None:
            return self.dequantized().quantized(quantization)
        if self.config.quantization is not None:
            raise ConfigError(
                f"{self.directory}: the weights are already {self.config.quantization.quant_algo.name}; leave "
                "out quantization to build them unchanged"
            )
        config = replace(self.config, quantization=quantization)
        network = declare(config, self.network)
        plans = [plan_rank(network, rank) for rank in range(len(self.ranks))]
        check_quantization(config, plans, str(self.directory))
        lm_head = EMBEDDING if self.config.lm_head_is_embedding else LM_HEAD
        ranks = tuple(QuantizingTensors(tensors, quantization, lm_head_source=lm_head) for tensors in self.ranks)
        return replace(self, network=network, ranks=ranks)

    def with_int8_activations(self) -> Checkpoint:
        """The same weights, multiplied with activations rounded to int8.

        Raises ConfigError if the weights are not integers, or of a kind without int8 activations.
        """
        if self.config.quantization is None:
            raise ConfigError(f"{self.directory}: int8_activations: the weights are not quantised")
        try:
            quantization = self.config.quantization.with_int8_activations()
        except ConfigError as error:
            raise ConfigError(f"{self.directory}: {error}") from None
        kept = self.kept
        if kept is not None:
            kept = replace(kept, quantization=quantization, rounds_activations=False)
        return replace(self.with_config(replace(self.config, quantization=quantization)), kept=kept)

    def with_quantization(self, quantization: QuantConfig | None, *, int8_activations: bool) -> Checkpoint:
        """The checkpoint as build() compiles it with these options. Raises as quantized() and with_int8_activations().

        quantization: None: the weights stay.
        """
        made = self if quantization is None else self.quantized(quantization)
        return made.with_int8_activations() if int8_activations else made

    def with_config(self, config: CheckpointConfig) -> Checkpoint:
        """The same tensors for a config of the same sizes."""
        return replace(self, network=declare(config, self.network))

    @contextmanager
    def as_file(self, place: Path, progress: Progress) -> Iterator[SafetensorsReader]:
        """The tensors in a file: the checkpoint's own, or one in `place` that is deleted after the with statement.

        Only for checkpoints of one rank.
        """
        (tensors,) = self.ranks
        if isinstance(tensors, CheckpointFile):
            yield tensors.reader
            return
        plan, dtype = plan_rank(self.network, 0), np.dtype(dtype_name(self.config.dtype))
        num_bytes = sum(spec.num_bytes for spec in rank_specs(plan, dtype, self.config.quantization))
        with tempfile.TemporaryDirectory(dir=place, prefix=f".{self.directory.absolute().name}-weights-") as name:
            path = Path(name) / rank_file(0)
            with progress.task("Writing weights", num_bytes) as advance:
                write_rank(path, plan, dtype, self.config.quantization, tensors, advance)
            yield SafetensorsReader(path)


def _check_quantized_layers(network: Network, directory: Path) -> None:
    """Raises CheckpointError if config.json gives a quantisation of its own to an unknown layer."""
    how = network.config.quantization
    if how is None or not how.quantized_layers:
        return
    known = {str(weight.name) for weight in linear_weights(network)}
    unknown = [name for name, _ in how.quantized_layers if name not in known]
    if unknown:
        raise CheckpointError(
            f"{directory}: quantization.quantized_layers names {', '.join(unknown)}; expected names of linear layers"
        )


def _rank_of(directory: Path, network: Network, rank: int) -> CheckpointFile:
    """The file of a rank. Raises CheckpointError that lists all problems."""
    config = network.config
    path = directory / rank_file(rank)
    reader = SafetensorsReader(path)
    dtype = np.dtype(dtype_name(config.dtype))
    expected = {spec.name: spec for spec in rank_specs(plan_rank(network, rank), dtype, config.quantization)}
    problems = [f"tensor '{name}' is missing" for name in expected if name not in reader.specs]
    for name, spec in reader.specs.items():
        if name.endswith(_KV_CACHE_SCALE):
            problems.append(
                f"tensor '{name}' is a calibrated scale, but scales of an int8 KV cache are computed at run "
                "time; remove the tensor"
            )
        elif name not in expected:
            problems.append(f"unexpected tensor '{name}'")
        elif spec != expected[name]:
            problems.append(
                f"tensor '{name}' is {spec.dtype} {list(spec.shape)}, but config.json makes it "
                f"{expected[name].dtype} {list(expected[name].shape)}"
            )
    if problems:
        raise CheckpointError(f"{path}: " + "; ".join(problems))
    return CheckpointFile(reader, config.quantization)
