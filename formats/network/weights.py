"""The weights that a family's declaration names: their tensors in a Hugging Face model and in a checkpoint."""

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
    """What names of layers begin with: `encoder` in those of an encoder that has a decoder behind it."""

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.section}.layers.{self.layer}.{self.name}"


@dataclass(frozen=True)
class Tensor:
    """A tensor that every rank has whole: of an embedding or a norm."""

    name: TensorName
    source: str
    """Its name in a Hugging Face model."""
    shape: tuple[int, ...]
    plus_one: bool = False
    """It is stored as the difference from one."""
    float32: bool = False
    """A checkpoint has it in float32, whatever its dtype."""
    rows_before: int = 0
    """Of the Hugging Face tensor, which nothing reads."""

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Of the tensor in a Hugging Face model."""
        return (self.rows_before + self.shape[0], *self.shape[1:])


class Split(Enum):
    """What tensor parallelism cuts of a linear layer."""

    COLUMN = auto()
    """The outputs: the weight's rows, and the bias."""
    ROW = auto()
    """The inputs: the weight's columns. The bias is whole, since it is added once, to the ranks' sum."""
    NONE = auto()
    """Nothing: every rank has the layer."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Outputs of a linear layer that one module of adapters changes.

    They are rows of a linear layer of the Hugging Face model, `source`.weight [source_outputs, in] and `source`.bias.
    """

    source: str
    module: str | None
    """Its name in adaptrt._core.lora_modules(); None: adapters do not act on it."""
    outputs: int
    units: int
    """Into how many pieces tensor parallelism can cut the outputs: heads, say."""
    rows: tuple[range, ...]
    """The rows of the source, in the order of the outputs."""
    source_outputs: int
    transposed: bool = False
    """The source is a Conv1D of transformers, whose weight is [in, out]."""
    first_output: int = 0
    """Of a rank's share: where it begins in the whole model's part."""
    outputs_elsewhere: int = 0
    """Of a rank's share: outputs of the whole model's part that are not in it."""

    def cut(self, tp_size: int, tp_rank: int) -> Part:
        """A rank's share. With fewer units than ranks, ranks share one."""
        ranks_per_unit = max(1, tp_size // self.units)
        share = self.outputs // (tp_size // ranks_per_unit)
        first = share * (tp_rank // ranks_per_unit)
        return replace(
            self,
            outputs=share,
            rows=rows_between(self.rows, first, first + share),
            first_output=first,
            outputs_elsewhere=self.outputs - share,
        )


@dataclass(frozen=True, kw_only=True)
class LinearWeight:
    """W [sum of the parts' outputs, in] of a checkpoint, and its bias."""

    name: TensorName
    """Without `.weight` and `.bias`."""
    parts: tuple[Part, ...]
    inputs: int
    split: Split
    bias: bool
    row_bias: str | None = None
    """The Hugging Face tensor [1, outputs] that is the bias, where it is no part's own."""
    tied_to: Tensor | None = None
    """The embedding whose values the weight has in the Hugging Face model."""
    quantized: bool = True
    """It is in checkpoints that are quantised."""
    first_input: int = 0
    """Of a rank's share: where it begins in the whole model's inputs."""
    inputs_elsewhere: int = 0
    """Of a rank's share: inputs of the whole model's weight that other ranks have."""
    is_first_term: bool = True
    """Of a rank's share of a sum: whether it is the term to which what is added once goes."""
    num_shares: int = 1
    """Of a rank's share: into how many the whole model's weight is cut."""
    share: int = 0
    """Which of them it is."""
    expert: int | None = None
    """Whose it is, of those that ranks may have different ones of."""

    @property
    def bias_name(self) -> str:
        """The bias in a checkpoint; that of an lm_head whose weight is the embedding is lm_head's."""
        return LM_HEAD_BIAS if f"{self.name}.weight" == EMBEDDING else f"{self.name}.bias"

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return sum(part.outputs for part in self.parts)


def name_now(name: str, older_names: Mapping[str, str], older_endings: Mapping[str, str] | None = None) -> str:
    """The name that a tensor or layer of a Hugging Face model has today.

    `older_names` maps beginnings of names, `older_endings` what others end with.
    """
    for older, now in (older_endings or {}).items():
        if name.endswith(older):
            name = name.removesuffix(older) + now
    for older, now in older_names.items():
        if name.startswith(older):
            return now + name.removeprefix(older)
    return name


def whole(source: str, module: str | None, outputs: int, units: int | None = None, **settings: bool) -> Part:
    """A part that is a linear layer of the Hugging Face model; without `units` every output may be cut off."""
    return Part(
        source=source,
        module=module,
        outputs=outputs,
        units=outputs if units is None else units,
        rows=(range(outputs),),
        source_outputs=outputs,
        **settings,
    )


def stacked(source: str, parts: Sequence[tuple[str, int, int]], **settings: bool) -> tuple[Part, ...]:
    """The parts (module, outputs, units) of one linear layer that has them below one another."""
    total = sum(outputs for _, outputs, _ in parts)
    found = []
    first = 0
    for module, outputs, units in parts:
        rows = (range(first, first + outputs),)
        found.append(
            Part(
                source=source, module=module, outputs=outputs, units=units, rows=rows, source_outputs=total, **settings
            )
        )
        first += outputs
    return tuple(found)


def rows_between(rows: Sequence[range], first: int, last: int) -> tuple[range, ...]:
    """Outputs [first, last) of those that `rows` lists, with neighbours joined."""
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
