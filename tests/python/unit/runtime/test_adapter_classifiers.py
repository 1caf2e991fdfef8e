"""A query for a loaded classifier does not read one from disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from adaptrt.runtime import adapter_classifiers
from adaptrt.runtime.adapter_classifiers import AdapterClassifiers


def test_known_reads_no_file_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    head = object()

    def engine_classifier(engine: Any) -> Any:
        read.append(engine)
        return head

    monkeypatch.setattr(adapter_classifiers, "engine_classifier", engine_classifier)
    engine = cast(Any, SimpleNamespace(directory="engine"))
    classifiers = AdapterClassifiers(engine)
    assert classifiers.known(None) is None
    assert not read
    assert classifiers.classifier_for(None, None) is head
    assert classifiers.known(None) is head
    assert read == [engine]
