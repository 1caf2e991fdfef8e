"""Ops in the order of their declaration, and the names of their values and tensors."""

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
    """Ops in the order of execution, each with the layer, the section and the scopes of its declaration.

    Each value is produced once. A value that was added to must not be read again.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        """Starts without ops."""
        self.config = config
        self.ops: list[Op] = []
        self.layer_ops: Final[list[range]] = []
        """Range of op numbers of each decoder layer."""
        self.encoder_layer_ops: Final[list[range]] = []
        """Range of op numbers of each layer of an encoder before the decoder."""
        self.cross_key_ops: Final[list[range]] = []
        """Range of op numbers that compute each decoder layer's keys and values of the encoder's output."""
        self._layer: int | None = None
        self._rows = RowKind.TOKENS
        self._section = "transformer"
        self._scopes: list[str] = []
        self._overwritten: set[str] = set()

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Attention of each layer, in order; an encoder's before the decoder's."""
        return tuple(op for op in self.ops if isinstance(op, Attention))

    @property
    def scales_queries_from(self) -> int | None:
        """First position whose queries are scaled; None: no query is."""
        scalings = (op.query_scaling for op in self.attentions)
        return min((scaling.first_position for scaling in scalings if scaling is not None), default=None)

    def layers(self) -> Iterator[int]:
        """Yields the number of each decoder layer; ops declared meanwhile belong to it."""
        found = self.cross_key_ops if self._rows is RowKind.ENCODER_TOKENS else self.layer_ops
        yield from self._layers(self.config.num_hidden_layers, found)

    @contextmanager
    def encoder(self) -> Iterator[None]:
        """Context manager: ops declared within have one row per encoder input token, and run before the others.

        Later ops can use only the values that cross_keys() stores.
        """
        self._rows = RowKind.ENCODER_TOKENS
        with self.scope("encoder"):
            yield
        self._rows = RowKind.TOKENS

    def encoder_layers(self) -> Iterator[int]:
        """Yields the number of each layer of an encoder before a decoder.

        Adapters count these layers after the decoder's.
        """
        self._section = "encoder"
        yield from self._layers(self.config.num_encoder_layers, self.encoder_layer_ops)
        self._section = "transformer"

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Context manager: names declared within begin with `name`."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    @property
    def _scope(self) -> str:
        return "/".join(self._scopes)

    @property
    def _part(self) -> str:
        """Prefix of the names of tensors."""
        return "encoder" if self._rows is RowKind.ENCODER_TOKENS else "transformer"

    @property
    def _adapted_layer(self) -> int | None:
        """Number of the layer for adapters, which count an encoder's layers after the decoder's."""
        if self._layer is None or self._section == "transformer":
            return self._layer
        return self.config.num_hidden_layers + self._layer

    def _layers(self, count: int, ops: list[range]) -> Iterator[int]:
        """Yields layer numbers; appends each layer's range of op numbers to `ops`."""
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
