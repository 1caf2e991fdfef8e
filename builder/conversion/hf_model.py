"""A Hugging Face model directory as the source of a checkpoint's ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..._core import CheckpointError, ConfigError, DType, dtype_name
from ...common.safetensors_stream import TensorSpec
from ...formats.checkpoint.casting import CHECKPOINT_DTYPES, to_float32
from ...formats.checkpoint.config import CheckpointConfig, ParallelMapping
from ...formats.checkpoint.config_file import ConfigFile
from ...formats.checkpoint.fused_layers import layers_apart
from ...formats.checkpoint.heads_apart import heads_apart
from ...formats.checkpoint.hf_weights import HfWeights
from ...formats.checkpoint.joined_rows import with_rows_in_order
from ...formats.checkpoint.joined_tensors import with_joined
from ...formats.checkpoint.planned_tensor import PlannedTensor
from ...formats.checkpoint.quantization import QuantConfig
from ...formats.checkpoint.stacked_experts import experts_apart
from ...formats.checkpoint.tensor_names import LM_HEAD
from ...formats.gguf.model_directory import gguf_file_of
from ...formats.hugging_face.hf_config import HfConfig
from ...formats.hugging_face.published.formats import QuantizedMatrix
from ...formats.hugging_face.published.gguf_blocks import gguf_blocks
from ...formats.models.registry import declare, family_of
from ...formats.network.adapter_sites import adapter_sites
from ...formats.network.network import Network
from ...formats.network.weights import name_now
from ..network.checkpoint_tensors import hf_tensor_shapes, lm_head_tensors, plan_rank, tied_lm_head
from .left_out import LeftOut
from .model_tensors import ModelTensors
from .published.dequantized import Dequantization, dequantization, dequantized_blocks
from .published.kept_layers import KeptLayers, check_orientation, kept_layers
from .published.kept_tensors import KeptTensors
from .quantizing_tensors import QuantizingTensors


def model_config(
    model: Path | ConfigFile, *, dtype: DType | None = None, mapping: ParallelMapping | None = None
) -> HfConfig:
    """Returns the config of a model that a checkpoint is made of; see HfConfig.read().

    Raises as HfConfig.read(), and CheckpointError for a directory that AdaptRT wrote.
    """
    directory = model.directory if isinstance(model, ConfigFile) else model
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is not a directory")
    file = model if isinstance(model, ConfigFile) else ConfigFile.read(directory)
    if file.is_of_checkpoint:
        raise CheckpointError(f"{directory}: was made by AdaptRT; expected the directory of a Hugging Face model")
    return HfConfig.read(file, dtype=dtype, mapping=mapping)


@dataclass(frozen=True)
class HfModel:
    """A model whose tensors match its config.json."""

    network: Network
    plans: tuple[tuple[PlannedTensor, ...], ...]
    """The planned tensors of each rank."""
    _weights: HfWeights
    dequantization: Dequantization | None = None
    """Layers that were published quantised and are dequantised."""
    kept: KeptLayers | None = None
    """Layers that keep their published integers or codes, and scales."""

    @classmethod
    def open(
        cls,
        source: HfConfig,
        *,
        quantization: QuantConfig | None = None,
        int8_kv_cache: bool = False,
        keeps_published: bool = True,
    ) -> HfModel:
        """Opens the weights of the model that `source` describes.

        quantization: of the linear layers. Layers that were published quantised are dequantised first.
        keeps_published: False: dequantises layers that were published quantised. True: keeps them quantised if
        checkpoints support their format and `quantization` is None.

        Raises CheckpointError that lists all problems of the model, and ConfigError for a quantisation that does not
        fit it.
        """
        directory, published = source.directory, source.published
        config = replace(source.config, int8_kv_cache=int8_kv_cache)
        family = family_of(config.architecture)
        if config.is_encoder_only and int8_kv_cache:
            raise ConfigError(f"{directory}: int8_kv_cache: {config.architecture} keeps no keys and values")
        if config.layer_of_heads is not None and int8_kv_cache:
            raise ConfigError(
                f"{directory}: int8_kv_cache: {config.architecture} keeps compressed rows, in the checkpoint's dtype"
            )
        now = partial(name_now, older_names=family.older_names, older_endings=family.older_endings)
        weights = HfWeights(directory)
        for layer in config.embedding_pooling.dense if config.embedding_pooling else ():
            weights = weights.with_module(layer.path)
        published = published or gguf_blocks(weights)
        if published is not None:
            weights = weights.with_matrices(published.matrices(weights))
        weights = layers_apart(weights, family.fused_layers)
        weights = with_joined(weights, family.joined_tensors)
        weights = with_rows_in_order(weights, _layers_of_joined_rows(source.network), now)
        weights = experts_apart(weights, family.stacked_experts, config.hidden_size).renamed(now)
        weights = heads_apart(weights, config.layer_of_heads)
        if family.lm_head_is_embedding is not None:
            is_embedding = family.lm_head_is_embedding(config, LM_HEAD in weights)
            config = replace(config, share_embedding_table=is_embedding)
        keeping = published if quantization is None and keeps_published else None
        # A tied lm_head becomes a tensor of its own if layers are quantised.
        network = declare(
            replace(config, quantization=quantization if keeping is None else keeping.kept), source.network
        )
        weights = weights.renamed(_in_whole_model(hf_tensor_shapes(network)))
        check_orientation(network, weights.matrices, str(directory))
        kept = None
        if keeping is not None and keeping.kept is not None:
            kept = kept_layers(keeping, network, weights, cast(dict[str, QuantizedMatrix], weights.matrices))
        config = replace(config, quantization=quantization if kept is None else kept.quantization)
        network = declare(config, network)
        if config.embedding_pooling is not None and _lacks_lm_head(weights, network):
            config = replace(config, has_lm_head=False)
        if family.fitting is not None:
            config = family.fitting(config, weights.names)
        network = declare(config, network)
        _check_tensors(weights, network, gguf_file_of(directory) or directory)
        plans = tuple(tuple(plan_rank(network, rank)) for rank in range(config.mapping.world_size))
        check_quantization(config, plans, str(directory))
        _check_tied_lm_head(weights, network)
        dequantized = dequantized_blocks(network, weights, config.dtype)
        if published is not None and dequantized is None:
            dequantized = dequantization(published, network, weights, kept, config.dtype, str(directory))
        return cls(network, plans, weights, dequantized, kept)

    @property
    def config(self) -> CheckpointConfig:
        """Config of the checkpoint that the model becomes."""
        return self.network.config

    @property
    def left_out(self) -> LeftOut:
        """Tensors that no rank has."""
        names = self._weights.names
        return LeftOut(
            num_vision=sum(_is_of_vision_tower(name, self.config) for name in names),
            num_prediction=sum(_is_of_prediction(name, self.config) for name in names),
        )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Type of the tensors that are not quantised."""
        return np.dtype(dtype_name(self.config.dtype))

    def tensors(self, rank: int) -> QuantizingTensors | KeptTensors:
        """The tensors of a rank, converted while they are read."""
        if self.kept is not None:
            return KeptTensors(self._weights, self.plans[rank], self.numpy_dtype, self.kept)
        plain = ModelTensors(self._weights, self.plans[rank], self.numpy_dtype)
        return QuantizingTensors(plain, self.config.quantization)


def _layers_of_joined_rows(network: Network) -> dict[str, int]:
    """Numbers of joined rows that linear layers read, by path; without layers that read single rows."""
    parts = (part for site in adapter_sites(network) for part in site.parts)
    return {part.source: part.joined_rows for part in parts if part.joined_rows > 1}


def _in_whole_model(expected: Collection[str]) -> Callable[[str], str]:
    """Maps norm.weight to model.norm.weight: embedding models are saved without the module around the decoder."""
    of_decoder = {name.partition(".")[2]: name for name in expected if name.count(".") > 1}
    return lambda name: name if name in expected else of_decoder.get(name, name)


def _lacks_lm_head(weights: HfWeights, network: Network) -> bool:
    """True if config.json implies an lm_head that was not saved, as with embedding models."""
    names = lm_head_tensors(network)
    return bool(names) and not any(name in weights for name in names)


def check_quantization(config: CheckpointConfig, plans: Sequence[Sequence[PlannedTensor]], subject: str) -> None:
    """Raises ConfigError, beginning with `subject`, if these tensors cannot be quantised this way."""
    if config.quantization is None:
        return
    problems = config.quantization.problems()
    for plan in plans:
        problems += config.quantization.shape_problems(
            {tensor.name: tensor.shape for tensor in plan if tensor.quantized}
        )
    if problems:
        raise ConfigError(f"{subject}: quantization: " + "; ".join(dict.fromkeys(problems)))


def _check_tensors(weights: HfWeights, network: Network, model_dir: Path) -> None:
    """Raises CheckpointError that lists every tensor that is missing, unused, or of another shape or dtype."""
    expected = hf_tensor_shapes(network)
    missing = [name for name in expected if name not in weights]
    unused = [
        name
        for name in weights.names
        if name not in expected and not _is_harmless(name, network) and not _is_zero_bias(name, weights)
    ]
    differing = []
    for name, shape in expected.items():
        if name not in weights:
            continue
        spec = weights.spec(name)
        if spec.shape != shape:
            differing.append(f"tensor '{name}' is {list(spec.shape)}, but config.json makes it {list(shape)}")
        if spec.dtype not in CHECKPOINT_DTYPES:
            accepted = ", ".join(map(str, CHECKPOINT_DTYPES))
            differing.append(f"tensor '{name}' is of {spec.dtype}; accepted: {accepted}")
    problems = []
    if missing:
        problems.append(f"missing tensors: {', '.join(missing)}")
    if unused:
        problems.append(f"unexpected tensors: {', '.join(unused)}")
    problems.extend(differing)
    if problems:
        raise CheckpointError(f"{model_dir}: " + "; ".join(problems))


def _is_harmless(name: str, network: Network) -> bool:
    tied = tied_lm_head(network)
    if tied is not None and name == tied.lm_head:
        return True
    if name in network.unused_tensors:
        return True
    if _is_of_vision_tower(name, network.config) or _is_of_prediction(name, network.config):
        return True
    ignored = family_of(network.config.architecture).ignored_tensors
    return any(re.fullmatch(pattern, name) for pattern in ignored)


def _is_zero_bias(name: str, weights: HfWeights) -> bool:
    """True for a quantised layer's bias that is all zeros: AutoGPTQ added a bias to every layer."""
    layer = name.removesuffix(".bias")
    return name != layer and f"{layer}.weight" in weights.matrices and not weights.joined_rows(name).any()


def _is_of_prediction(name: str, config: CheckpointConfig) -> bool:
    pattern = family_of(config.architecture).prediction_tensors
    return pattern is not None and re.fullmatch(pattern, name) is not None


def _is_of_vision_tower(name: str, config: CheckpointConfig) -> bool:
    vision = family_of(config.architecture).vision
    return vision is not None and name.startswith(vision.tensor_prefixes)


def _check_tied_lm_head(weights: HfWeights, network: Network) -> None:
    """A tied checkpoint may also store lm_head.weight, which must equal the embedding."""
    tied = tied_lm_head(network)
    if tied is None or tied.lm_head not in weights:
        return
    complaint = (
        f"{weights.where(tied.lm_head)} differs from {tied.embedding}, although tie_word_embeddings is true; "
        "set it to false to use both, or remove the tensor"
    )
    embedding = weights.spec(tied.embedding)
    if weights.spec(tied.lm_head) != TensorSpec(tied.lm_head, embedding.dtype, embedding.shape):
        raise CheckpointError(complaint)
    rows = range(network.config.vocab_size)
    for head, row in zip(weights.rows(tied.lm_head, rows), weights.rows(tied.embedding, rows), strict=True):
        if not np.array_equal(to_float32(head), to_float32(row)):
            raise CheckpointError(complaint)
