"""Ops as they are declared, one after another, and the names of what they make and read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ..._core import RowKind
from ..checkpoint.config import CheckpointConfig
from .operands import Value
from .ops import Attention, Op
from .weights import Tensor, TensorName


class DeclaredOps:
    """Ops in the order of execution, each in the layer, the section and the scopes that it was declared in.

    Values are made once; one that was added to must not be read again.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        """Nothing is declared yet."""
        self.config: Final = config
        self.ops: list[Op] = []
        self.layer_ops: Final[list[range]] = []
        """Of each decoder layer, the numbers of its ops."""
        self.encoder_layer_ops: Final[list[range]] = []
        """The same of an encoder before the decoder."""
        self.cross_key_ops: Final[list[range]] = []
        """Of each decoder layer, the same of what it keeps of the encoder's output."""
        self._layer: int | None = None
        self._rows = RowKind.TOKENS
        self._section = "transformer"
        self._scopes: list[str] = []
        self._overwritten: set[str] = set()

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each layer, in order; an encoder's before the decoder's."""
        return tuple(op for op in self.ops if isinstance(op, Attention))

    def layers(self) -> Iterator[int]:
        """The number of each decoder layer; what is declared meanwhile belongs to it."""
        found = self.cross_key_ops if self._rows is RowKind.ENCODER_TOKENS else self.layer_ops
        yield from self._layers(self.config.num_hidden_layers, found)

    @contextmanager
    def encoder(self) -> Iterator[None]:
        """What is declared within the with statement has the rows of encoder inputs, and is computed before the rest.

        Only what cross_keys() keeps of it can be seen afterwards.
        """
        self._rows = RowKind.ENCODER_TOKENS
        with self.scope("encoder"):
            yield
        self._rows = RowKind.TOKENS

    def encoder_layers(self) -> Iterator[int]:
        """The number of each layer of an encoder that has a decoder behind it.

        Adapters know it as the one behind the decoder's layers and the encoder's before it.
        """
        self._section = "encoder"
        yield from self._layers(self.config.num_encoder_layers, self.encoder_layer_ops)
        self._section = "transformer"

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """What is declared within the with statement gets names that begin with `name`."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    @property
    def _scope(self) -> str:
        return "/".join(self._scopes)

    @property
    def _part(self) -> str:
        """What the names of tensors begin with here."""
        return "encoder" if self._rows is RowKind.ENCODER_TOKENS else "transformer"

    @property
    def _adapted_layer(self) -> int | None:
        """The layer's number for adapters: an encoder's are behind the decoder's."""
        if self._layer is None or self._section == "transformer":
            return self._layer
        return self.config.num_hidden_layers + self._layer

    def _layers(self, count: int, ops: list[range]) -> Iterator[int]:
        """Their numbers; which `ops` each has is added there."""
        for layer in range(count):
            first = len(self.ops)
            self._layer = layer
            with self.scope(f"layers.{layer}"):
                yield layer
            ops.append(range(first, len(self.ops)))
        self._layer = None

    def _name(self, name: str) -> TensorName:
        return TensorName(name, self._layer, self._section)

    def _value(self, name: str, width: int, rows: RowKind = RowKind.TOKENS) -> Value:
        return Value("/".join([*self._scopes, f"{name}_{len(self.ops)}"]), width, rows)

    def _read(self, value: Value) -> Value:
        if value.name in self._overwritten:
            raise ValueError(f"'{value.name}' is read after something was added to it")
        return value

    def _overwrite(self, value: Value) -> Value:
        self._overwritten.add(self._read(value).name)
        return value

    def _vector(self, source: str, name: str, size: int, *, plus_one: bool = False) -> Tensor:
        kind = name.rpartition(".")[2]
        return Tensor(self._name(name), f"{source}.{kind}", (size,), plus_one)
