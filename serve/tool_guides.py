"""Writes guides for answers that call functions, in the format that the parsers of tools/ read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .._core import GuidedDecodingParams
from ..runtime.guided_decoding import COMPACT_JSON, lark_of, tag_structures, with_json_options
from .errors import ApiError
from .tools.form import CallForm, CallRule, literal
from .tools.reasoning import Answers, Budget, ReasoningForm, begin_pattern

_TYPES: Final = GuidedDecodingParams.GuideType
_SLASH: Final = re.compile(r"\\.|/|\n", re.DOTALL)
_ANY_OBJECT: Final = {"type": "object"}
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function without parameters."""
_OPEN: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
)
"""Keys that may allow more argument names. Without them, `properties` lists all names."""


@dataclass(frozen=True)
class GuidedFunction:
    """A function that an answer may call."""

    name: str
    parameters: Mapping[str, Any] | None
    """JSON schema of the arguments; None: the function takes none."""
    is_strict: bool
    """True: the arguments must match the schema."""
    place: str
    """Location in the request, for example tools[0].function."""

    def schema(self, *, is_forced: bool) -> str:
        """Returns the JSON schema that the guide enforces for the arguments.

        Raises ApiError if the parameters do not describe an object.
        """
        return self.rule(is_forced=is_forced).schema

    def rule(self, *, is_forced: bool) -> CallRule:
        """Returns the function as the rules of a grammar see it. Raises ApiError like schema()."""
        if not self.is_strict and not is_forced:
            any_object = with_json_options(json.dumps(_ANY_OBJECT), COMPACT_JSON)
            return CallRule(self.name, any_object, None, COMPACT_JSON, self.place)
        parameters = _NO_ARGUMENTS if self.parameters is None else self.parameters
        kind = parameters.get("type", "object")
        if kind != "object":
            field = f"{self.place}.parameters.type"
            raise ApiError(f"{field} of '{self.name}' is {kind!r}; expected 'object'", param=field)
        if "properties" in parameters and not _OPEN & parameters.keys():
            parameters = {**parameters, "additionalProperties": False}
        guidance = COMPACT_JSON if self.is_strict else {**COMPACT_JSON, "lenient": True}
        whole = {"type": "object", **parameters}
        return CallRule(self.name, with_json_options(json.dumps(whole), guidance), whole, guidance, self.place)


def tool_guide(
    form: CallForm,
    functions: Sequence[GuidedFunction],
    *,
    is_forced: bool,
    is_single: bool,
    content: str | None,
    special: Callable[[str], int | None],
    reasoning: ReasoningForm | None = None,
    opened: str = "",
    budget: Budget | None = None,
) -> GuidedDecodingParams:
    """Returns a guide in llguidance's Lark for an answer that may call functions.

    is_forced: the answer has a call and no text. is_single: it has at most one call. content: JSON schema of an answer
    without calls; None: any text. special: id of the special token of the tokenizer that is a text. reasoning: may
    precede the answer. opened: beginning of the reasoning in the prompt. budget: of the reasoning.
    """
    token = _token_writer(special)
    calls = [function.rule(is_forced=is_forced) for function in functions]
    made = form.grammar(calls, is_single=is_single, token=token)
    marker = token(made.marker)
    between = f"/{made.between}/ " if made.between else ""
    rules = [
        "%llguidance {}",
        *made.rules,
        f"body: {made.body}",
        f"marked: {marker}{'?' if made.is_marker_optional else ''} body",
        f"calls: marked{'' if is_single or not made.repeats else f' ({between}marked)*'}",
    ]
    first = _not_reasoning(reasoning, opened, special)
    if is_forced:
        answers = Answers("calls", None)
    elif content is not None:
        answers = Answers("calls", "content")
        rules.append(f"content: {_json(content)}")
    elif made.is_text_apart:
        answers = Answers("calls", "text")
        rules += ["text: TEXT", f"TEXT: /{made.text}/{first}"]
    else:
        answers = Answers(None, "mixed")
        more = "" if is_single or not made.repeats else " (call_in_text* text)"
        rules += [f"mixed: first_call_in_text{more} | FIRST", "text: TEXT"]
        for name, text in (("first_call_in_text", "FIRST"), ("call_in_text", "TEXT")):
            if special(made.marker) is not None:
                rules.append(f"{name}: {text} {marker} body")
            else:
                rules += [f"{name}: before_{name} body", f"before_{name}[lazy]: {text} {marker}"]
        rules += [f"FIRST: /{made.text}/{first}", f"TEXT: /{made.text}/"]
    return _grammar(rules, answers, reasoning, opened, token, budget)


def guide_after_reasoning(
    guide: GuidedDecodingParams | None,
    reasoning: ReasoningForm,
    opened: str,
    special: Callable[[str], int | None],
    budget: Budget | None = None,
) -> GuidedDecodingParams:
    """Returns a guide that lets a model reason before the answer that `guide` describes; None: any text.

    budget: of the reasoning; None: structural tags are returned as they are, because they allow any text before their
    triggers. Raises ApiError for a schema that is not JSON, and RequestError for an invalid structural tag.
    """
    if guide is None:
        guide = GuidedDecodingParams(_TYPES.REGEX, r"(.|\n)*")
    text = guide.guide or ""
    if guide.guide_type == _TYPES.STRUCTURAL_TAG:
        if budget is None:
            return guide
        answer = "\n".join(_tag_rules(text, _not_reasoning(reasoning, opened, special), special))
    elif guide.guide_type == _TYPES.REGEX:
        answer = f"ANSWER\nANSWER: /{_SLASH.sub(_without_slash, text)}/{_not_reasoning(reasoning, opened, special)}"
    elif guide.guide_type == _TYPES.EBNF_GRAMMAR:
        answer = f"%lark {{\n{lark_of(text)}\n}}"
    else:
        answer = _json(text if guide.guide_type == _TYPES.JSON_SCHEMA else json.dumps(_ANY_OBJECT))
    rules = ["%llguidance {}", f"answer: {answer}"]
    return _grammar(rules, Answers(None, "answer"), reasoning, opened, _token_writer(special), budget)


def _tag_rules(guide: str, first: str, special: Callable[[str], int | None]) -> list[str]:
    """Returns an expression in Lark of text with the structures of a structural tag, and its rules.

    first: rest of a terminal that restricts the text before the first structure.
    """
    token = _token_writer(special)
    tags = tag_structures(guide)
    choices = {name: " | ".join(f"{name}_{i}" for i in range(len(tags))) for name in ("first_tag", "tag")}
    rules = [
        f"FIRST | ({choices['first_tag']}) ({choices['tag']})* TEXT",
        f"FIRST: /(.|\\n)*/{first}",
        "TEXT: /(.|\\n)*/",
    ]
    for i, tag in enumerate(tags):
        rules.append(
            f"structure_{i}: {literal(tag.begin[len(tag.trigger) :])} %json {_one_line(tag.schema)} {literal(tag.end)}"
        )
        for name, text in (("first_tag", "FIRST"), ("tag", "TEXT")):
            if special(tag.trigger) is not None:
                rules.append(f"{name}_{i}: {text} {token(tag.trigger)} structure_{i}")
            else:
                rules.append(f"{name}_{i}: before_{name}_{i} structure_{i}")
                rules.append(f"before_{name}_{i}[lazy]: {text} {token(tag.trigger)}")
    return rules


def _grammar(
    rules: Sequence[str],
    answers: Answers,
    reasoning: ReasoningForm | None,
    opened: str,
    token: Callable[[str], str],
    budget: Budget | None,
) -> GuidedDecodingParams:
    first = [f"start: {answers.any}"] if reasoning is None else reasoning.rules(opened, answers, token, budget)
    return GuidedDecodingParams(_TYPES.EBNF_GRAMMAR, "\n".join([*rules, *first]) + "\n")


def _not_reasoning(reasoning: ReasoningForm | None, opened: str, special: Callable[[str], int | None]) -> str:
    """Returns the rest of a terminal in Lark that excludes texts that begin with reasoning.

    The lexer does not backtrack: without it, a text that reasoning is not would win over reasoning.
    """
    begins = () if reasoning is None else reasoning.begins(opened)
    return "".join(f" & ~/{begin_pattern(begin)}(.|\\n)*/" for begin in begins if special(begin) is None)


def _token_writer(special: Callable[[str], int | None]) -> Callable[[str], str]:
    def token(text: str) -> str:
        number = special(text)
        return literal(text) if number is None else f"<[{number}]>"

    return token


def _without_slash(found: re.Match[str]) -> str:
    """Escapes what would end a regular expression of Lark."""
    return {"/": "\\/", "\n": "\\n"}.get(found[0], found[0])


def _json(schema: str) -> str:
    """Returns an expression in Lark for JSON that follows a schema. Raises ApiError for invalid JSON."""
    return f"%json {with_json_options(_one_line(schema), COMPACT_JSON)}"


def _one_line(schema: str) -> str:
    """Returns the schema without line breaks, which would end a rule. Raises ApiError for invalid JSON."""
    try:
        return json.dumps(json.loads(schema))
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the guide's JSON schema is not JSON: {error}") from error
