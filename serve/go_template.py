"""Translates Ollama's chat templates, which are Go templates, to Jinja.

Ranges, conditions, fields, variables and the functions below are translated. Everything else is refused with its line.
The Jinja has no text of its own: all text of the template becomes string literals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from .._core import ConfigError

_MAX_CHARACTERS: Final = 1 << 16
_MAX_DEPTH: Final = 32
"""Maximum nesting of blocks and of parentheses."""
_SPACE: Final = " \t\r\n"
_TOKEN: Final = re.compile(
    r"""(?P<space>\s+)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<raw>`[^`]*`)
    |(?P<number>[-+]?\d+(?:\.\d+)?)(?![\w.])
    |(?P<variable>\$\w*(?:\.[A-Za-z_]\w*)*)
    |(?P<field>(?:\.[A-Za-z_]\w*)+)
    |(?P<dot>\.)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark>:=|[=|,()])""",
    re.VERBOSE,
)
_FIELDS: Final = {
    "Role": "role",
    "Content": "content",
    "Thinking": "thinking",
    "ToolCalls": "tool_calls",
    "ToolName": "name",
    "ToolCallID": "tool_call_id",
    "ID": "id",
    "Function": "function",
    "Name": "name",
    "Arguments": "arguments",
    "Index": "index",
    "Type": "type",
    "Description": "description",
    "Parameters": "parameters",
    "Required": "required",
    "Properties": "properties",
    "Enum": "enum",
    "Items": "items",
    "Images": "images",
}
"""Fields of messages and tools, with their names in JSON."""
_THINKING: Final = {
    "Think": "(enable_thinking is defined and enable_thinking)",
    "ThinkLevel": "(reasoning_effort if reasoning_effort is defined else '')",
    "IsThinkSet": "(enable_thinking is defined)",
}
_NOTHING: Final = {
    "System": "''",
    "Prompt": "''",
    "Response": "''",
    "Suffix": "''",
    "Messages": "[]",
    "Tools": "[]",
    **_THINKING,
}
"""Values of the root that a rendering does not have."""
_OF_MESSAGES: Final = {**_NOTHING, "System": "go.system", "Messages": "go.messages", "Tools": "(tools or [])"}
_OF_TURN: Final = {**_NOTHING, "System": "system", "Prompt": "prompt", "Response": "response"}
_OF_SUFFIX: Final = {**_NOTHING, "Prompt": "messages[-1]['content']", "Suffix": "suffix"}
_COMPARISONS: Final = {"ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_FUNCTIONS: Final = ("and", "or", "not", "eq", *_COMPARISONS, "len", "index", "slice", "json", "printf", "currentDate")
_JSON: Final = (
    "({} | tojson(separators=[',', ':']) | replace('<', '\\\\u003c') | replace('>', '\\\\u003e')"
    " | replace('&', '\\\\u0026'))"
)
"""JSON as Go writes it, except that objects keep their order."""
_COLLATED: Final = (
    "{% macro text_of(value) %}{{ value if value is string else '' if value is undefined or value is none else "
    + _JSON.format("value")
    + " }}{% endmacro %}"
    "{% set go = namespace(system='', messages=[], turn='', prompt='', response='') %}"
    "{% for m in messages %}{% set text = m['content'] or '' %}"
    "{% if m['role'] == 'system' %}{% set go.system = go.system ~ ('\\n\\n' if go.system else '') ~ text %}{% endif %}"
    "{% if go.messages and go.messages[-1]['role'] == m['role'] and m['role'] != 'tool' %}"
    "{% set go.messages = go.messages[:-1]"
    " + [dict(go.messages[-1], content=(go.messages[-1]['content'] or '') ~ '\\n\\n' ~ text)] %}"
    "{% else %}{% set go.messages = go.messages + [m] %}{% endif %}{% endfor %}"
)
"""Defines the text of a value: JSON if it is not a text, nothing if it is missing. Then collects the texts of system
messages, and joins consecutive messages of one role, as Ollama does.
"""
_TURNS: Final = (
    "{% set go.system = '' %}{% for m in go.messages %}"
    "{% if (m['role'] == 'system' and (go.prompt or go.response)) or (m['role'] == 'user' and go.response) %}"
    "{{ turn(go.system, go.prompt, go.response) }}"
    "{% set go.system = '' %}{% set go.prompt = '' %}{% set go.response = '' %}{% endif %}"
    "{% if m['role'] == 'system' %}{% set go.system = m['content'] or '' %}"
    "{% elif m['role'] == 'user' %}{% set go.prompt = m['content'] or '' %}"
    "{% elif m['role'] == 'assistant' %}{% set go.response = m['content'] or '' %}{% endif %}{% endfor %}"
    "{% set system = go.system %}{% set prompt = go.prompt %}{% set response = go.response %}"
)
"""Writes all turns but the last one, for templates without `.Messages`."""


@dataclass(frozen=True)
class GoTemplate:
    """A translated template."""

    jinja: str
    has_suffix: bool
    """True: with the variable `suffix`, it asks the model for the text between the prompt and the suffix."""


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    begin: int
    end: int


@dataclass(frozen=True)
class _Text:
    text: str


@dataclass(frozen=True)
class _Action:
    """A pipeline that is printed, or assigned to a variable."""

    tokens: Sequence[_Token]
    line: int

    @property
    def prints_response(self) -> bool:
        return any(token.kind in ("field", "variable") and token.text.endswith(".Response") for token in self.tokens)


@dataclass(frozen=True)
class _Jump:
    name: str
    line: int


@dataclass
class _Block:
    """An if, range or with, whose body may be followed by an else."""

    name: str
    tokens: Sequence[_Token]
    line: int
    body: list[_Node] = field(default_factory=list)
    other: list[_Node] = field(default_factory=list)


_Node: TypeAlias = _Text | _Action | _Jump | _Block


def translate(text: str) -> GoTemplate:
    """Translates a template. Raises ConfigError that names the line of what cannot be translated."""
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"template has {len(text)} characters; expected at most {_MAX_CHARACTERS}")
    nodes = _Parser(text).nodes
    used = {part for name in _fields_of(nodes) for part in name.lstrip("$").split(".")}
    if not used & {"Messages", "Response"}:
        response = _Action([_Token("field", ".Response", 0, 0)], 1)
        nodes = [*nodes, response]
    emit = _Emitter()
    before = _COLLATED
    if "Messages" in used:
        body = emit.all(nodes, _OF_MESSAGES)
    else:
        before += f"{{% macro turn(system, prompt, response) %}}{emit.all(nodes, _OF_TURN)}{{% endmacro %}}"
        body = _TURNS + emit.all(_cut(nodes)[0], _OF_TURN)
    has_suffix = "Suffix" in used
    if has_suffix:
        body = f"{{% if suffix %}}{emit.all(nodes, _OF_SUFFIX)}{{% else %}}{body}{{% endif %}}"
    return GoTemplate(before + body, has_suffix)


def _fields_of(nodes: Sequence[_Node]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (_Action, _Block)):
            yield from (token.text for token in node.tokens if token.kind in ("field", "variable"))
        if isinstance(node, _Block):
            yield from _fields_of(node.body)
            yield from _fields_of(node.other)


def _cut(nodes: Sequence[_Node]) -> tuple[list[_Node], bool]:
    """Returns the nodes up to the first one that prints the response, and True if there is one."""
    kept: list[_Node] = []
    for node in nodes:
        if isinstance(node, _Block):
            body, is_cut = _cut(node.body)
            other, is_cut_later = ([], True) if is_cut else _cut(node.other)
            kept.append(_Block(node.name, node.tokens, node.line, body, other))
            is_cut = is_cut or is_cut_later
        else:
            kept.append(node)
            is_cut = isinstance(node, _Action) and node.prints_response
        if is_cut:
            return kept, True
    return kept, False


def _refused(line: int, said: str) -> ConfigError:
    return ConfigError(f"template, line {line}: {said}")


class _Parser:
    """Parses a template to nodes."""

    def __init__(self, text: str) -> None:
        self.nodes: list[_Node] = []
        self._text = text
        self._open: list[tuple[_Block, int]] = []
        """Open blocks, each with the number of blocks that its `end` closes."""
        self._lists: list[list[_Node]] = [self.nodes]
        self._line, self._line_place = 1, 0
        place, trims = 0, False
        while True:
            begin = text.find("{{", place)
            piece = text[place:] if begin < 0 else text[place:begin]
            piece = piece.lstrip(_SPACE) if trims else piece
            if begin < 0:
                self._add_text(piece)
                break
            is_trimmed = text.startswith("{{-", begin) and text[begin + 3 : begin + 4] in tuple(_SPACE)
            self._add_text(piece.rstrip(_SPACE) if is_trimmed else piece)
            place, trims = self._action(begin, begin + (3 if is_trimmed else 2))
        if self._open:
            block = self._open[-1][0]
            raise _refused(block.line, f"{{{{ {block.name} }}}} has no {{{{ end }}}}")

    def _add_text(self, text: str) -> None:
        if text:
            self._lists[-1].append(_Text(text))

    def _action(self, begin: int, place: int) -> tuple[int, bool]:
        """Parses an action. Returns the place after it, and True if it trims the text there."""
        self._line += self._text.count("\n", self._line_place, begin)
        line, self._line_place = self._line, begin
        comment = re.compile(r"\s*/\*.*?\*/(\s+-)?\}\}", re.DOTALL).match(self._text, place)
        if comment is not None:
            return comment.end(), comment[1] is not None
        tokens: list[_Token] = []
        while True:
            end = re.compile(r"(\s-)?\}\}").match(self._text, place)
            if end is not None:
                break
            found = _TOKEN.match(self._text, place)
            if found is None:
                raise _refused(line, f"{self._text[place : place + 20]!r} is not understood here")
            kind = found.lastgroup
            assert kind is not None
            if kind != "space":
                tokens.append(_Token(kind, found[0], found.start(), found.end()))
                place = found.end()
            elif re.compile(r"\s-\}\}").match(self._text, found.end() - 1):
                place = found.end() - 1
            else:
                place = found.end()
        self._add(tokens, line)
        return end.end(), end[1] is not None

    def _add(self, tokens: list[_Token], line: int) -> None:
        name = tokens[0].text if tokens else ""
        if name in ("if", "range", "with"):
            self._begin(_Block(name, tokens[1:], line), 1)
        elif name == "else":
            self._else(tokens[1:], line)
        elif name == "end" and len(tokens) == 1:
            if not self._open:
                raise _refused(line, "{{ end }} ends no block")
            _, num_closed = self._open.pop()
            self._lists.pop()
            for _ in range(num_closed - 1):
                self._open.pop()
                self._lists.pop()
        elif name in ("break", "continue") and len(tokens) == 1:
            self._lists[-1].append(_Jump(name, line))
        elif name in ("template", "define", "block"):
            raise _refused(line, f"{{{{ {name} }}}} is not supported; expected ranges, conditions and fields")
        elif tokens:
            self._lists[-1].append(_Action(tokens, line))
        else:
            raise _refused(line, "an action is empty")

    def _begin(self, block: _Block, num_closed: int) -> None:
        if len(self._open) >= _MAX_DEPTH:
            raise _refused(block.line, f"blocks are nested deeper than {_MAX_DEPTH} levels")
        self._lists[-1].append(block)
        self._open.append((block, num_closed))
        self._lists.append(block.body)

    def _else(self, tokens: list[_Token], line: int) -> None:
        if not self._open or self._lists[-1] is self._open[-1][0].other:
            raise _refused(line, "{{ else }} belongs to no block")
        block, num_closed = self._open[-1]
        self._lists[-1] = block.other
        if not tokens:
            return
        if tokens[0].text != "if" or block.name != "if":
            raise _refused(line, f"{{{{ else {tokens[0].text} }}}} is not supported; expected else, or else if")
        self._begin(_Block("if", tokens[1:], line), num_closed + 1)


@dataclass(frozen=True)
class _Scope:
    """Meaning of the dot and of variables, as Jinja. dot: None: the root."""

    root: Mapping[str, str]
    dot: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    in_range: bool = False

    def field(self, expression: str | None, path: Sequence[str], line: int) -> str:
        """Returns fields of a value. expression: None: the root."""
        for name in path:
            if expression is None:
                if name not in self.root:
                    raise _refused(line, f".{name} is not known; expected one of {', '.join(self.root)}")
                expression = self.root[name]
            elif name not in _FIELDS:
                raise _refused(line, f".{name} is not known; expected one of {', '.join(_FIELDS)}")
            else:
                expression = f"{expression}['{_FIELDS[name]}']"
        if expression is None:
            raise _refused(line, "the root is used as a value; expected one of its fields")
        return expression


class _Emitter:
    """Writes nodes as Jinja."""

    def __init__(self) -> None:
        self._num_names = 0

    def all(self, nodes: Sequence[_Node], root: Mapping[str, str]) -> str:
        """Writes a template whose root has these fields."""
        return self._nodes(nodes, _Scope(root))

    def _new(self) -> int:
        self._num_names += 1
        return self._num_names

    def _nodes(self, nodes: Sequence[_Node], scope: _Scope) -> str:
        written = []
        for node in nodes:
            if isinstance(node, _Text):
                written.append(f"{{{{ {_literal(node.text)} }}}}")
            elif isinstance(node, _Jump):
                if not scope.in_range:
                    raise _refused(node.line, f"{{{{ {node.name} }}}} is outside of a range")
                written.append(f"{{% {node.name} %}}")
            elif isinstance(node, _Action):
                text, scope = self._action(node, scope)
                written.append(text)
            elif node.name == "range":
                written.append(self._range(node, scope))
            else:
                written.append(self._branch(node, scope))
        return "".join(written)

    def _action(self, node: _Action, scope: _Scope) -> tuple[str, _Scope]:
        first, second = (*node.tokens, *[_Token("", "", 0, 0)] * 2)[:2]
        if first.kind == "variable" and second.text in (":=", "="):
            value = _expression(node.tokens[2:], scope, node.line)
            if second.text == ":=":
                name = f"go.v{self._new()}"
                scope = _with_variables(scope, {first.text: name})
            else:
                name = scope.variables.get(first.text, "")
                if not name.startswith("go."):
                    raise _refused(node.line, f"{first.text} cannot be set here; expected a variable set with :=")
            return f"{{% set {name} = {value} %}}", scope
        value = _expression(node.tokens, scope, node.line)
        return f"{{{{ {_text_of(value)} }}}}", scope

    def _branch(self, node: _Block, scope: _Scope) -> str:
        value = _expression(node.tokens, scope, node.line)
        inner = scope
        begin = ""
        if node.name == "with":
            name = f"go.v{self._new()}"
            begin = f"{{% set {name} = {value} %}}"
            value, inner = name, _with_dot(scope, name)
        other = f"{{% else %}}{self._nodes(node.other, scope)}" if node.other else ""
        return f"{begin}{{% if {value} %}}{self._nodes(node.body, inner)}{other}{{% endif %}}"

    def _range(self, node: _Block, scope: _Scope) -> str:
        tokens = list(node.tokens)
        names: list[str] = []
        marks = [token.text for token in tokens[:6]]
        if ":=" in marks:
            place = marks.index(":=")
            names = [token.text for token in tokens[:place] if token.kind == "variable"]
            if (
                len(names) > 2
                or place != 2 * len(names) - 1
                or not all(token.text == "," for token in tokens[1:place:2])
            ):
                raise _refused(node.line, "the variables of a range are not understood; expected $index, $value :=")
            tokens = tokens[place + 1 :]
        number = self._new()
        values, item, key, element = (f"go.v{number}", f"i{number}", f"k{number}", f"e{number}")
        inner = _with_dot(scope, element, in_range=True)
        # Go names the value if there is one variable, and the index or key first if there are two.
        named = (key, element)[2 - len(names) :] if names else ()
        inner = _with_variables(inner, dict(zip(names, named, strict=True)))
        value = _expression(tokens, scope, node.line)
        other = f"{{% else %}}{self._nodes(node.other, scope)}" if node.other else ""
        return (
            f"{{% set {values} = {value} %}}{{% for {item} in {values} or [] %}}"
            f"{{% set {key} = {item} if {values} is mapping else loop.index0 %}}"
            f"{{% set {element} = {values}[{item}] if {values} is mapping else {item} %}}"
            f"{self._nodes(node.body, inner)}{other}{{% endfor %}}"
        )


def _with_dot(scope: _Scope, dot: str, *, in_range: bool = False) -> _Scope:
    return _Scope(scope.root, dot, scope.variables, in_range or scope.in_range)


def _with_variables(scope: _Scope, more: Mapping[str, str]) -> _Scope:
    return _Scope(scope.root, scope.dot, {**scope.variables, **more}, scope.in_range)


def _text_of(value: str) -> str:
    """Returns the text of a value, by the macro in _COLLATED: an expression must not occur several times in another."""
    return f"text_of({value})"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _expression(tokens: Sequence[_Token], scope: _Scope, line: int) -> str:
    """Returns a pipeline as a Jinja expression."""
    reader = _Reader(tokens, scope, line)
    value = reader.pipeline(0)
    if not reader.is_at_end:
        raise _refused(line, f"{reader.next_text!r} is not expected here")
    return value


class _Reader:
    """Reads the tokens of a pipeline."""

    def __init__(self, tokens: Sequence[_Token], scope: _Scope, line: int) -> None:
        self._tokens = tokens
        self._place = 0
        self._scope = scope
        self._line = line

    @property
    def is_at_end(self) -> bool:
        return self._place == len(self._tokens)

    @property
    def next_text(self) -> str:
        return "" if self.is_at_end else self._tokens[self._place].text

    def pipeline(self, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise _refused(self._line, f"parentheses are nested deeper than {_MAX_DEPTH} levels")
        value = self._command(None, depth)
        while self.next_text == "|":
            self._place += 1
            value = self._command(value, depth)
        return value

    def _command(self, last: str | None, depth: int) -> str:
        """Reads a function with its arguments, or a value. last: value that a pipe adds as the last argument."""
        if self.is_at_end or self.next_text in ("|", ")"):
            raise _refused(self._line, "a value is missing")
        token = self._tokens[self._place]
        if token.kind == "name" and token.text not in ("true", "false", "nil"):
            self._place += 1
            arguments = []
            while not self.is_at_end and self.next_text not in ("|", ")"):
                arguments.append(self._operand(depth))
            return _call(token.text, [*arguments, *([] if last is None else [last])], self._line)
        if last is not None:
            raise _refused(self._line, f"{token.text!r} follows a pipe; expected a function")
        return self._operand(depth)

    def _operand(self, depth: int) -> str:
        token = self._tokens[self._place]
        self._place += 1
        if token.text == "(":
            value = self.pipeline(depth + 1)
            if self.next_text != ")":
                raise _refused(self._line, "a parenthesis is not closed")
            closing = self._tokens[self._place]
            self._place += 1
            following = None if self.is_at_end else self._tokens[self._place]
            if following is not None and following.kind == "field" and following.begin == closing.end:
                self._place += 1
                return self._scope.field(f"({value})", following.text[1:].split("."), self._line)
            return f"({value})"
        if token.kind == "field":
            return self._scope.field(self._scope.dot, token.text[1:].split("."), self._line)
        if token.kind == "dot":
            return self._scope.field(self._scope.dot, (), self._line)
        if token.kind == "variable":
            name, *path = token.text.split(".")
            if name != "$" and name not in self._scope.variables:
                raise _refused(self._line, f"the variable {name} is not known")
            return self._scope.field(None if name == "$" else self._scope.variables[name], path, self._line)
        return _constant(token, self._line)


def _constant(token: _Token, line: int) -> str:
    if token.kind == "string":
        try:
            return _literal(json.loads(token.text))
        except ValueError:
            raise _refused(line, f"the text {token.text} has an escape that is not supported") from None
    if token.kind == "raw":
        return _literal(token.text[1:-1])
    if token.kind == "number":
        return token.text
    if token.text in ("true", "false", "nil"):
        return "none" if token.text == "nil" else token.text
    if token.text == "currentDate":
        return _call(token.text, (), line)
    raise _refused(line, f"{token.text!r} is not expected here")


def _call(name: str, arguments: Sequence[str], line: int) -> str:
    """Returns a call of a function as Jinja."""
    if name not in _FUNCTIONS:
        raise _refused(line, f"the function {name} is not supported; expected one of {', '.join(_FUNCTIONS)}")
    least, most = {
        **{"not": (1, 1), "len": (1, 1), "json": (1, 1), "currentDate": (0, 1), "slice": (1, 3), "eq": (2, 16)},
        **{comparison: (2, 2) for comparison in _COMPARISONS},
    }.get(name, (1, 16))
    if not least <= len(arguments) <= most:
        raise _refused(line, f"{name} has {len(arguments)} arguments; expected {least} to {most}")
    if name in ("and", "or"):
        return f"({f' {name} '.join(arguments)})"
    if name == "not":
        return f"(not {arguments[0]})"
    if name == "eq":
        return f"({arguments[0]} in [{', '.join(arguments[1:])}])"
    if name in _COMPARISONS:
        return f"({arguments[0]} {_COMPARISONS[name]} {arguments[1]})"
    if name == "len":
        return f"(({arguments[0]} or []) | length)"
    if name == "printf":
        return _printed(arguments[0], arguments[1:], line)
    if name == "json":
        return _JSON.format(arguments[0])
    if name == "currentDate":
        return "strftime_now('%Y-%m-%d')"
    if name == "slice":
        return f"({arguments[0]} or [])[{':'.join([*arguments[1:], ''][:2])}]"
    return f"{arguments[0]}{''.join(f'[{place}]' for place in arguments[1:])}"


def _printed(form: str, values: Sequence[str], line: int) -> str:
    """Returns a call of printf. form: the format, as Jinja."""
    if not form.startswith('"'):
        raise _refused(line, "the format of printf is not a text")
    first, *parts = re.split(r"%(.)", json.loads(form), flags=re.DOTALL)
    made, left = [_literal(first)], list(values)
    for verb, text in zip(parts[::2], parts[1::2], strict=True):
        if verb == "%":
            made.append(_literal("%"))
        elif verb in "svd" and left:
            made.append(_text_of(left.pop(0)))
        else:
            raise _refused(line, f"printf has %{verb}; expected %s, %v or %d, each with a value")
        made.append(_literal(text))
    if left:
        raise _refused(line, f"printf has {len(left)} values too many")
    return f"({' ~ '.join(made)})"
