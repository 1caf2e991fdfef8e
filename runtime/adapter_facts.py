"""Facts about an adapter that are kept in memory, so that its files are not read again."""

from __future__ import annotations

from dataclasses import dataclass

from .._core import PromptTuningConfig
from ..formats.adapter.pooler import AdaptedPooler
from ..formats.adapter.proof import AdapterProof
from ..formats.adapter.terms import AdapterTerms
from .classifier import AdaptedClassifier


@dataclass(eq=False)
class AdapterFacts:
    """Facts from an adapter's files. None: not read yet.

    The files determine all values, so threads that read the same file at once write the same value.
    """

    digest: str | None = None
    """adapter_digests() of the files: identifies this version of the adapter."""
    num_bytes: int = 0
    """Size of the files; 0 as long as the digest is not known."""
    source: str = ""
    """Name, path or origin that the adapter was loaded from; empty: its directory."""
    kind: str | None = None
    """Adapter.short_kind, or "virtual_tokens"."""
    max_rank: int | None = None
    """Maximum rank of its modules; 0 for virtual tokens."""
    last_used: float | None = None
    """Time of the newest request, in seconds since the epoch; None: there was none."""
    terms: AdapterTerms | None = None
    invocation_tokens: tuple[int, ...] | None = None
    num_virtual_tokens: int | None = None
    is_classifier: bool | None = None
    classifier: AdaptedClassifier | None = None
    """The adapter's own head if it is a classifier."""
    has_pooler: bool | None = None
    pooler: AdaptedPooler | None = None
    has_tokenizer: bool | None = None
    has_draft: bool | None = None
    """True if the adapter brings one for the draft engine."""
    proof: AdapterProof | None = None
    """Log probs that the adapter must give; None: it has no adapter_proof.json, or is one that the engine carries."""


@dataclass(frozen=True)
class ReadyAdapter:
    """Facts about an adapter that a request needs before it is queued."""

    terms: AdapterTerms
    prompt: PromptTuningConfig | None
    """Virtual tokens that the adapter puts before a prompt; None: it has none."""
    num_virtual_tokens: int
