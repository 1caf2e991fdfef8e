"""Chooses the layers of a network that keep their published integers or codes, and scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...._core import CheckpointError, DType
from ....common.progress import format_bytes
from ....formats.checkpoint.config import ParallelMapping
from ....formats.checkpoint.hf_weights import HfWeights, MadeMatrix
from ....formats.checkpoint.quantization import QuantConfig, quantized_specs
from ....formats.checkpoint.tensor_names import LM_HEAD_MODULE
from ....formats.hugging_face.published.formats import WEIGHT, PublishedFormat, QuantizedMatrix
from ....formats.hugging_face.published.gguf_blocks import format_of, joined
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
    """True if the format's library rounds activations to 8 bits. Engines with these layers do not."""
    num_bytes: int
    """Size in an engine. A checkpoint stores 2-bit and 3-bit integers in four bits."""

    def describe(self) -> str:
        """A summary for the user."""
        how = replace(self.quantization, exclude_modules=())
        activations = "; activations are not rounded to 8 bits" if self.rounds_activations else ""
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

    The most common quantisation is the checkpoint's, and layers with another one have their own. A fused layer of an
    engine is kept whole or not at all. Splits over ranks must fall between groups.
    """
    layers = [(layer, _of_layer(layer, matrices, network)) for layer in linear_layers(network)]
    counted = Counter(how for layer, how in layers if how is not None and not _is_lm_head(layer))
    if not counted:
        return None
    ((common, _),) = counted.most_common(1)
    # The stages of a pipeline number their own layers, so names do not tell layers apart.
    may_differ = network.config.mapping.pp_size == 1
    kept = [
        (layer, how)
        for layer, how in layers
        if how is not None and (may_differ or (how == common and not _is_lm_head(layer)))
    ]
    excluded = [str(each.name) for layer, how in layers if (layer, how) not in kept for each in layer]
    names = {name: how for layer, how in kept for each in layer for name in _sources(each)}
    used = {name: matrix for name, matrix in matrices.items() if name in names}

    def stored(how: QuantConfig, own: Iterable[str]) -> QuantConfig:
        value_dtype = network.config.dtype if how.is_codebook and found.has_model_dtype else how.value_dtype
        return replace(_with_own_types(how, [matrices[name] for name in own]), value_dtype=value_dtype)

    quantization = replace(
        stored(common, [name for name, how in names.items() if how == common]),
        exclude_modules=tuple(dict.fromkeys(excluded)),
        quantized_layers=tuple(
            (str(each.name), stored(how, [name for every in layer for name in _sources(every)]))
            for layer, how in kept
            if how != common or _is_lm_head(layer)
            for each in layer
        ),
    )
    hows = {
        name: quantization.of_weight(f"{each.name}.weight")
        for layer, _ in kept
        for each in layer
        for name in _sources(each)
    }
    return KeptLayers(
        format=format_of(found, used.values()),
        quantization=quantization,
        matrices=used,
        rounds_activations=found.rounds_activations,
        published_bytes=weights.stored_bytes(used),
        num_bytes=sum(
            spec.num_bytes * (hows[name].bits if spec.name == name else 4) // 4
            for name, matrix in used.items()
            for spec in quantized_specs(name, matrix.shape, hows[name])
        ),
    )


def _of_layer(
    layer: tuple[LinearWeight, ...], matrices: Mapping[str, QuantizedMatrix], network: Network
) -> QuantConfig | None:
    """The quantisation with which all matrices of one layer can be kept, in _comparable()'s form; None: the layer
    cannot be kept."""
    mapping = network.config.mapping
    hows: set[QuantConfig | None] = set()
    of_layer = []
    for weight in layer:
        if not weight.quantized:
            return None
        if weight.name.layer is None and not (_is_lm_head(layer) and network.config.vocab_size % mapping.tp_size == 0):
            return None
        for name in _sources(weight):
            if name not in matrices:
                return None
            of_layer.append(matrices[name])
            hows.add(matrices[name].kept_as())
    own = [how for how in hows if how is not None]
    if len(own) != len(hows):
        return None
    comparable = set(map(_comparable, own))
    how = comparable.pop() if len(comparable) == 1 else joined(of_layer)
    if how is None or not all(_is_cut_between_groups(weight, mapping, own) for weight in layer):
        return None
    return how


def _is_lm_head(layer: tuple[LinearWeight, ...]) -> bool:
    return len(layer) == 1 and str(layer[0].name) == LM_HEAD_MODULE


def _sources(weight: LinearWeight) -> list[str]:
    """Names of the matrices whose rows a weight has."""
    if weight.tied_to is not None:
        return [weight.tied_to.source]
    return [part.source + WEIGHT for part in weight.parts]


def _with_own_types(how: QuantConfig, matrices: Sequence[QuantizedMatrix]) -> QuantConfig:
    """Undoes _comparable(): the scales' type if it is the same everywhere, and a permutation if there is any."""
    own = [each for matrix in matrices if (each := matrix.kept_as()) is not None]
    scale_types = {each.scale_dtype for each in own if each.has_typed_scales}
    return replace(
        how,
        scale_dtype=scale_types.pop() if len(scale_types) == 1 else how.scale_dtype,
        act_order=any(each.act_order for each in own),
    )


def _is_cut_between_groups(weight: LinearWeight, mapping: ParallelMapping, hows: Iterable[QuantConfig]) -> bool:
    num_ranks = mapping.tp_size if weight.expert is None else mapping.moe_tp_size
    return weight.split is not Split.ROW or all(_can_be_cut(weight.inputs, num_ranks, how) for how in hows)


def _can_be_cut(inputs: int, num_ranks: int, how: QuantConfig) -> bool:
    """True if each rank gets whole groups, or whole bytes, of the inputs.

    With an input permutation, a rank's inputs come from any group, so such weights cannot be split.
    """
    return num_ranks == 1 or (not how.act_order and inputs // num_ranks % (how.group_size or how.packed_inputs) == 0)


def _comparable(how: QuantConfig) -> QuantConfig:
    """A form that is equal for all quantisations that one checkpoint can mix: any scale type becomes float32, any
    permutation is dropped."""
    return replace(how, act_order=False, scale_dtype=DType.FLOAT32 if how.has_typed_scales else how.scale_dtype)
