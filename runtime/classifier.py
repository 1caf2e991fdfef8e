"""Classifiers: an engine's own head, or an adapter's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .._core import AdapterError, PoolingLayer, PoolingParams, PoolingType
from ..formats.adapter.classifier_head import ClassifierHead
from ..formats.adapter.pooler import AdaptedPooler
from ..formats.checkpoint.pooling import MULTI_LABEL, PROBLEM_TYPES, REGRESSION, problem_type_of
from .loaded_engine import LoadedEngine
from .pooled import POOLING_TYPES, FloatArray, PromptTokens


@dataclass(frozen=True)
class Classification:
    """Classification of a text or token."""

    label: str
    """Label of the most likely class."""
    probs: FloatArray
    """float32 [classes]: probabilities, which sum up to 1 if a text has one label; predicted values of a regression."""


@dataclass(frozen=True, eq=False)
class AdaptedClassifier:
    """Classes, and the layers that turn a text's hidden states into their probabilities."""

    labels: tuple[str, ...]
    problem_type: str
    """See Classifier.problem_type."""
    per_token: bool
    params: PoolingParams

    def classifications(self, logits: FloatArray) -> Classification | list[Classification]:
        """Classifies a text or each of its tokens, from a request's pooled output."""
        return [self.classification(row) for row in logits] if self.per_token else self.classification(logits)

    def classification(self, logits: FloatArray) -> Classification:
        """Classifies one row of logits [classes]."""
        return Classification(self.labels[int(logits.argmax())], self.probabilities(logits))

    def probabilities(self, logits: FloatArray) -> FloatArray:
        """Returns probabilities or predicted values of logits [..., classes], float32 of the same shape."""
        wide = logits.astype(np.float64)
        if self.problem_type == MULTI_LABEL:
            wide = 1.0 / (1.0 + np.exp(-wide))
        elif self.problem_type != REGRESSION:
            wide = np.exp(wide - wide.max(-1, keepdims=True))
            wide /= wide.sum(-1, keepdims=True)
        return wide.astype(np.float32)


def engine_classifier(engine: LoadedEngine) -> AdaptedClassifier | None:
    """Returns the classifier of the engine's model; None: the model is no classifier."""
    stated, classes = engine.config.pretrained_config.classifier, engine.classes
    if stated is None or classes is None:
        return None
    pooler = _pooler(engine, None, str(engine.directory), per_token=stated.per_token)
    params = _params(engine, pooler, classes, per_token=stated.per_token)
    return AdaptedClassifier(stated.labels, stated.problem_type, stated.per_token, params)


def adapted_classifier(
    head: ClassifierHead, pooler: AdaptedPooler | None, engine: LoadedEngine, directory: Path
) -> AdaptedClassifier:
    """Returns the classifier of an adapter's head and pooler on an engine. Raises AdapterError if they do not fit the
    engine.
    """
    config = engine.config.pretrained_config
    num_labels, width = head.weight.shape
    if width != config.hidden_size:
        raise AdapterError(
            f"{directory}: the classifier's head has weight [{num_labels}, {width}]; the model's hidden size is "
            f"{config.hidden_size}"
        )
    if head.problem_type not in (None, *PROBLEM_TYPES):
        raise AdapterError(f"{directory}: problem_type is {head.problem_type!r}; accepted: {', '.join(PROBLEM_TYPES)}")
    stated = config.classifier
    base = stated if stated is not None and len(stated.labels) == num_labels else None
    labels = head.labels or (tuple(f"LABEL_{i}" for i in range(num_labels)) if base is None else base.labels)
    problem_type = head.problem_type or (None if base is None else base.problem_type)
    layer = _own_layer(engine, head, pooler, str(directory))
    if layer is None:
        layer = _pooler(engine, pooler, str(directory), per_token=head.per_token)
    return AdaptedClassifier(
        labels,
        problem_type_of(problem_type, num_labels),
        head.per_token,
        _params(engine, layer, PoolingLayer(head.weight, head.bias), per_token=head.per_token),
    )


def without_padding(prompt: PromptTokens, engine: LoadedEngine, classifier: AdaptedClassifier) -> PromptTokens:
    """Removes trailing padding if the last token decides: transformers takes the last token that is no padding, and
    decoders ignore later tokens.
    """
    pad = engine.config.pretrained_config.pad_token_id
    if classifier.params.pooling_type is not PoolingType.LAST:
        return prompt
    end = len(prompt.ids)
    while end > 1 and prompt.ids[end - 1] == pad:
        end -= 1
    return prompt.up_to(end)


def _own_layer(
    engine: LoadedEngine, head: ClassifierHead, adapted: AdaptedPooler | None, subject: str
) -> PoolingLayer | None:
    """Returns the adapter's layer before its last one; None: it uses the model's layer or needs none."""
    config, before = engine.config.pretrained_config, head.before
    expected = None if head.per_token else config.head_layer
    if before is None:
        if expected is None:
            return None
        raise AdapterError(
            f"{subject}: the classifier's head has one layer; that of {config.architecture} has {expected.path} before "
            "the last one"
        )
    if expected is None or before.path != expected.path:
        accepted = "none" if expected is None else expected.path
        raise AdapterError(
            f"{subject}: the classifier's head has {before.path}; accepted before the last layer of "
            f"{config.architecture}: {accepted}"
        )
    if before.weight.shape != (config.hidden_size, config.hidden_size):
        raise AdapterError(
            f"{subject}: {before.path}.weight is {list(before.weight.shape)}; the model's hidden size is "
            f"{config.hidden_size}"
        )
    if adapted is not None:
        raise AdapterError(f"{subject}: has its own {before.path} and also changes the model's; accepted: one of them")
    return PoolingLayer(before.weight, before.bias, expected.activation)


def _pooler(
    engine: LoadedEngine, adapted: AdaptedPooler | None, subject: str, *, per_token: bool
) -> PoolingLayer | None:
    """Returns the layer before a classifier's last one; None: it has none. Raises AdapterError if it is missing."""
    config = engine.config.pretrained_config
    if not config.classifiers_need_pooler(per_token=per_token):
        return None
    pooler = engine.pooler
    if pooler is None:
        raise AdapterError(
            f"{subject}: a classifier of {config.architecture} needs a pooler, and {engine.directory} was built from a "
            "model without one"
        )
    if adapted is None:
        return pooler
    weight = adapted.weight_over(np.asarray(pooler.weight, np.float32))
    norm = (pooler.norm_weight, pooler.norm_bias, pooler.norm_epsilon)
    return PoolingLayer(weight, adapted.bias_over(pooler.bias), pooler.activation, *norm)


def _params(engine: LoadedEngine, pooler: PoolingLayer | None, last: PoolingLayer, *, per_token: bool) -> PoolingParams:
    row = POOLING_TYPES[engine.config.pretrained_config.classified_row]
    return PoolingParams(PoolingType.ALL if per_token else row, [last] if pooler is None else [pooler, last])
