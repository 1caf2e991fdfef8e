"""Writes calls in the formats of models, as their templates do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    """Returns a value as it is written between tags: texts without quotation marks, other values as JSON."""
    return value if isinstance(value, str) else dumps(value)


def objects(calls: Sequence[Call], key: str = "arguments") -> str:
    return ", ".join(dumps({"name": name, key: arguments}) for name, arguments in calls)


def qwen3_coder(name: str, arguments: Mapping[str, Any]) -> str:
    parameters = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def seed_oss(name: str, arguments: Mapping[str, Any]) -> str:
    parameters = "".join(f"<parameter={key}>{as_text(value)}</parameter>\n" for key, value in arguments.items())
    return f"<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>"


def minimax(name: str, arguments: Mapping[str, Any]) -> str:
    parameters = "".join(f'<parameter name="{key}">{as_text(value)}</parameter>\n' for key, value in arguments.items())
    return f'<invoke name="{name}">\n{parameters}</invoke>\n'


def kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumps(value)}<|tool_call_end|>"
        for i, (name, value) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def glm(name: str, arguments: Mapping[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def deepseek(calls: Sequence[str]) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def pythonic(name: str, arguments: Mapping[str, Any]) -> str:
    """Strings are written as JSON, which Python reads alike."""
    written = ", ".join(
        f"{key}={value if isinstance(value, bool) else dumps(value)}" for key, value in arguments.items()
    )
    return f"{name}({written})"


def gemma(calls: Sequence[Call], begin: str, end: str, quote: str) -> str:
    """Keys are sorted, as templates do."""

    def value(item: Any) -> str:
        if isinstance(item, str):
            return f"{quote}{item}{quote}"
        if isinstance(item, list):
            return f"[{','.join(map(value, item))}]"
        return pairs(item) if isinstance(item, dict) else dumps(item)

    def pairs(items: Mapping[str, Any]) -> str:
        return "{" + ",".join(f"{key}:{value(items[key])}" for key in sorted(items)) + "}"

    return "".join(f"{begin}call:{name}{pairs(arguments)}{end}" for name, arguments in calls)


WRITERS: Mapping[str, Callable[[Sequence[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{objects([call])}\n</tool_call>" for call in calls),
    "llama3_json": lambda calls: "; ".join(objects([call], "parameters") for call in calls),
    "qwen3_coder": lambda calls: "\n".join(qwen3_coder(*call) for call in calls),
    "seed_oss": lambda calls: "\n".join(seed_oss(*call) for call in calls),
    "minimax_m2": lambda calls: f"<minimax:tool_call>\n{''.join(minimax(*call) for call in calls)}</minimax:tool_call>",
    "mistral": lambda calls: f"[TOOL_CALLS][{objects(calls)}]",
    "mistral_named": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(value)}" for name, value in calls),
    "glm45": lambda calls: "\n".join(glm(*call) for call in calls),
    "deepseek_v3": lambda calls: deepseek(
        [f"function<｜tool▁sep｜>{name}\n```json\n{dumps(value)}\n```" for name, value in calls]
    ),
    "deepseek_v31": lambda calls: deepseek([f"{name}<｜tool▁sep｜>{dumps(value)}" for name, value in calls]),
    "kimi_k2": kimi,
    "granite": lambda calls: f"<|tool_call|>[{objects(calls)}]",
    "phi4_mini": lambda calls: f"<|tool_call|>[{objects(calls)}]<|/tool_call|>",
    "llama4_pythonic": lambda calls: f"[{', '.join(pythonic(*call) for call in calls)}]",
    "gemma3": lambda calls: f"```tool_code\n[{', '.join(pythonic(*call) for call in calls)}]\n```",
    "lfm2": lambda calls: f"<|tool_call_start|>[{', '.join(pythonic(*call) for call in calls)}]<|tool_call_end|>",
    "functiongemma": lambda calls: gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": lambda calls: gemma(calls, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "phi4_mini_json": lambda calls: f"functools[{objects(calls)}]",
}
"""Answers that are calls, by form."""
