"""Which of a network's layers keep the integers or numbers of a table, and the scales, that were published."""

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
from ....formats.network.network import Network
from ....formats.network.ops import Experts, Linear
from ....formats.network.weights import LinearWeight, Split


@dataclass(frozen=True)
class KeptLayers:
    """Those of a model, and as what a checkpoint has them."""

    format: str
    """As PublishedFormat.describe."""
    quantization: QuantConfig
    """Of the checkpoint; the layers that it excludes are not quantised there."""
    matrices: Mapping[str, QuantizedMatrix]
    """By the names of their weights in the network."""
    published_bytes: int
    """Of the tensors that the matrices are made of."""
    rounds_activations: bool
    """Where the format's library runs the model, and engines of these layers do not."""
    num_bytes: int
    """Of what an engine has of them; a checkpoint stores integers of 2 and 3 bits in four."""

    def describe(self) -> str:
        """What people read."""
        how = replace(self.quantization, exclude_modules=())
        activations = "; activations are not rounded" if self.rounds_activations else ""
        return (
            f"{len(self.matrices)} matrices of {self.format}, {format_bytes(self.published_bytes)}, as "
            f"{how.describe()}, {format_bytes(self.num_bytes)}{activations}"
        )


def linear_layers(network: Network) -> Iterator[tuple[LinearWeight, ...]]:
    """The weights of every linear layer, and of the experts of every layer that has them."""
    for op in network.ops:
        if isinstance(op, Linear):
            yield op.weights
        elif isinstance(op, Experts):
            yield (*op.gate, *op.up, *op.down)


def linear_weights(network: Network) -> Iterator[LinearWeight]:
    """Those of every linear layer, of experts too."""
    for weights in linear_layers(network):
        yield from weights


def check_orientation(network: Network, matrices: Mapping[str, MadeMatrix], subject: str) -> None:
    """Raises CheckpointError for quantised layers that are Conv1D, whose weights are the other way round."""
    problems = [
        f"layer '{part.source}' is a Conv1D, which is not read quantised"
        for weight in linear_weights(network)
        for part in weight.parts
        if part.transposed and part.source + WEIGHT in matrices
    ]
    if problems:
        raise CheckpointError(f"{subject}: " + "; ".join(dict.fromkeys(problems)))


def kept_layers(
    found: PublishedFormat, network: Network, weights: HfWeights, matrices: Mapping[str, QuantizedMatrix]
) -> KeptLayers | None:
    """Those of a network whose matrices, by its names, a checkpoint can have as they were published; None: no layer.

    A checkpoint says once how its layers are quantised, so that what most of them have is kept, and the others are not.
    What is one layer in an engine is kept whole or not at all. A cut over ranks has to go between groups.
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
    value_dtype = network.config.dtype if common.is_coded and found.has_model_dtype else common.value_dtype
    quantization = replace(
        common,
        value_dtype=value_dtype,
        scale_dtype=scale_types.pop() if len(scale_types) == 1 else common.scale_dtype,
        reordered=any(how.reordered for name in names if (how := own[name]) is not None),
        exclude_modules=tuple(dict.fromkeys(excluded)),
    )
    used = {name: matrix for name, matrix in matrices.items() if name in names}
    return KeptLayers(
        format=found.describe(),
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
    """How the matrices of one layer can be kept, as _comparable says it; None: not at all."""
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
    """Whether each of so many ranks gets whole groups, or bytes, of the inputs.

    Where inputs are reordered, a rank's come from any groups.
    """
    return num_ranks == 1 or (not how.reordered and inputs // num_ranks % (how.group_size or how.packed_inputs) == 0)


def _comparable(how: QuantConfig) -> QuantConfig:
    """The same for all that checkpoints can have beside one another: any type becomes float32, any order an order."""
    return replace(how, reordered=False, scale_dtype=DType.FLOAT32 if how.has_typed_scales else how.scale_dtype)


def _source(layer: str) -> str:
    return layer + WEIGHT
