"""jinja2's filters and tests and the methods of texts, for chat templates: their work is measured before they run."""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, pass_context
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.sandbox import SandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import _PassArg
from markupsafe import Markup

from .template_work import OPERATION, LimitError, Work, check_width

if TYPE_CHECKING:
    from .template_sandbox import CountingContext

# Factors: maximum number of bytes that a filter makes, in its result and on the way, per character or item of its
# input. A list item takes about 64 bytes. Filters with a higher factor are also slow.
_UNCOUNTED: Final = frozenset({"attr", "count", "d", "default", "first", "items", "last", "length", "random", "safe"})
"""Filters that return their input or a part of it."""
_LAZY: Final = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
_OF_ITEMS: Final = _LAZY | {"batch", "dictsort", "groupby", "list", "max", "min", "reverse", "slice", "sort", "unique"}
"""Filters that make lists of their input's items, whatever the items are."""
_FACTORS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("abs", "capitalize", "center", "e", "escape", "float", "forceescape", "indent", "int"), 8),
    **dict.fromkeys(("lower", "replace", "reverse", "string", "trim", "truncate", "upper"), 8),
    **dict.fromkeys(("pprint", "urlize", "wordwrap"), 512),
}
_OTHER_FACTOR: Final = 64
_WIDTH_FILTERS: Final = frozenset(
    {"batch", "center", "indent", "round", "slice", "tojson", "truncate", "urlize", "wordwrap"}
)
"""Filters whose numeric arguments determine how many characters or items they make."""
_MEASURED_TESTS: Final = frozenset(
    {"!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower"}
    | {"lt", "ne", "upper"}
)
_SEARCHES: Final = frozenset({"count", "endswith", "find", "index", "rfind", "rindex", "startswith"})
"""Methods of texts whose numeric arguments are positions."""
JINJA2_ARGUMENTS: Final = frozenset({"_block_vars", "_loop_vars", "caller"})
"""Arguments that jinja2 adds to calls."""
_WHITE_SPACE: Final = " \t\n\r\v\f\x1c\x1d\x1e\x1f"
_LINE_ENDS: Final = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_MAX_TIME_FORMAT: Final = 256

_PRINTF: Final = re.compile(r"%(?:\(([^()]*)\))?[#0 +-]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?", re.DOTALL)


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """Returns jinja2's filters with limits. They take the context as their first argument."""
    filters = {name: function if name in _UNCOUNTED else _bounded(name, function) for name, function in FILTERS.items()}
    return filters | {"format": _format, "join": _join, "sum": _sum, "tojson": _to_json}


def bounded_tests() -> dict[str, Callable[..., Any]]:
    """Returns jinja2's tests with limits."""
    tests: Mapping[str, Any] = TESTS
    return {name: _compared(test) if name in _MEASURED_TESTS else test for name, test in tests.items()}


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = _PassArg.from_obj(function)
    factor = _FACTORS.get(name, _OTHER_FACTOR)
    has_width = name in _WIDTH_FILTERS

    @pass_context
    @functools.wraps(function)
    def bounded(context: CountingContext, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        work = context.work
        if type(value) is not str:
            value = work.items(value)
        given = (*args, *kwargs.values()) if args or kwargs else ()
        if has_width:
            for argument in given:
                check_width(argument)
        size = work.size(value)
        if name in _OF_ITEMS and isinstance(value, Sized):
            size = len(value)
        work.room(factor * size + _extra(name, work, value, given))
        if given:
            work.room(factor * sum(map(work.size, given)))
        if passed is _PassArg.context:
            result = function(context, value, *args, **kwargs)
        elif passed is _PassArg.environment:
            result = function(context.environment, value, *args, **kwargs)
        elif passed is _PassArg.eval_context:
            result = function(context.eval_ctx, value, *args, **kwargs)
        else:
            result = function(value, *args, **kwargs)
        return result if name in _LAZY else work.made(result)

    # functools.wraps copies the function's own kind of first argument, so pass_context is set again.
    return pass_context(bounded)


def _extra(name: str, work: Work, value: Any, given: Sequence[Any]) -> int:
    """Returns the bytes that a filter makes for its arguments, in addition to those for its value."""
    if name == "indent":
        width = given[0] if given else 4
        width = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
        return _counted_length(work, (str(value).count("\n") + 1) * width)
    if name == "replace":
        old, new = (work.text(argument) for argument in (*given, "", "")[:2])
        return _counted_length(work, str(value).count(old) * len(new))
    if name in ("batch", "slice"):
        number = next((argument for argument in given if isinstance(argument, int)), 0)
        work.spend(OPERATION * max(number, 0))
    return 0


def _counted_length(work: Work, length: int) -> int:
    work.length(length)
    return length


@pass_context
def _format(context: CountingContext, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise TypeError("can't handle positional and keyword arguments at the same time")
    return printf(context.work, value if isinstance(value, str) else context.work.text(value), kwargs or args)


@pass_context
def _join(context: CountingContext, value: Any, d: Any = "", attribute: Any = None) -> Any:
    work = context.work
    items = work.items(value)
    if attribute is not None:
        items = [make_attrgetter(context.environment, attribute)(item) for item in items]
        work.size(items)
    number = len(items) if hasattr(items, "__len__") else 0
    work.length(work.size(items) + number * work.size(d))
    return work.made(FILTERS["join"](context.eval_ctx, items, d))


@pass_context
def _sum(context: CountingContext, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    items = context.work.items(iterable)
    environment = context.environment
    assert isinstance(environment, SandboxedEnvironment)
    if attribute is not None:
        items = map(make_attrgetter(context.environment, attribute), items)
    for item in items:
        start = environment.call_binop(context, "+", start, item)
    return start


@pass_context
def _to_json(
    context: CountingContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja2's filter, which escapes characters for HTML."""
    work = context.work
    check_width(indent)
    width = len(indent) if isinstance(indent, str) else indent or 0
    size = work.size(value)
    work.room(size * (2 + width * (work.depth(value) + 1) + (work.size(separators) if separators else 0)))
    return work.made_text(
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )


def _compared(test: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    @functools.wraps(test)
    def measured(context: CountingContext, value: Any, /, *args: Any) -> Any:
        if test is TESTS["in"] and len(args) == 1:
            return context.work.contains(value, args[0])
        for other in args or (None,):
            context.work.compare(value, other)
        return test(value, *args)

    return measured


def printf(work: Work, text: str, values: Any) -> str:
    """Returns text % values. Raises LimitError for a width that comes from the values."""
    if re.search(r"%\([^)]*\(", text):
        raise LimitError("it formats a value whose name has a parenthesis")
    keyed = isinstance(values, Mapping)
    size = 0 if keyed else work.size(values)
    for name, width, precision in _PRINTF.findall(text):
        for number in (width, precision):
            if number == "*":
                raise LimitError("it formats with a width or precision '*'; write the number")
            if number:
                check_width(_number(number))
                size += _number(number)
        if keyed:
            size += work.size(values[name]) if name in values else 0
    work.room(len(text) + 16 * size)
    result: str = work.made_text(text % values)
    return result


def _number(digits: str) -> int:
    return int(digits[-20:]) if len(digits) < 20 else 10**20


class _BoundedFormatter(SandboxedFormatter):
    """Formatter of one call of str.format()."""

    def __init__(self, environment: Environment, work: Work, **kwargs: Any) -> None:
        super().__init__(environment, **kwargs)
        self._work = work

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(self._measured(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        for digits in re.findall(r"\d+", format_spec):
            check_width(_number(digits))
        return self._work.made_text(super().format_field(self._measured(value), format_spec))

    def _measured(self, value: Any) -> Any:
        self._work.room(16 * self._work.size(value))
        return value


class _BoundedEscapeFormatter(_BoundedFormatter, SandboxedEscapeFormatter):
    """The same for texts that are escaped (Markup)."""


def bound_format(environment: Environment, method: Any) -> Callable[..., str]:
    """Returns `format` or `format_map` of a text with limits, for templates."""
    text, is_map = method.__self__, method.__name__ == "format_map"

    @pass_context
    def bounded(context: CountingContext, /, *args: Any, **kwargs: Any) -> str:
        if is_map:
            (kwargs,), args = args, ()
        if isinstance(text, Markup):
            formatter: string.Formatter = _BoundedEscapeFormatter(environment, context.work, escape=text.escape)
        else:
            formatter = _BoundedFormatter(environment, context.work)
        context.work.spend(len(text))
        formatted = formatter.vformat(text, args, kwargs)
        return Markup(formatted) if isinstance(text, Markup) else formatted

    return bounded


def check_method(work: Work, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Measures a call of a method of a text or number. Returns the arguments for the call."""
    owner, name = function.__self__, function.__name__
    if name == "join" and len(args) == 1:
        items = work.items(args[0])
        if hasattr(items, "__len__"):
            work.length(work.size(items) + len(items) * len(owner))
        return (items,)
    if name not in _SEARCHES and not name.startswith("is"):
        if name not in ("rsplit", "split", "splitlines", "replace"):
            for argument in (*args, *kwargs.values()):
                check_width(argument)
        work.room(_made_by_method(work, owner, name, args, kwargs))
    work.spend(sum(map(work.size, (owner, *args))) // 16)
    return args


def _made_by_method(
    work: Work, owner: str | bytes | int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int:
    """Returns the maximum number of bytes that a method of a text or number makes."""
    if isinstance(owner, int):
        return 0
    length = len(owner)
    if name == "replace" and len(args) > 1 and all(isinstance(argument, (str, bytes)) for argument in args[:2]):
        made = length + owner.count(args[0]) * len(args[1])
        work.length(made)
        return 4 * made
    if name == "expandtabs":
        (width,) = (*args, *kwargs.values()) or (8,)
        num_tabs = owner.count("\t") if isinstance(owner, str) else owner.count(b"\t")
        return 4 * (length + num_tabs * (width if isinstance(width, int) else 8))
    if name == "translate" and args:
        items = args[0].values() if isinstance(args[0], dict) else args[0] if isinstance(args[0], (list, tuple)) else ()
        return 4 * length * max([1, *(len(item) for item in items if isinstance(item, str))])
    if name in ("split", "rsplit", "splitlines"):
        return 8 * length + OPERATION * _num_pieces(owner, name, args)
    if name == "maketrans":
        return 256 * sum(map(work.size, args))
    return (OPERATION if name == "striptags" else 16) * length


def _num_pieces(owner: str | bytes, name: str, args: tuple[Any, ...]) -> int:
    if not isinstance(owner, str):
        return len(owner) + 1
    if name == "splitlines":
        return sum(map(owner.count, _LINE_ENDS)) + 1
    if args and isinstance(args[0], str) and args[0]:
        return owner.count(args[0]) + 1
    return (sum(map(owner.count, _WHITE_SPACE)) if owner.isascii() else len(owner) // 2) + 1


def check_call(work: Work, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Measures the arguments of a function, which may print, compare or hash them."""
    for argument in args:
        if not isinstance(argument, str):
            work.size(argument)
    for name, argument in kwargs.items():
        if name not in JINJA2_ARGUMENTS:
            work.size(argument)


def check_time_format(format_: Any) -> None:
    """Raises LimitError for a time format that is too long."""
    if len(format_) > _MAX_TIME_FORMAT:
        raise LimitError(f"it formats the time with {len(format_)} characters; at most {_MAX_TIME_FORMAT} are allowed")
