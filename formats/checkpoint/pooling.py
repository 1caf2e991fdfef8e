"""Pooling of embeddings, and classes of classifiers, as checkpoints describe them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from ..._core import PoolingActivation
from ...common.json_fields import JsonFields

LAST: Final = "last"
CLS: Final = "cls"
MEAN: Final = "mean"
POOLING_TYPES: Final = (LAST, CLS, MEAN)
ACTIVATIONS: Final = {name.lower(): activation for name, activation in PoolingActivation.__members__.items()}
"""Activations of layers on pooled hidden states, by their names in checkpoints."""

SINGLE_LABEL: Final = "single_label_classification"
MULTI_LABEL: Final = "multi_label_classification"
REGRESSION: Final = "regression"
PROBLEM_TYPES: Final = (SINGLE_LABEL, MULTI_LABEL, REGRESSION)
"""Hugging Face's problem types: one label per text, any number of labels, or values."""


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """A linear layer that sentence-transformers applies to a text's pooled hidden states."""

    path: str
    """Directory of its files in the Hugging Face model."""
    inputs: int
    outputs: int
    bias: bool
    activation: str
    """One of ACTIVATIONS."""

    @classmethod
    def from_fields(cls, fields: JsonFields) -> DenseLayer:
        """Reads the fields of the class; notes problems in `fields`."""
        return cls(
            path=fields.string("path"),
            inputs=fields.integer("inputs"),
            outputs=fields.integer("outputs"),
            bias=fields.boolean("bias"),
            activation=fields.string("activation", choices=ACTIVATIONS),
        )


@dataclass(frozen=True, kw_only=True)
class EmbeddingPooling:
    """Pooling of a text's hidden states to its embedding."""

    pooling_type: str
    """One of POOLING_TYPES: the last token's, the first token's, or the mean of all."""
    normalize: bool
    """True if the embedding is divided by its Euclidean norm, last of all."""
    dense: tuple[DenseLayer, ...] = ()
    """Layers after the pooling, in order. config.json omits them if there are none."""

    def to_dict(self) -> dict[str, Any]:
        """Content of config.json."""
        dense = {"dense": [asdict(layer) for layer in self.dense]} if self.dense else {}
        return {"pooling_type": self.pooling_type, "normalize": self.normalize, **dense}

    def describe(self) -> str:
        """Text for people."""
        rows = {LAST: "the last token's hidden state", CLS: "the first token's hidden state", MEAN: "the mean of all"}
        dense = "".join(f", a linear layer of {layer.outputs} outputs" for layer in self.dense)
        return rows[self.pooling_type] + dense + (", normalised" if self.normalize else "")

    def inconsistencies(self, hidden_size: int) -> list[str]:
        """Lists layers whose inputs differ in number from the outputs before them."""
        widths = [hidden_size, *(layer.outputs for layer in self.dense)]
        return [
            f"{layer.path} has {layer.inputs} inputs, but gets {width}"
            for layer, width in zip(self.dense, widths, strict=False)
            if layer.inputs != width
        ]

    @classmethod
    def from_fields(cls, fields: JsonFields) -> EmbeddingPooling:
        """Reads what to_dict() returned; notes problems in `fields`."""
        return cls(
            pooling_type=fields.string("pooling_type", choices=POOLING_TYPES),
            normalize=fields.boolean("normalize"),
            dense=tuple(map(DenseLayer.from_fields, fields.objects("dense"))) if "dense" in fields else (),
        )


@dataclass(frozen=True)
class HeadLayer:
    """A linear layer before a text classifier's last layer, for adapters that bring both layers."""

    path: str
    """Path in a Hugging Face model."""
    activation: PoolingActivation
    """Activation after the layer."""


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """Classes of a model with a classification head."""

    labels: tuple[str, ...]
    """Names, by index of the class."""
    problem_type: str
    """One of PROBLEM_TYPES."""
    per_token: bool
    """True if every token is classified, False if the text is."""

    def to_dict(self) -> dict[str, Any]:
        """Content of config.json."""
        return {"labels": list(self.labels), "problem_type": self.problem_type, "per_token": self.per_token}

    def describe(self) -> str:
        """Text for people, with the first labels."""
        shown = ", ".join(self.labels[:4]) + (", ..." if len(self.labels) > 4 else "")
        of = "each token" if self.per_token else "the text"
        return f"{len(self.labels)} classes of {of} ({shown}), {self.problem_type}"

    @classmethod
    def from_fields(cls, fields: JsonFields) -> Classifier:
        """Reads what to_dict() returned; notes problems in `fields`."""
        return cls(
            labels=fields.strings("labels"),
            problem_type=fields.string("problem_type", choices=PROBLEM_TYPES),
            per_token=fields.boolean("per_token"),
        )


def problem_type_of(stated: str | None, num_labels: int) -> str:
    """Returns the stated type, or transformers' default if config.json states none."""
    if stated is not None:
        return stated
    return MULTI_LABEL if num_labels == 1 else SINGLE_LABEL
