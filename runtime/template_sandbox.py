"""jinja2 as chat templates use it, with bounds on what a rendering may do. Only runtime/chat_template.py imports it.

Templates come with models and adapters, and run here: in jinja2's sandbox, which keeps them from Python's internals
and from files, and with limits on loop turns and calls, and on the length of what outputs, operators, calls and filters
make. What is left to a template that means harm is the memory and time of one expression, such as a method that
pads a word to a billion characters: the result is refused, but only once it was made.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS: Final = 1_000_000
"""Of one rendering: a loop turn is one, a call is ten, which together take about a second."""
_STEPS_OF_A_CALL: Final = 10
MAX_CHARACTERS: Final = 1 << 24
"""Of a rendering's outputs, and of any text or list that an expression makes."""
_MAX_INTEGER_BITS: Final = 1024


class LimitError(TemplateError):
    """A template does more than a chat template has reason to."""


class RaisedByTemplateError(TemplateError):
    """A template called raise_exception, with what is wrong with the messages."""


class _CountingContext(Context):
    """The variables of one rendering, and what it has done so far."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0
        self.characters = 0

    def take_steps(self, count: int) -> None:
        self.steps += count
        if self.steps > MAX_STEPS:
            raise LimitError(
                f"it takes more than {MAX_STEPS} loop turns, of which a call counts for {_STEPS_OF_A_CALL}"
            )

    def take_characters(self, count: int) -> None:
        self.characters += count
        if self.characters > MAX_CHARACTERS:
            raise LimitError(f"it writes more than {MAX_CHARACTERS} characters")


class _BoundedCode(CodeGenerator):
    """Compiles loops so that they count their turns, and `~` to a call."""

    _TURN: Final = "loop_turn"

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute(self._TURN), lineno=node.lineno))
        super().visit_For(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:  # noqa: N802
        # Only visit_For makes such a statement: there are no attributes of the environment in the language.
        if isinstance(node.node, nodes.EnvironmentAttribute) and node.node.name == self._TURN:
            self.writeline("context.take_steps(1)", node)
        else:
            super().visit_ExprStmt(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        parts = nodes.List(node.nodes)
        self.visit(nodes.Call(nodes.EnvironmentAttribute("concatenate"), [parts], [], None, None), frame)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says, for training; here its content is all there is to it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """What transformers' templates find around them: its options, functions and filters."""

    code_generator_class = _BoundedCode
    context_class = _CountingContext
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_counted_output
        )
        self.filters = {name: _bounded(function) for name, function in self.filters.items()} | {"tojson": _to_json}
        del self.globals["lipsum"]  # as many words as it is asked for, in one call
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call(  # type: ignore[override]
        self, context: _CountingContext, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Every call of a template, counted."""
        context.take_steps(_STEPS_OF_A_CALL)
        return _checked(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators that make long values of short ones, refused before they do."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise LimitError(f"it computes an integer of more than {_MAX_INTEGER_BITS} bits")
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, (str, bytes, list, tuple)) and isinstance(count, int):
                    _check_length(len(value) * count)
        return _checked(super().call_binop(context, operator, left, right))

    def concatenate(self, parts: Iterable[Any]) -> str:
        """The operator `~`."""
        return "".join(map(str, parts))


@pass_context
def _counted_output(context: _CountingContext, value: Any) -> str:
    text = str(value)
    context.take_characters(len(text))
    return text


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose results are checked; it is passed the context where the original is."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        return _checked(function(*args, **kwargs))

    return bounded


def _checked(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple)):
        _check_length(len(value))
    return value


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise LimitError(f"it makes a value of {length} characters or items; at most {MAX_CHARACTERS} are allowed")


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplateError(str(message))


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not jinja2's own filter, which escapes what HTML would take for tags."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class CompiledTemplate:
    """One template, ready to be rendered."""

    def __init__(self, environment: ChatEnvironment, source: str) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        self._template = environment.from_string(source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises whatever the template runs into, jinja2.TemplateError among it."""
        pieces = []
        characters = 0
        for piece in self._template.generate(dict(variables)):
            characters += len(piece)
            _check_length(characters)
            pieces.append(piece)
        return "".join(pieces)

    def try_render(self, variables: Mapping[str, Any]) -> str | None:
        """The rendered text, or None where the template fails. Raises LimitError."""
        try:
            return self.render(variables)
        except LimitError:
            raise
        except Exception:  # a template is a program, and may fail in any way
            return None
