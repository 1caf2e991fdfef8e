"""Weights that a family declares: their tensors in a Hugging Face model and in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from ..checkpoint.tensor_names import EMBEDDING, LM_HEAD_BIAS


@dataclass(frozen=True)
class TensorName:
    """A tensor's name in a checkpoint, `transformer.layers.{layer}.{name}` in a decoder layer."""

    name: str
    layer: int | None = None
    section: str = "transformer"
    """Prefix of names of layers: `encoder` in an encoder before a decoder."""

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.section}.layers.{self.layer}.{self.name}"


@dataclass(frozen=True)
class Tensor:
    """A tensor that every rank has whole, of an embedding or a norm."""

    name: TensorName
    source: str
    """Name in a Hugging Face model."""
    shape: tuple[int, ...]
    plus_one: bool = False
    """True if it is stored as the difference from one."""
    float32: bool = False
    """True if checkpoints have it in float32, whatever their dtype."""
    rows_before: int = 0
    """Number of unused rows at the start of the Hugging Face tensor."""

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in a Hugging Face model."""
        return (self.rows_before + self.shape[0], *self.shape[1:])


class Split(Enum):
    """Dimension of a linear layer that tensor parallelism cuts."""

    COLUMN = auto()
    """The outputs: the weight's rows, and the bias."""
    ROW = auto()
    """The inputs: the weight's columns. The bias is whole, because it is added once, to the ranks' sum."""
    NONE = auto()
    """None: every rank has the whole layer."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Outputs of a linear layer that one adapter module changes.

    They are rows of a linear layer of the Hugging Face model, `source`.weight [source_outputs, in] and `source`.bias.
    """

    source: str
    module: str | None
    """Name in adaptrt._core.lora_modules(); None: adapters do not act on it."""
    outputs: int
    units: int
    """Number of pieces into which tensor parallelism can cut the outputs, such as heads."""
    rows: tuple[range, ...]
    """Rows of the source, in the order of the outputs."""
    source_outputs: int
    transposed: bool = False
    """True if the source is transformers' Conv1D, whose weight is [in, out]."""
    joined_rows: int = 1
    """Number of rows that the inputs were joined from. The source has the elements of each column one after another,
    the network those of each row."""
    sections: tuple[tuple[int, int], ...] = ()
    """Outputs and units of each section, in order, if tensor parallelism cuts every section; empty: the part is one."""
    shares: tuple[range, ...] = ()
    """Ranges of the whole model's part that a rank's share consists of; empty: all outputs."""
    num_remote_outputs: int = 0
    """Number of outputs of the whole model's part that a rank's share lacks."""

    def cut(self, tp_size: int, tp_rank: int) -> Part:
        """Returns a rank's share of each section. If there are more ranks than units, several ranks share a unit."""
        shares: list[range] = []
        start = 0
        for outputs, units in self.sections or ((self.outputs, self.units),):
            shares.append(share_of_section(range(start, start + outputs), units, tp_size, tp_rank))
            start += outputs
        num_outputs = sum(map(len, shares))
        return replace(
            self,
            outputs=num_outputs,
            rows=tuple(rows for share in shares for rows in rows_between(self.rows, share.start, share.stop)),
            shares=tuple(shares),
            num_remote_outputs=self.outputs - num_outputs,
        )


@dataclass(frozen=True, kw_only=True)
class LinearWeight:
    """W [sum of the parts' outputs, in] of a checkpoint, and its bias."""

    name: TensorName
    """Name without `.weight` and `.bias`."""
    parts: tuple[Part, ...]
    inputs: int
    split: Split
    bias: bool
    row_bias: str | None = None
    """Hugging Face tensor [1, outputs] with the bias, if it does not belong to a part."""
    tied_to: Tensor | None = None
    """Embedding whose values the weight has in the Hugging Face model."""
    quantized: bool = True
    """True if quantised checkpoints quantise it."""
    first_input: int = 0
    """Start of a rank's share in the whole model's inputs."""
    num_remote_inputs: int = 0
    """Number of inputs of the whole model's weight that other ranks have."""
    is_first_term: bool = True
    """True for the rank whose term of a sum includes values that are added once, such as the bias."""
    num_shares: int = 1
    """Number of shares into which the whole model's weight is cut."""
    share: int = 0
    """Index of this share."""
    head: int | None = None
    """Index of the head, for weights of heads, which are on different ranks."""
    expert: int | None = None
    """Index of the expert, for weights of experts, which may be on different ranks."""

    @property
    def bias_name(self) -> str:
        """Name of the bias in a checkpoint.

        An lm_head that shares the embedding's weight has a bias of its own name.
        """
        return LM_HEAD_BIAS if f"{self.name}.weight" == EMBEDDING else f"{self.name}.bias"

    @property
    def outputs(self) -> int:
        """Number of rows of the weight."""
        return sum(part.outputs for part in self.parts)


def name_now(name: str, older_names: Mapping[str, str], older_endings: Mapping[str, str] | None = None) -> str:
    """Returns the current name of a tensor or layer of a Hugging Face model.

    older_names: maps older beginnings of names to current ones.
    older_endings: maps older ends of names to current ones.
    """
    for older, now in (older_endings or {}).items():
        if name.endswith(older):
            name = name.removesuffix(older) + now
    for older, now in older_names.items():
        if name.startswith(older):
            return now + name.removeprefix(older)
    return name


def whole(
    source: str,
    module: str | None,
    outputs: int,
    units: int | None = None,
    *,
    transposed: bool = False,
    joined_rows: int = 1,
) -> Part:
    """Returns a part that is a whole linear layer of the Hugging Face model; units: by default, every output is one."""
    return Part(
        source=source,
        module=module,
        outputs=outputs,
        units=outputs if units is None else units,
        rows=(range(outputs),),
        source_outputs=outputs,
        transposed=transposed,
        joined_rows=joined_rows,
    )


def share_of_section(section: range, units: int, tp_size: int, tp_rank: int) -> range:
    """Returns a rank's share of neighbouring outputs, whole units or, with more ranks than units, a shared one."""
    ranks_per_unit = max(1, tp_size // units)
    size = len(section) // (tp_size // ranks_per_unit)
    first = section.start + size * (tp_rank // ranks_per_unit)
    return range(first, first + size)


def stacked(source: str, parts: Sequence[tuple[str, int, int]], *, transposed: bool = False) -> tuple[Part, ...]:
    """Returns the parts (module, outputs, units) of one linear layer that stacks their outputs."""
    total = sum(outputs for _, outputs, _ in parts)
    found = []
    first = 0
    for module, outputs, units in parts:
        rows = (range(first, first + outputs),)
        found.append(
            Part(
                source=source,
                module=module,
                outputs=outputs,
                units=units,
                rows=rows,
                source_outputs=total,
                transposed=transposed,
            )
        )
        first += outputs
    return tuple(found)


def rows_between(rows: Sequence[range], first: int, last: int) -> tuple[range, ...]:
    """Returns outputs [first, last) of those that `rows` lists; joins adjacent ranges."""
    found: list[range] = []
    for piece in rows:
        begin, end = max(first, 0), min(last, len(piece))
        if begin < end:
            taken = piece[begin:end]
            if found and found[-1].stop == taken.start:
                taken = range(found.pop().start, taken.stop)
            found.append(taken)
        first -= len(piece)
        last -= len(piece)
    return tuple(found)
