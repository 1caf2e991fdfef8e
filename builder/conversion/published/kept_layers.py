"""Chooses the layers of a network that keep their published integers or codes, and scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...._core import CheckpointError, DType
from ....common.progress import format_bytes
from ....formats.checkpoint.config import ParallelMapping
from ....formats.checkpoint.hf_weights import HfWeights, MadeMatrix
from ....formats.checkpoint.quantization import QuantConfig, quantized_specs
from ....formats.hugging_face.published.formats import WEIGHT, PublishedFormat, QuantizedMatrix
from ....formats.hugging_face.published.gguf_blocks import format_of
from ....formats.network.network import Network
from ....formats.network.ops import Experts, Linear
from ....formats.network.weights import LinearWeight, Split


@dataclass(frozen=True)
class KeptLayers:
    """Layers of a model that keep their published weights, and how a checkpoint stores them."""

    format: str
    """Text of PublishedFormat.describe()."""
    quantization: QuantConfig
    """Quantisation of the checkpoint. The layers that it excludes are not quantised."""
    matrices: Mapping[str, QuantizedMatrix]
    """Matrices by the names of their weights in the network."""
    published_bytes: int
    """Size of the published tensors."""
    rounds_activations: bool
    """True if the format's library rounds activations when it runs the model. Engines with these layers do not."""
    num_bytes: int
    """Size in an engine. A checkpoint stores 2-bit and 3-bit integers in four bits."""

    def describe(self) -> str:
        """A summary for the user."""
        how = replace(self.quantization, exclude_modules=())
        activations = "; activations are not rounded" if self.rounds_activations else ""
        return (
            f"{len(self.matrices)} matrices of {self.format}, {format_bytes(self.published_bytes)}, as "
            f"{how.describe()}, {format_bytes(self.num_bytes)}{activations}"
        )


def linear_layers(network: Network) -> Iterator[tuple[LinearWeight, ...]]:
    """The weights of every linear layer, and of the experts of every layer that has experts."""
    for op in network.ops:
        if isinstance(op, Linear):
            yield op.weights
        elif isinstance(op, Experts):
            yield (*op.gate, *op.up, *op.down)


def linear_weights(network: Network) -> Iterator[LinearWeight]:
    """Every weight of a linear layer, experts included."""
    for weights in linear_layers(network):
        yield from weights


def check_orientation(network: Network, matrices: Mapping[str, MadeMatrix], subject: str) -> None:
    """Raises CheckpointError for quantised Conv1D layers, whose weights are transposed."""
    problems = [
        f"layer '{part.source}' is a Conv1D, which is not supported with quantised weights"
        for weight in linear_weights(network)
        for part in weight.parts
        if part.transposed and part.source + WEIGHT in matrices
    ]
    if problems:
        raise CheckpointError(f"{subject}: " + "; ".join(dict.fromkeys(problems)))


def kept_layers(
    found: PublishedFormat, network: Network, weights: HfWeights, matrices: Mapping[str, QuantizedMatrix]
) -> KeptLayers | None:
    """The layers of a network that a checkpoint can keep as published; None: no layer. `matrices` are by name.

    A checkpoint has one quantisation for all layers. So the most common one is kept, and layers with another one are
    dequantised. A fused layer of an engine is kept whole or not at all. Splits over ranks must fall between groups.
    """
    own = {name: matrix.kept_as() for name, matrix in matrices.items()}
    layers = [(layer, _of_layer(layer, own, network.config.mapping)) for layer in linear_layers(network)]
    counted = Counter(how for _, how in layers if how is not None)
    if not counted:
        return None
    ((common, _),) = counted.most_common(1)
    names = {_source(part.source) for layer, how in layers if how == common for each in layer for part in each.parts}
    excluded = [str(each.name) for layer, how in layers if how != common for each in layer]
    scale_types = {how.scale_dtype for name in names if (how := own[name]) is not None}
    value_dtype = network.config.dtype if common.is_codebook and found.has_model_dtype else common.value_dtype
    quantization = replace(
        common,
        value_dtype=value_dtype,
        scale_dtype=scale_types.pop() if len(scale_types) == 1 else common.scale_dtype,
        act_order=any(how.act_order for name in names if (how := own[name]) is not None),
        exclude_modules=tuple(dict.fromkeys(excluded)),
    )
    used = {name: matrix for name, matrix in matrices.items() if name in names}
    return KeptLayers(
        format=format_of(found, used.values()),
        quantization=quantization,
        matrices=used,
        rounds_activations=found.rounds_activations,
        published_bytes=weights.stored_bytes(used),
        num_bytes=sum(
            spec.num_bytes * (quantization.bits if spec.name == name else 4) // 4
            for name, matrix in used.items()
            for spec in quantized_specs(name, matrix.shape, quantization)
        ),
    )


def _of_layer(
    layer: tuple[LinearWeight, ...], own: Mapping[str, QuantConfig | None], mapping: ParallelMapping
) -> QuantConfig | None:
    """The quantisation with which all matrices of one layer can be kept, in _comparable()'s form; None: the layer
    cannot be kept."""
    hows: set[QuantConfig | None] = set()
    for weight in layer:
        if not weight.quantized or weight.name.layer is None:
            return None
        num_ranks = mapping.tp_size if weight.expert is None else mapping.moe_tp_size
        for part in weight.parts:
            how = own.get(_source(part.source))
            if how is None or (weight.split is Split.ROW and not _can_be_cut(weight.inputs, num_ranks, how)):
                return None
            hows.add(_comparable(how))
    return hows.pop() if len(hows) == 1 else None


def _can_be_cut(inputs: int, num_ranks: int, how: QuantConfig) -> bool:
    """True if each rank gets whole groups, or whole bytes, of the inputs.

    With an input permutation, a rank's inputs come from any group, so such weights cannot be split.
    """
    return num_ranks == 1 or (not how.act_order and inputs // num_ranks % (how.group_size or how.packed_inputs) == 0)


def _comparable(how: QuantConfig) -> QuantConfig:
    """A form that is equal for all quantisations that one checkpoint can mix: any scale type becomes float32, any
    permutation is dropped."""
    return replace(how, act_order=False, scale_dtype=DType.FLOAT32 if how.has_typed_scales else how.scale_dtype)


def _source(layer: str) -> str:
    return layer + WEIGHT
