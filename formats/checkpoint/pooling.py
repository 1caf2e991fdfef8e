"""What a checkpoint says of requests that end in rows: how embeddings are pooled, and what classifiers tell apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ..._core import PoolingActivation
from ...common.json_fields import JsonFields

LAST: Final = "last"
CLS: Final = "cls"
MEAN: Final = "mean"
POOLING_TYPES: Final = (LAST, CLS, MEAN)

SINGLE_LABEL: Final = "single_label_classification"
MULTI_LABEL: Final = "multi_label_classification"
REGRESSION: Final = "regression"
PROBLEM_TYPES: Final = (SINGLE_LABEL, MULTI_LABEL, REGRESSION)
"""Hugging Face's: of one label a text, of any number of them, and of values."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingPooling:
    """How a text's hidden states become its embedding."""

    pooling_type: str
    """One of POOLING_TYPES: the last token's, the first token's, or the mean of all."""
    normalize: bool
    """The embedding is divided by its Euclidean length."""

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it."""
        return {"pooling_type": self.pooling_type, "normalize": self.normalize}

    def describe(self) -> str:
        """What people read."""
        rows = {LAST: "the last token's hidden state", CLS: "the first token's hidden state", MEAN: "the mean of all"}
        return rows[self.pooling_type] + (", normalised" if self.normalize else "")

    @classmethod
    def from_fields(cls, fields: JsonFields) -> EmbeddingPooling:
        """The inverse of to_dict; problems are noted in `fields`."""
        return cls(
            pooling_type=fields.string("pooling_type", choices=POOLING_TYPES), normalize=fields.boolean("normalize")
        )


@dataclass(frozen=True)
class HeadLayer:
    """A linear layer that a classifier of texts has before its last one, where adapters have their own of both."""

    path: str
    """In a Hugging Face model."""
    activation: PoolingActivation
    """What follows it."""


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """What a model with a head for classes tells apart."""

    labels: tuple[str, ...]
    """By number."""
    problem_type: str
    """One of PROBLEM_TYPES."""
    per_token: bool
    """Every token is classified, instead of the text."""

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it."""
        return {"labels": list(self.labels), "problem_type": self.problem_type, "per_token": self.per_token}

    def describe(self) -> str:
        """What people read, with the first labels."""
        shown = ", ".join(self.labels[:4]) + (", ..." if len(self.labels) > 4 else "")
        of = "each token" if self.per_token else "the text"
        return f"{len(self.labels)} classes of {of} ({shown}), {self.problem_type}"

    @classmethod
    def from_fields(cls, fields: JsonFields) -> Classifier:
        """The inverse of to_dict; problems are noted in `fields`."""
        return cls(
            labels=fields.strings("labels"),
            problem_type=fields.string("problem_type", choices=PROBLEM_TYPES),
            per_token=fields.boolean("per_token"),
        )


def problem_type_of(stated: str | None, num_labels: int) -> str:
    """The type that transformers' pipelines take where a config.json does not state one."""
    if stated is not None:
        return stated
    return MULTI_LABEL if num_labels == 1 else SINGLE_LABEL
