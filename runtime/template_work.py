"""Measures the work of one rendering of a chat template and enforces its limits.

Values are measured before an operation makes them, so a single operation cannot exceed the limits.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from jinja2 import TemplateError
from jinja2.runtime import Undefined

from .template_limits import TemplateLimits

OPERATION: Final = 64
"""Work of an operation in addition to the bytes that it makes, and of a list item."""
TURN: Final = 256
"""Work of a loop iteration, without the elements of the loop's body."""
CALL: Final = 1024
_CLOCK_INTERVAL: Final = 1 << 18
"""Work between two checks of the clock."""
MAX_WIDTH: Final = 1 << 16
"""Maximum number of characters or items that a width, an indent or a precision may ask for."""
_MAX_DEPTH: Final = 100
"""Maximum nesting of lists and objects. CPython's hash of a tuple has no limit of its own and overflows the stack."""
MAX_INTEGER_BITS: Final = 1024
_TEXT_PER_SIZE: Final = 16
"""Maximum number of characters that Python writes per unit of a container's size: escapes have ten characters."""
_COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
}
_CONTAINERS: Final[tuple[type[Any], ...]] = (list, tuple, dict, type({}.keys()), type({}.values()), type({}.items()))

_SIZED: Final[tuple[type[Any], ...]] = (str, bytes, bytearray, range, *_CONTAINERS)


class LimitError(TemplateError):
    """A template exceeds the limits."""


class Work:
    """Work of one rendering. Methods raise LimitError when a limit is exceeded."""

    __slots__ = ("_deadline", "_limits", "_max_characters", "_pause", "_sizes", "_spent")

    def __init__(self, limits: TemplateLimits) -> None:
        """Starts the clock."""
        self._limits = limits
        self._max_characters = limits.max_characters
        self._deadline = time.monotonic() + limits.max_seconds
        self._spent = 0
        self._pause = 0
        # Containers are kept with their sizes: after a container is freed, another one may get its address.
        self._sizes: dict[int, tuple[Any, int, int]] = {}

    def spend(self, work: int) -> None:
        """Counts work."""
        self._spent += work
        if self._spent > self._pause:
            self._look()

    def turn(self, elements: int) -> bool:
        """Counts a loop iteration, or the body of a macro, with its number of elements. Returns True."""
        self.spend(TURN + elements)
        return True

    def room(self, num_bytes: int) -> None:
        """Raises LimitError if an operation may not make this many bytes."""
        if self._spent + num_bytes > self._limits.max_work:
            raise self._too_much_work()

    def length(self, length: int) -> None:
        """Raises LimitError for a length that no text or list may have."""
        if length > self._max_characters:
            raise LimitError(
                f"it makes a value of {length} characters or items; at most {self._max_characters} are allowed"
            )

    def made_text(self, text: str) -> str:
        """Counts a new text."""
        length = len(text)
        if length > self._max_characters:
            self.length(length)
        self.spend(OPERATION if length < OPERATION else sys.getsizeof(text))
        return text

    def made(self, value: Any) -> Any:
        """Counts a new value and the texts in it."""
        if isinstance(value, str):
            return self.made_text(value)
        if isinstance(value, (bytes, bytearray)):
            self.length(len(value))
            self.spend(OPERATION + len(value))
        elif isinstance(value, _CONTAINERS):
            self.size(value)
            texts = value.values() if isinstance(value, dict) else value
            lengths = (len(item) if isinstance(item, str) else 0 for item in texts)
            self.spend(OPERATION * (1 + len(value)) + sum(lengths))
        elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise LimitError(f"it computes an integer of more than {MAX_INTEGER_BITS} bits")
        else:
            self.spend(OPERATION)
        return value

    def made_shallow(self, value: Any) -> Any:
        """Counts a new text, or a new list, tuple or object of existing items."""
        if isinstance(value, str):
            return self.made_text(value)
        if isinstance(value, _CONTAINERS):
            self.size(value)
            self.spend(OPERATION + 16 * len(value))
        else:
            self.spend(OPERATION)
        return value

    def made_of(self, value: Any, parts: Sequence[Any], times: int = 1) -> Any:
        """Counts a list or tuple with the items of its parts, without measuring them again."""
        measured = [self._measure(part) for part in parts]
        size = times * sum(size for size, _ in measured)
        self.length(size)
        self._sizes[id(value)] = (value, size, max(depth for _, depth in measured))
        self.spend(OPERATION + 16 * len(value))
        return value

    def sliced(self, value: Any) -> Any:
        """Counts a slice of a text or list."""
        if isinstance(value, str):
            return self.made_text(value)
        self.spend(OPERATION + 16 * len(value))
        return value

    def size(self, value: Any) -> int:
        """Returns the number of characters and items in a value. Repeated items count each time."""
        return len(value) if type(value) is str else self._measure(value)[0]

    def _measure(self, value: Any) -> tuple[int, int]:
        """Returns size and depth."""
        if isinstance(value, (str, bytes, bytearray)):
            return len(value), 0
        if isinstance(value, int):
            return 8 + (value.bit_length() >> 2), 0
        if not isinstance(value, _CONTAINERS):
            return 24, 0
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1], known[2]
        size = depth = 0
        self.spend(8 * len(value))
        parts = (value.keys(), value.values()) if isinstance(value, dict) else (value,)
        for items in parts:
            for item in items:
                if type(item) is str:
                    size += len(item) + 1
                    continue
                item_size, item_depth = self._measure(item)
                size += item_size + 1
                depth = max(depth, item_depth)
                self.length(size)
        self.length(size)
        if depth >= _MAX_DEPTH:
            raise LimitError(f"it nests values more than {_MAX_DEPTH} deep")
        self._sizes[id(value)] = (value, size, depth + 1)
        return size, depth + 1

    def depth(self, value: Any) -> int:
        """Returns the nesting of a value: 0 for a text or a number."""
        return self._measure(value)[1]

    def key(self, value: Any) -> Any:
        """Checks a key before Python hashes it, and returns it."""
        if type(value) is tuple:
            self.size(value)
        return value

    def items(self, value: Any) -> Any:
        """Returns a value whose items can be counted. Iterators become lists."""
        if isinstance(value, _SIZED):
            self.spend(16 * len(value))
            return value
        if value is None or isinstance(value, (int, float, Undefined)) or not isinstance(value, Iterable):
            return value
        items = []
        for item in value:
            self.spend(OPERATION)
            items.append(item)
        self.size(items)
        return items

    def text(self, value: Any) -> str:
        """Returns str(value), measured before."""
        if isinstance(value, _CONTAINERS) or not isinstance(value, (str, int, float, Undefined)):
            self.room(_TEXT_PER_SIZE * self.size(value))
        return str(value)

    def output(self, value: Any) -> str:
        """Returns the text that a template writes for a value."""
        return self.made_text(value if isinstance(value, str) else self.text(value))

    def concatenate(self, parts: Iterable[Any]) -> str:
        """Computes the operator `~`."""
        texts = [part if type(part) is str else self.text(part) for part in parts]
        self.length(sum(map(len, texts)))
        return self.made_text("".join(texts))

    def compare(self, left: Any, right: Any) -> None:
        """Counts a comparison of two values."""
        if isinstance(left, str):
            self.spend(OPERATION + len(left) // 16)
        else:
            self.spend(OPERATION + self.size(left) + self.size(right))

    def compared(self, names: tuple[str, ...], *values: Any) -> bool:
        """Computes chained comparisons such as `a < b < c`."""
        for name, left, right in zip(names, values[:-1], values[1:], strict=True):
            if name in ("in", "notin"):
                holds = self.contains(left, right) == (name == "in")
            else:
                self.compare(left, right)
                holds = _COMPARISONS[name](left, right)
            if not holds:
                return False
        return True

    def contains(self, item: Any, values: Any) -> bool:
        """Computes the operator `in`."""
        if type(values) is dict:
            self.spend(OPERATION)
            return self.key(item) in values
        if isinstance(values, str):
            self.spend(OPERATION + len(values))
            return item in values
        values = self.items(values)
        if isinstance(item, _CONTAINERS):
            self.spend(self.size(item) + self.size(values))
        return item in values

    def _look(self) -> None:
        if self._spent > self._limits.max_work:
            raise self._too_much_work()
        if time.monotonic() > self._deadline:
            raise LimitError(f"it takes more than {self._limits.max_seconds:g} seconds")
        self._pause = min(self._spent + _CLOCK_INTERVAL, self._limits.max_work)

    def _too_much_work(self) -> LimitError:
        return LimitError(
            f"it does more work than {self._limits.max_work} bytes, of which a loop turn counts for {TURN} and a call "
            f"for {CALL}"
        )


def check_width(value: Any) -> None:
    """Raises LimitError for a number that asks for too many characters or items."""
    if isinstance(value, int) and value > MAX_WIDTH:
        raise LimitError(f"it asks for {value} characters or items at once; at most {MAX_WIDTH} are allowed")
