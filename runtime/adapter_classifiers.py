"""Adapters that are classifiers: finds them, and reads their heads and poolers."""

from __future__ import annotations

from functools import cached_property

from .._core import AdapterError, RequestError
from ..common.json_fields import load_json_object
from ..formats.adapter.adapter_copy import adapter_files
from ..formats.adapter.classifier_head import is_classifier
from ..formats.adapter.one_version import one_version
from ..formats.adapter.peft_reader import read_classifier_head, read_pooler
from ..formats.adapter.pooler import AdaptedPooler
from ..formats.adapter.recognise import CONFIG_FILE, MAX_CONFIG_BYTES
from .adapter_versions import without_versions
from .classifier import AdaptedClassifier, adapted_classifier, engine_classifier
from .engine import LoadedEngine
from .named_adapter import AdapterSum, NamedAdapter, check_unchanged


class AdapterClassifiers:
    """Classifiers of an engine and of adapters on disk, read on first use. Thread-safe."""

    def __init__(self, engine: LoadedEngine) -> None:
        """Reads nothing until the first call."""
        self._engine = engine
        self._has_read_engine = False

    def classifier_for(self, name: str | None, found: NamedAdapter | AdapterSum | None) -> AdaptedClassifier:
        """Returns the classifier of the adapter `found`, called `name`, or of no adapter: the adapter's own head, or
        else the model's.

        Raises RequestError if neither exists, EngineError for files that have changed.
        """
        if isinstance(found, NamedAdapter):
            own = self.head_of(found)
            if own is not None:
                return own
        if self._engine_classifier is None:
            adapter = "" if name is None else f", nor is adapter '{without_versions(name)}'"
            raise RequestError(
                f"{self._engine.directory}: the model is no classifier{adapter}; accepted: models for classification, "
                "and adapters of task_type SEQ_CLS or TOKEN_CLS"
            )
        if found is not None:
            self._refuse_poolers(found)
        return self._engine_classifier

    def refuse(self, found: NamedAdapter | AdapterSum) -> None:
        """Raises RequestError for an adapter of a classifier, which cannot generate."""
        for adapter in found.adapters:
            if self.is_classifier(adapter):
                raise RequestError(
                    f"adapter '{adapter.name}' is a classifier and cannot generate; accepted: requests that "
                    "classify (LLM.classify, POST /classify)"
                )

    def head_of(self, adapter: NamedAdapter) -> AdaptedClassifier | None:
        """Returns the adapter's own head; None: it is no classifier. Raises AdapterError for an invalid head."""
        if not self.is_classifier(adapter):
            return None
        known = adapter.facts.classifier
        if known is None:
            with one_version(adapter.directory, adapter_files):
                check_unchanged(adapter, self._engine)
                fields = load_json_object(adapter.directory / CONFIG_FILE, AdapterError, max_bytes=MAX_CONFIG_BYTES)
                head = read_classifier_head(adapter.directory, fields)
            known = adapted_classifier(head, self._pooler_of(adapter), self._engine, adapter.directory)
            adapter.facts.classifier = known
        return known

    def is_classifier(self, adapter: NamedAdapter) -> bool:
        """True if the adapter's config says that it is a classifier. Raises AdapterError for a config that cannot be
        read.
        """
        known = adapter.facts.is_classifier
        if known is None:
            known = is_classifier(
                load_json_object(adapter.directory / CONFIG_FILE, AdapterError, max_bytes=MAX_CONFIG_BYTES)
            )
            adapter.facts.is_classifier = known
        return known

    def known(self, found: NamedAdapter | AdapterSum | None) -> AdaptedClassifier | None:
        """Returns the classifier of classifier_for() if it is in memory. None: classifier_for() would read files or
        raise.
        """
        if isinstance(found, NamedAdapter) and found.facts.is_classifier is not False:
            return found.facts.classifier
        if not self._has_read_engine:
            return None
        if found is not None and any(adapter.facts.has_pooler is not False for adapter in found.adapters):
            return None
        return self._engine_classifier

    @cached_property
    def _engine_classifier(self) -> AdaptedClassifier | None:
        found = engine_classifier(self._engine)
        self._has_read_engine = True
        return found

    def _refuse_poolers(self, found: NamedAdapter | AdapterSum) -> None:
        """Raises RequestError for adapters that change the pooler but use the model's head."""
        for adapter in found.adapters:
            if self._pooler_of(adapter) is not None:
                raise RequestError(
                    f"adapter '{adapter.name}' changes the pooler, which classifiers read, and has no head of its own; "
                    "accepted: adapters of task_type SEQ_CLS or TOKEN_CLS, and those of other layers only"
                )

    def _pooler_of(self, adapter: NamedAdapter) -> AdaptedPooler | None:
        facts = adapter.facts
        if facts.has_pooler is None:
            with one_version(adapter.directory):
                fields = load_json_object(adapter.directory / CONFIG_FILE, AdapterError, max_bytes=MAX_CONFIG_BYTES)
                facts.pooler = read_pooler(adapter.directory, fields, self._engine.adapted_modules)
            facts.has_pooler = facts.pooler is not None
        return facts.pooler
