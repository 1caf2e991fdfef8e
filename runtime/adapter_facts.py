"""Facts about an adapter that are kept, so that its files are not read again."""

from __future__ import annotations

from dataclasses import dataclass

from .._core import PromptTuningConfig
from ..formats.adapter.pooler import AdaptedPooler
from ..formats.adapter.terms import AdapterTerms
from .classifier import AdaptedClassifier


@dataclass(eq=False)
class AdapterFacts:
    """The facts that have been read from an adapter's files so far; None: not yet.

    The files decide all of it, so that threads which read the same at once write the same value.
    """

    terms: AdapterTerms | None = None
    invocation_tokens: tuple[int, ...] | None = None
    num_virtual_tokens: int | None = None
    is_classifier: bool | None = None
    classifier: AdaptedClassifier | None = None
    """The adapter's own head, of a classifier's."""
    has_pooler: bool | None = None
    pooler: AdaptedPooler | None = None
    has_tokenizer: bool | None = None


@dataclass(frozen=True)
class ReadyAdapter:
    """The facts that a request needs about its adapter before it is queued."""

    terms: AdapterTerms
    prompt: PromptTuningConfig | None
    """The virtual tokens that the adapter puts before a prompt; None: it has none."""
    num_virtual_tokens: int
