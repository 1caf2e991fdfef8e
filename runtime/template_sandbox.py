"""jinja2 for chat templates, with limits on each rendering. Only runtime/chat_template.py imports this module.

Templates come with models and adapters. They run in jinja2's sandbox, which keeps them from Python's internals and from
files, and with limits on their work. Every operation is measured before it makes a value, even within one expression,
and the clock is checked between operations.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .template_limits import TemplateLimits
from .template_operations import (
    JINJA2_ARGUMENTS,
    bound_format,
    bounded_filters,
    bounded_tests,
    check_call,
    check_method,
    check_time_format,
    printf,
)
from .template_work import CALL, MAX_INTEGER_BITS, LimitError, Work

_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_TEXT_METHODS: Final = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
_MAX_MESSAGE: Final = 2000
"""Maximum number of characters of a message of raise_exception."""
_TURN: Final = "turn "


class RaisedByTemplateError(TemplateError):
    """A template called raise_exception because the messages are invalid."""


class CountingContext(Context):
    """Variables of one rendering, and its work."""

    work: Work

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """Returns a context with other variables that belongs to the same rendering."""
        context = super().derived(locals)
        assert isinstance(context, CountingContext)
        context.work = self.work
        return context


class _BoundedCode(CodeGenerator):
    """Code generator that counts code which may run repeatedly, and turns operators into measured calls."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        _count_bodies(node)
        super().visit_Template(node, frame)

    def visit_EnvironmentAttribute(self, node: nodes.EnvironmentAttribute, frame: Frame) -> None:
        # Only _count_bodies makes such nodes: templates cannot express them.
        self.write(f"context.work.turn({int(node.name.removeprefix(_TURN))})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._call("concatenate", "(", node.nodes, frame, ",)")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        if _is_constant(node):
            super().visit_List(node, frame)
        else:
            self._call("made_shallow", "[", node.items, frame, "]")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load" or _is_constant(node) or not node.items:
            super().visit_Tuple(node, frame)
        else:
            self._call("made_shallow", "(", node.items, frame, ",)")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("context.work.made_shallow({")
        for pair in node.items:
            self._key(pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("})")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self.write("context.work.sliced(")
            super().visit_Getitem(node, frame)
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(", ")
            self._key(node.arg, frame)
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        values = [node.expr, *(operand.expr for operand in node.ops)]
        names = [operand.op for operand in node.ops]
        if all(map(_is_quick, names, values, values[1:])):
            super().visit_Compare(node, frame)
        elif names == ["in"]:
            self._call("contains", "", values, frame, "")
        else:
            self._call("compared", f"{tuple(names)!r}, ", values, frame, "")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        self.write("context.work.output(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_post(node, frame, finalize)

    def _call(self, method: str, begin: str, values: Sequence[nodes.Expr], frame: Frame, end: str) -> None:
        """Writes a call of a method of Work."""
        self.write(f"context.work.{method}({begin}")
        for number, value in enumerate(values):
            if number:
                self.write(", ")
            self.visit(value, frame)
        self.write(f"{end})")

    def _key(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
        else:
            self._call("key", "", [node], frame, "")


def _is_constant(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) or (
        isinstance(node, (nodes.List, nodes.Tuple)) and all(isinstance(item, nodes.Const) for item in node.items)
    )


def _is_quick(name: str, left: nodes.Expr, right: nodes.Expr) -> bool:
    """True for comparisons whose time is bounded by the length of their source."""
    if name in ("in", "notin"):
        return _is_constant(right)
    return isinstance(left, nodes.Const) or isinstance(right, nodes.Const)


def _count_bodies(node: nodes.Node) -> int:
    """Makes code that may run more than once count its elements. Returns the number of other elements of a node."""
    if isinstance(node, nodes.Const):
        return 1 + (len(node.value) if isinstance(node.value, str) else 0)
    if isinstance(node, nodes.TemplateData):
        return 1 + len(node.data)
    if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
        inside = sum(map(_count_bodies, node.body))
        node.body.insert(0, nodes.ExprStmt(_turn(inside), lineno=node.lineno))
        outside = sum(map(_count_bodies, node.iter_child_nodes(exclude=("body", "test"))))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(_turn(_count_bodies(node.test)), node.test, lineno=node.lineno)
        return 1 + outside
    return 1 + sum(map(_count_bodies, node.iter_child_nodes()))


def _turn(elements: int) -> nodes.EnvironmentAttribute:
    return nodes.EnvironmentAttribute(f"{_TURN}{elements}")


class _Generation(Extension):
    """`{% generation %}` marks an assistant's text for training. Only its content is rendered here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace whose text is short. jinja2's prints all its values, as often as they occur."""

    def __contains__(self, name: str) -> bool:
        return name in self._Namespace__attrs

    def __getitem__(self, name: str) -> Any:
        return self._Namespace__attrs[name]

    def __repr__(self) -> str:
        return "<Namespace>"


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers' templates: its options, functions and filters."""

    code_generator_class = _BoundedCode
    context_class = CountingContext
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # The optimiser is off because it computes constants without limits when a template is compiled.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], optimized=False)
        self.filters = dict(bounded_filters())
        self.tests = dict(bounded_tests())
        del self.globals["lipsum"]  # one call makes any number of words
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns an attribute or an item as jinja2 does. Skips jinja2's checks for texts and for objects from JSON."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _TEXT_METHODS:
            return getattr(obj, attribute)
        if kind is _Namespace and not attribute.startswith("_"):
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(  # type: ignore[override]
        self, context: CountingContext, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a function for a template. Measures the call before, and counts its result after it."""
        work = context.work
        work.spend(CALL)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            kwargs = {name: value for name, value in kwargs.items() if name not in JINJA2_ARGUMENTS}
            args = check_method(work, function, args, kwargs)
            if type(owner) is str and function.__name__ in _TEXT_METHODS:
                return work.made(function(*args, **kwargs))
        else:
            check_call(work, args, kwargs)
        return work.made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: CountingContext, operator: str, left: Any, right: Any) -> Any:  # type: ignore[override]
        """Computes operators that may make long values of short ones. Measures them before."""
        work = context.work
        if operator == "+" and type(left) is str and type(right) is str:
            return work.made_text(left + right)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if operator != "%" and bits > MAX_INTEGER_BITS:
                raise LimitError(f"it computes an integer of more than {MAX_INTEGER_BITS} bits")
        elif operator == "%" and isinstance(left, (str, bytes)):
            if isinstance(left, bytes):
                raise LimitError("it formats bytes")
            return printf(work, left, right)
        elif operator == "+":
            if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                return work.made_of(left + right, (left, right))  # type: ignore[operator]
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, (str, bytes, list, tuple)) and isinstance(count, int):
                    work.length(work.size(value) * count)
                    work.length(len(value) * count)
                    if isinstance(value, (list, tuple)):
                        return work.made_of(value * count, (value,), max(count, 0))
        return work.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns a limited version of a text's `format` or `format_map`."""
        return None if super().wrap_str_format(value) is None else bound_format(self, value)


@pass_context
def _raise_exception(context: CountingContext, message: object) -> NoReturn:
    raise RaisedByTemplateError(context.work.text(message)[:_MAX_MESSAGE])


def _strftime_now(format_: str) -> str:
    check_time_format(format_)
    return datetime.datetime.now().strftime(format_)


class CompiledTemplate:
    """A compiled template."""

    def __init__(self, environment: ChatEnvironment, source: str, limits: TemplateLimits) -> None:
        """Raises jinja2.TemplateSyntaxError, and Python's errors for code that it cannot compile."""
        self._template = environment.from_string(source)
        self._limits = limits

    def render(self, variables: Mapping[str, Any]) -> str:
        """Returns the rendered text. Raises any error of the template, such as jinja2.TemplateError."""
        context = self._template.new_context(dict(variables))
        assert isinstance(context, CountingContext)
        work = context.work = Work(self._limits)
        pieces = []
        characters = 0
        for piece in self._template.root_render_func(context):
            characters += len(piece)
            work.length(characters)
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # raises for halves of surrogate pairs, which no tokenizer accepts
        return text

    def try_render(self, variables: Mapping[str, Any]) -> str | None:
        """Returns the rendered text; None if the template fails. Raises LimitError."""
        try:
            return self.render(variables)
        except LimitError:
            raise
        except Exception:  # a template is a program and may raise anything
            return None
