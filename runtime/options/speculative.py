"""Speculative decoding, and TensorRT-LLM's decoding modes.

Requests and configurations copy LookaheadDecodingConfig, ExternalDraftTokensConfig and DecodingConfig to C++ structs
when they are set (cpp/bindings/decoding_casters.h).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Final

from .checked_fields import (
    BOOL,
    FLOAT,
    TENSOR,
    TOKEN,
    CheckedFields,
    instance_of,
    integer,
    list_of,
    optional,
)

_POSITIVE: Final = integer(1)
_CHOICES: Final = optional(list_of(list_of(integer(0))))


@dataclass(eq=False)
class ExternalDraftTokensConfig(CheckedFields):
    """Request.external_draft_tokens_config: tokens that are expected right after the prompt.

    A step computes them together. They count only while they equal the tokens that are generated anyway, so they change
    no result.

    logits: [tokens, vocab_size], any array or tensor; the object itself is kept. Requests with logits,
        acceptance_threshold or fast_logits=True are rejected, because drafts must be exactly right.
    """

    tokens: Annotated[list[int], list_of(TOKEN)]
    logits: Annotated[Any, optional(TENSOR)] = None
    acceptance_threshold: Annotated[float | None, optional(FLOAT)] = None
    fast_logits: Annotated[bool | None, optional(BOOL)] = None


@dataclass(eq=False)
class LookaheadDecodingConfig(CheckedFields):
    """Request.lookahead_config and DecodingConfig.lookahead_decoding_config: drafts from a sequence's own text.

    The newest tokens are searched in the earlier text. The tokens that followed them there become the drafts.

    max_window_size: maximum number of drafts per step.
    max_ngram_size: length of the longest n-gram, whose last token is the first draft; 1: no drafts.
    max_verification_set_size: maximum number of places in the text to compare, the newest first; 0: no drafts.

    With max_ngram_size 1 the others must be 1 and 0.
    """

    max_window_size: Annotated[int, _POSITIVE]
    max_ngram_size: Annotated[int, _POSITIVE]
    max_verification_set_size: Annotated[int, integer(0)]


@dataclass(eq=False)
class EagleConfig(CheckedFields):
    """Request.eagle_config and DecodingConfig.eagle_config. Executors reject it."""

    eagle_choices: Annotated[list[list[int]] | None, _CHOICES] = None
    greedy_sampling: Annotated[bool, BOOL] = True
    posterior_threshold: Annotated[float | None, optional(FLOAT)] = None
    use_dynamic_tree: Annotated[bool, BOOL] = False
    dynamic_tree_max_topK: Annotated[int | None, optional(_POSITIVE)] = None


@dataclass(eq=False)
class SpeculativeDecodingConfig(CheckedFields):
    """ExecutorConfig.spec_dec_config. Executors reject it."""

    fast_logits: Annotated[bool, BOOL] = False


class _Mode(enum.Flag):
    AUTO = enum.auto()
    TOP_K = enum.auto()
    TOP_P = enum.auto()
    BEAM_SEARCH = enum.auto()
    MEDUSA = enum.auto()
    LOOKAHEAD = enum.auto()
    EXPLICIT_DRAFT_TOKENS = enum.auto()
    EAGLE = enum.auto()


_MODE_NAMES: Final = (
    "Auto",
    "TopK",
    "TopP",
    "TopKTopP",
    "BeamSearch",
    "Medusa",
    "Lookahead",
    "ExplicitDraftTokens",
    "Eagle",
)


class DecodingMode:
    """TensorRT-LLM's decoding mode. Static methods make modes; methods that begin with "is" query them."""

    def __init__(self, mode: _Mode) -> None:
        """Called by the static methods."""
        self._mode = mode

    @staticmethod
    def Auto() -> DecodingMode:
        """Mode that the request's SamplingConfig needs."""
        return DecodingMode(_Mode.AUTO)

    @staticmethod
    def TopK() -> DecodingMode:
        """Samples from the k most likely tokens."""
        return DecodingMode(_Mode.TOP_K)

    @staticmethod
    def TopP() -> DecodingMode:
        """Samples from the most likely tokens whose probabilities sum up to p."""
        return DecodingMode(_Mode.TOP_P)

    @staticmethod
    def TopKTopP() -> DecodingMode:
        """Top k and top p together."""
        return DecodingMode(_Mode.TOP_K | _Mode.TOP_P)

    @staticmethod
    def BeamSearch() -> DecodingMode:
        """Beam search."""
        return DecodingMode(_Mode.BEAM_SEARCH)

    @staticmethod
    def Medusa() -> DecodingMode:
        """Speculation with Medusa's heads."""
        return DecodingMode(_Mode.MEDUSA)

    @staticmethod
    def Lookahead() -> DecodingMode:
        """Speculation with n-grams of earlier text."""
        return DecodingMode(_Mode.LOOKAHEAD)

    @staticmethod
    def ExplicitDraftTokens() -> DecodingMode:
        """Speculation with a recurrent drafter."""
        return DecodingMode(_Mode.EXPLICIT_DRAFT_TOKENS)

    @staticmethod
    def Eagle() -> DecodingMode:
        """Speculation with EAGLE."""
        return DecodingMode(_Mode.EAGLE)

    @property
    def name(self) -> str:
        """Name of the static method that makes this mode."""
        return next(name for name in _MODE_NAMES if getattr(DecodingMode, name)() == self)

    def isAuto(self) -> bool:
        """True for Auto()."""
        return _Mode.AUTO in self._mode

    def isTopK(self) -> bool:
        """True if top k is used."""
        return _Mode.TOP_K in self._mode

    def isTopP(self) -> bool:
        """True if top p is used."""
        return _Mode.TOP_P in self._mode

    def isTopKorTopP(self) -> bool:
        """True if top k or top p is used."""
        return self.isTopK() or self.isTopP()

    def isTopKandTopP(self) -> bool:
        """True if top k and top p are used."""
        return self.isTopK() and self.isTopP()

    def isBeamSearch(self) -> bool:
        """True for BeamSearch()."""
        return _Mode.BEAM_SEARCH in self._mode

    def isMedusa(self) -> bool:
        """True for Medusa()."""
        return _Mode.MEDUSA in self._mode

    def isLookahead(self) -> bool:
        """True for Lookahead()."""
        return _Mode.LOOKAHEAD in self._mode

    def isExplicitDraftTokens(self) -> bool:
        """True for ExplicitDraftTokens()."""
        return _Mode.EXPLICIT_DRAFT_TOKENS in self._mode

    def isEagle(self) -> bool:
        """True for Eagle()."""
        return _Mode.EAGLE in self._mode

    def __eq__(self, other: object) -> bool:
        return self._mode == other._mode if isinstance(other, DecodingMode) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._mode)

    def __repr__(self) -> str:
        return f"DecodingMode({self._mode})"


@dataclass(eq=False)
class DecodingConfig(CheckedFields):
    """ExecutorConfig.decoding_config. Executors reject modes other than Auto and Lookahead.

    Setting one of the last three fields also sets its decoding_mode.
    """

    decoding_mode: Annotated[DecodingMode | None, optional(instance_of(DecodingMode))] = None
    lookahead_decoding_config: Annotated[
        LookaheadDecodingConfig | None, optional(instance_of(LookaheadDecodingConfig))
    ] = None
    medusa_choices: Annotated[list[list[int]] | None, _CHOICES] = None
    eagle_config: Annotated[EagleConfig | None, optional(instance_of(EagleConfig))] = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        mode = _MODES.get(name)
        if mode is not None and value is not None:
            self.decoding_mode = mode


_MODES: Final = {
    "lookahead_decoding_config": DecodingMode.Lookahead(),
    "medusa_choices": DecodingMode.Medusa(),
    "eagle_config": DecodingMode.Eagle(),
}
