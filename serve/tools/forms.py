"""The table of formats: each has vLLM's name of its parser, and a text by which templates show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from .call_lists import CallListForm
from .deepseek import DeepSeekForm
from .form import CallForm
from .gemma import GemmaForm
from .glm import GlmForm
from .harmony import HarmonyForm, HarmonyReasoning
from .hermes import HermesForm
from .kimi import KimiForm
from .llama3 import Llama3Form
from .mistral import MistralForm
from .pythonic import PythonicBlockForm, PythonicForm
from .reasoning import GraniteReasoning, ReasoningForm, TaggedReasoning
from .tagged_calls import TaggedForm

HERMES: Final = "hermes"
LLAMA3_JSON: Final = "llama3_json"
OPENAI: Final = "openai"
AUTO: Final = "auto"
"""Value of --tool-call-parser and --reasoning-parser: the template decides."""
NONE: Final = "none"
"""Value of --reasoning-parser: reasoning is part of the text."""
_PHI4: Final = "<|tool_call|>", "<|/tool_call|>"
_FUNCTOOLS: Final = "functools", ""

FORMS: Final[Mapping[str, CallForm]] = {
    HERMES: HermesForm(),
    LLAMA3_JSON: Llama3Form(),
    OPENAI: HarmonyForm(),
    "qwen3_coder": TaggedForm("<tool_call>", "</tool_call>", has_lines=True),
    "seed_oss": TaggedForm("<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": TaggedForm(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        ('<invoke name="', '">', "</invoke>"),
        ('<parameter name="', '">', "</parameter>"),
        has_many=True,
    ),
    "mistral": MistralForm(is_named=False),
    "mistral_named": MistralForm(is_named=True),
    "glm45": GlmForm(),
    "deepseek_v3": DeepSeekForm(is_fenced=True),
    "deepseek_v31": DeepSeekForm(is_fenced=False),
    "kimi_k2": KimiForm(),
    "granite": CallListForm("<|tool_call|>", others=[("<tool_call>", "")]),
    "phi4_mini": CallListForm(*_PHI4, others=[_FUNCTOOLS]),
    "llama4_pythonic": PythonicForm(),
    "gemma3": PythonicBlockForm("```tool_code", "```", "\n"),
    "lfm2": PythonicBlockForm("<|tool_call_start|>", "<|tool_call_end|>"),
    "functiongemma": GemmaForm("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": GemmaForm("<|tool_call>", "<tool_call|>", '<|"|>'),
    "phi4_mini_json": CallListForm(*_FUNCTOOLS, others=[_PHI4]),
}
"""Formats by their names for --tool-call-parser."""
VARIANTS: Final[Mapping[str, str]] = {
    "mistral_named": "mistral",
    "deepseek_v31": "deepseek_v3",
    "phi4_mini": "phi4_mini_json",
}
"""Formats that another one's name stands for, if the template shows them."""
ALIASES: Final[Mapping[str, str]] = {
    "llama4_json": LLAMA3_JSON,
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "pythonic": "llama4_pythonic",
}
"""vLLM's names of parsers whose format is another one's."""
_DEEPSEEK: Final = "<｜tool▁call▁begin｜>"
MARKERS: Final[Sequence[tuple[str, tuple[str, ...]]]] = (
    (OPENAI, ("<|channel|>", "<|message|>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("glm45", ("<arg_key>",)),
    ("mistral_named", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", (_DEEPSEEK, "```json")),
    ("deepseek_v31", (_DEEPSEEK,)),
    ("phi4_mini_json", ("functools[",)),
    ("llama4_pythonic", ("func_name1(",)),
    ("gemma3", ("```tool_code",)),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("phi4_mini", ("<|/tool|>",)),
    ("granite", ("<|tool_call|>",)),
    (HERMES, ("<tool_call>",)),
    (LLAMA3_JSON, ("<|python_tag|>",)),
    (LLAMA3_JSON, ('"parameters": dictionary',)),
)
"""Formats, and texts that templates with this format have. The first format whose texts a template has is chosen."""


def form_of_template(template: str) -> str | None:
    """Returns the name of the format in which a chat template writes calls; None: it has no known marker."""
    return _shown(template, MARKERS)


QWEN3: Final = "qwen3"
REASONING_FORMS: Final[Mapping[str, ReasoningForm]] = {
    "openai_gptoss": HarmonyReasoning(),
    "mistral": TaggedReasoning("[THINK]", "[/THINK]"),
    "granite": GraniteReasoning(),
    "seed_oss": TaggedReasoning("<seed:think>", "</seed:think>"),
    QWEN3: TaggedReasoning("<think>", "</think>"),
}
"""Formats of reasoning by their names for --reasoning-parser."""
REASONING_ALIASES: Final[Mapping[str, str]] = dict.fromkeys(
    ("deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "olmo3", "nemotron_v3"), QWEN3
)
"""vLLM's names of parsers whose format is another one's."""
REASONING_MARKERS: Final[Sequence[tuple[str, tuple[str, ...]]]] = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("granite", ("Here is my thought process:",)),
    ("granite", ("<response>", "<think>")),
    (QWEN3, ("</think>",)),
    (QWEN3, ("<think>",)),
)
"""The same as MARKERS for reasoning."""


def reasoning_of_template(template: str) -> str | None:
    """Returns the name of the format in which a chat template writes reasoning; None: it has no known marker."""
    return _shown(template, REASONING_MARKERS)


def _shown(template: str, markers: Sequence[tuple[str, tuple[str, ...]]]) -> str | None:
    return next((name for name, texts in markers if all(text in template for text in texts)), None)
