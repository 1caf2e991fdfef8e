"""Outputs that follow a grammar."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, ClassVar

from .checked_fields import TEXT, TOKEN, CheckedFields, instance_of, list_of, optional


class GuidedDecodingBackend(enum.Enum):
    """The library that reads grammars."""

    XGRAMMAR = 0
    LLGUIDANCE = 1


@dataclass(eq=False)
class GuidedDecodingConfig(CheckedFields):
    """ExecutorConfig.guided_decoding_config, which executors refuse."""

    backend: Annotated[GuidedDecodingBackend, instance_of(GuidedDecodingBackend)]
    encoded_vocab: Annotated[list[str] | None, optional(list_of(TEXT))] = None
    tokenizer_str: Annotated[str | None, optional(TEXT)] = None
    stop_token_ids: Annotated[list[int] | None, optional(list_of(TOKEN))] = None

    GuidedDecodingBackend: ClassVar[type[GuidedDecodingBackend]] = GuidedDecodingBackend


class GuideType(enum.Enum):
    """What a guide is written in."""

    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3
    STRUCTURAL_TAG = 4


@dataclass(eq=False)
class GuidedDecodingParams(CheckedFields):
    """Request.guided_decoding_params, which executors refuse."""

    guide_type: Annotated[GuideType, instance_of(GuideType)]
    guide: Annotated[str | None, optional(TEXT)] = None

    GuideType: ClassVar[type[GuideType]] = GuideType
