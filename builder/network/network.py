"""A network as a family declares it, op by op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ..._core import RowKind
from ..checkpoint.config import CheckpointConfig
from ..checkpoint.rotary import RotaryScaling
from ..checkpoint.tensor_names import EMBEDDING, LM_HEAD
from .ops import Activation, Attention, Embedding, HeadNorm, Linear, Op, RmsNorm, Rotary, RotaryTable, Value
from .weights import LinearWeight, Part, Split, Tensor, TensorName


class Network:
    """The ops of a decoder in the order of execution.

    Names of tensors are those of the Hugging Face model (`source`) and of checkpoints (`name`, relative to the
    decoder layer within one). Values are made once; one that was added to must not be read again.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self.config: Final = config
        self.ops: Final[list[Op]] = []
        self.logits: Value | None = None
        self._layer: int | None = None
        self._scopes: list[str] = []
        self._overwritten: set[str] = set()

    def layers(self) -> Iterator[int]:
        """The number of each decoder layer; what is declared meanwhile belongs to it."""
        for layer in range(self.config.num_hidden_layers):
            self._layer = layer
            with self.scope(f"layers.{layer}"):
                yield layer
        self._layer = None

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """What is declared within the with statement gets names that begin with `name`."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    def embedding(self, source: str) -> Value:
        """The tokens' rows of `source`.weight [vocab_size, hidden_size], in float32: the residual stream."""
        with self.scope("embedding"):
            table = Tensor(TensorName(EMBEDDING), f"{source}.weight", (self.config.vocab_size, self.config.hidden_size))
            output = self._value("embedded", self.config.hidden_size)
            self.ops.append(Embedding(scope=self._scope, output=output, table=table))
        return output

    def rotary(
        self, size: int | None = None, base: float | None = None, scaling: RotaryScaling | None = None
    ) -> RotaryTable:
        """The rotation by a step's positions of the first `size` elements of a head; all by the config, if not said."""
        config = self.config
        if base is None:
            base, scaling = config.rotary_base, config.rotary_scaling
        size = config.head_size if size is None else size
        with self.scope("rotary"):
            table = RotaryTable(self._value("cosine", size // 2), self._value("sine", size // 2))
            self.ops.append(
                Rotary(
                    scope=self._scope,
                    output=table,
                    size=size,
                    base=base,
                    scaling=scaling,
                    max_position_embeddings=config.max_position_embeddings,
                )
            )
        return table

    def rms_norm(self, x: Value, source: str, name: str, *, logit_rows: bool = False) -> Value:
        """`x` normalised, in the type that linear layers read. With `logit_rows`, only of the rows of logits."""
        weight = Tensor(self._name(f"{name}.weight"), f"{source}.weight", (x.width,))
        output = self._value("normed", x.width, RowKind.LOGITS if logit_rows else x.rows)
        self.ops.append(
            RmsNorm(
                scope=self._scope,
                input=self._read(x),
                output=output,
                weight=weight,
                epsilon=self.config.norm_epsilon,
                gather_logit_rows=logit_rows,
            )
        )
        return output

    def head_norm(self, source: str, name: str) -> HeadNorm:
        """An RMS norm of heads, for attention()."""
        weight = Tensor(self._name(f"{name}.weight"), f"{source}.weight", (self.config.head_size,))
        return HeadNorm(weight=weight, epsilon=self.config.norm_epsilon)

    def linear(
        self,
        x: Value,
        name: str,
        parts: Sequence[Part],
        *,
        split: Split,
        bias: bool = False,
        add_to: Value | None = None,
    ) -> Value:
        """A linear layer over `x`; with `add_to` its result is added to that value."""
        weight = self.weight(x, name, parts, split=split, bias=bias)
        return self._linear(x, (weight,), None, add_to)

    def gated(self, x: Value, gate: LinearWeight, up: LinearWeight, activation: Activation) -> Value:
        """activation(x gate^T) * (x up^T)."""
        return self._linear(x, (gate, up), activation, None)

    def weight(
        self, x: Value, name: str, parts: Sequence[Part], *, split: Split = Split.COLUMN, bias: bool = False
    ) -> LinearWeight:
        """The weight of a linear layer over `x`."""
        return LinearWeight(name=self._name(name), parts=tuple(parts), inputs=x.width, split=split, bias=bias)

    def attention(
        self,
        qkv: Value,
        rotary: RotaryTable,
        *,
        window: int | None = None,
        scale: float | None = None,
        query_norm: HeadNorm | None = None,
        key_norm: HeadNorm | None = None,
    ) -> Value:
        """What each head attends to; scores are multiplied by `scale`, 1 / sqrt(head_size) if it is not said."""
        config = self.config
        assert self._layer is not None
        output = self._value("attended", config.num_attention_heads * config.head_size)
        self.ops.append(
            Attention(
                scope=self._scope,
                layer=self._layer,
                qkv=self._read(qkv),
                rotary=rotary,
                output=output,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_size=config.head_size,
                scale=config.head_size**-0.5 if scale is None else scale,
                window=window,
                query_norm=query_norm,
                key_norm=key_norm,
            )
        )
        return output

    def lm_head(self, x: Value, source: str, embedding: str) -> None:
        """The logits: `x` times `source`.weight [vocab_size, hidden_size], or the embedding's where they are tied."""
        config = self.config
        table = Tensor(TensorName(EMBEDDING), f"{embedding}.weight", (config.vocab_size, config.hidden_size))
        part = Part(
            source=source,
            module=None,
            outputs=config.vocab_size,
            units=config.vocab_size,
            rows=(range(config.vocab_size),),
            source_outputs=config.vocab_size,
        )
        weight = LinearWeight(
            name=TensorName((EMBEDDING if config.lm_head_is_embedding else LM_HEAD).removesuffix(".weight")),
            parts=(part,),
            inputs=x.width,
            split=Split.COLUMN,
            bias=False,
            tied_to=table if config.share_embedding_table else None,
        )
        self.logits = self._linear(x, (weight,), None, None)

    @property
    def _scope(self) -> str:
        return "/".join(self._scopes)

    def _name(self, name: str) -> TensorName:
        return TensorName(name, self._layer)

    def _value(self, name: str, width: int, rows: RowKind = RowKind.TOKENS) -> Value:
        return Value("/".join([*self._scopes, f"{name}_{len(self.ops)}"]), width, rows)

    def _read(self, value: Value) -> Value:
        if value.name in self._overwritten:
            raise ValueError(f"'{value.name}' is read after something was added to it")
        return value

    def _linear(
        self, x: Value, weights: tuple[LinearWeight, ...], activation: Activation | None, add_to: Value | None
    ) -> Value:
        widths = [weight.outputs for weight in weights]
        width = widths[0] if activation is not None else sum(widths)
        output = self._value("linear" if add_to is None else "sum", width, x.rows)
        self.ops.append(
            Linear(
                scope=self._scope,
                input=self._read(x),
                output=output,
                weights=weights,
                layer=self._layer,
                activation=activation,
                add_to=None if add_to is None else self._read(add_to),
            )
        )
        if add_to is not None:
            self._overwritten.add(add_to.name)
        return output
