"""The table of formats: each has vLLM's name of its parser, and a text by which templates show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .form import CallForm
from .hermes import HermesForm
from .llama3 import Llama3Form

HERMES: Final = "hermes"
LLAMA3_JSON: Final = "llama3_json"
AUTO: Final = "auto"
"""Value of --tool_call_parser: the template decides."""

FORMS: Final[Mapping[str, CallForm]] = {HERMES: HermesForm(), LLAMA3_JSON: Llama3Form()}
"""Formats by their names for --tool_call_parser."""
ALIASES: Final[Mapping[str, str]] = {"llama4_json": LLAMA3_JSON}
"""vLLM's names of parsers whose format is another one's."""
MARKERS: Final = (("<tool_call>", HERMES), ("<|python_tag|>", LLAMA3_JSON), ('"parameters": dictionary', LLAMA3_JSON))
"""Texts in templates and the formats that they show. The first one that a template has decides."""


def form_of_template(template: str) -> str | None:
    """Returns the name of the format in which a chat template writes calls; None: it has no known marker."""
    return next((name for marker, name in MARKERS if marker in template), None)
