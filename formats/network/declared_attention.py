"""Declaration of attention: positions, heads, and the cross attention's keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from ..._core import AttentionKind
from ..checkpoint.rotary import ProportionalScaling, RotaryScaling
from .declared_ops import DeclaredOps
from .operands import AttentionShape, HeadNorm, PositionBias, QueryScaling, RotaryTable, Sinks, Value
from .ops import Attention, CrossAttention, CrossKeys, Rotary
from .weights import Tensor, TensorName


class DeclaredAttention(DeclaredOps):
    """Methods of a network that declare its attention; heads and positions come from the config."""

    def rotary(
        self,
        size: int | None = None,
        base: float | None = None,
        scaling: RotaryScaling | ProportionalScaling | None = None,
        *,
        scope: str = "rotary",
        columns: Sequence[int] = (),
        is_twice: bool = False,
        is_in_turn: bool = False,
    ) -> RotaryTable:
        """Declares the rotation of the first `size` elements of a head; defaults come from the config.

        columns: of rows that are given in place of tokens, one for each pair of elements: those with its position.
        is_twice: True: the frequencies are those of size / 2 elements, twice.
        is_in_turn: True: the first half of the pairs has the frequencies of even pairs, the second half of odd pairs.
        """
        config = self.config
        if base is None:
            base, scaling = config.rotary_base, config.rotary_scaling
        size = config.rotary_size if size is None else size
        with self.scope(scope):
            table = RotaryTable(*(self._value(name, size // 2, self._rows) for name in ("cosine", "sine")))
            self.ops.append(
                Rotary(
                    scope=self._scope,
                    output=table,
                    size=size,
                    base=base,
                    scaling=scaling,
                    max_position_embeddings=config.max_position_embeddings,
                    columns=tuple(columns),
                    is_twice=is_twice,
                    is_in_turn=is_in_turn,
                )
            )
        return table

    def no_rotation(self) -> RotaryTable:
        """Returns angles of zero, for attention without rotary positions."""
        return self.rotary(2, 0.0, scope="no_rotation")

    def head_norm(self, source: str, name: str, width: int | None = None, *, plus_one: bool = False) -> HeadNorm:
        """Returns an RMS norm of each head for attention(); with `width`, one norm over all heads together."""
        size = self.config.head_size if width is None else width
        weight = self._vector(source, f"{name}.weight", size, plus_one=plus_one)
        return HeadNorm(weight=weight, epsilon=self.config.norm_epsilon)

    def attention(
        self,
        qkv: Value,
        rotary: RotaryTable,
        *,
        window: int | None = None,
        scale: float | None = None,
        query_norm: HeadNorm | None = None,
        key_norm: HeadNorm | None = None,
        softcap: float | None = None,
        interleaved: bool = False,
        is_causal: bool = True,
        position_bias: PositionBias | None = None,
        sinks: Sinks | None = None,
        norms_after_rotation: bool = False,
        query_scaling: QueryScaling | None = None,
        shape: AttentionShape | None = None,
        normalizes_values: bool = False,
        values_from_keys: bool = False,
        shared_layer: int | None = None,
        window_column: int | None = None,
        joint_column: int | None = None,
        chunk: int | None = None,
        plain_norm_epsilon: float | None = None,
    ) -> Value:
        """Declares attention over the heads of `qkv`; scores are multiplied by `scale`, by default 1 / sqrt(head_size).

        shape: the heads; None: the config's.
        normalizes_values: True normalises each head of v, without a weight.
        values_from_keys: True takes k, before its norm and its rotation, as v.
        shared_layer: an earlier layer whose keys and values are used.
        window_column: of rows that are given in place of tokens: that with the number of a row's window.
        joint_column: of such rows: that with the number by which neighbours attend to each other in both directions.
        chunk: tokens attend only to their own chunk of so many positions.
        plain_norm_epsilon: normalises each head of q and k, without a weight.

        If it is not causal, each row attends to all rows of its sequence, so steps must contain whole sequences.
        """
        assert self._layer is not None
        shape = shape or self._attention_shape
        output = self._value("attended", shape.query_size, qkv.rows)
        self.ops.append(
            Attention(
                scope=self._scope,
                kind=AttentionKind.CAUSAL if is_causal else AttentionKind.BIDIRECTIONAL,
                layer=self._layer,
                qkv=self._read(qkv),
                rotary=rotary,
                output=output,
                shape=shape,
                scale=shape.head_dim**-0.5 if scale is None else scale,
                window=window,
                query_norm=query_norm,
                key_norm=key_norm,
                softcap=softcap,
                interleaved=interleaved,
                position_bias=position_bias,
                sinks=sinks,
                norms_after_rotation=norms_after_rotation,
                query_scaling=query_scaling,
                normalizes_values=normalizes_values,
                values_from_keys=values_from_keys,
                shared_layer=shared_layer,
                window_column=window_column,
                joint_column=joint_column,
                chunk=chunk,
                plain_norm_epsilon=plain_norm_epsilon,
            )
        )
        return output

    def cross_keys(self, kv: Value) -> None:
        """Stores the keys and values [k | v] of an encoder input for cross_attention() of the same decoder layer."""
        assert self._layer is not None
        self.ops.append(CrossKeys(scope=self._scope, layer=self._layer, kv=self._read(kv), shape=self._attention_shape))

    def cross_attention(self, q: Value, *, scale: float | None = None) -> Value:
        """Declares attention of q to the sequence's encoder input; scores are multiplied as in attention()."""
        assert self._layer is not None
        shape = self._attention_shape
        output = self._value("attended", shape.query_size)
        self.ops.append(
            CrossAttention(
                scope=self._scope,
                layer=self._layer,
                q=self._read(q),
                output=output,
                shape=shape,
                scale=shape.head_dim**-0.5 if scale is None else scale,
            )
        )
        return output

    def sinks(self, source: str, name: str) -> Sinks:
        """Returns learned sinks for attention(): the vector `source` has one score per head."""
        heads = self.config.num_attention_heads
        return Sinks(scores=Tensor(self._name(name), source, (heads,)), heads=range(heads))

    def position_bias(self, source: str, name: str, num_buckets: int, buckets: Sequence[int]) -> PositionBias:
        """Returns a bias by relative position, `source`.weight [num_buckets, heads]; `buckets` are those of -r to r."""
        shape = (num_buckets, self.config.num_attention_heads)
        tensor = TensorName(f"{self._part}.{name}.weight")
        table = Tensor(tensor, f"{source}.weight", shape)
        return PositionBias(table=table, buckets=tuple(buckets), heads=range(shape[1]))

    @property
    def _attention_shape(self) -> AttentionShape:
        config = self.config
        return AttentionShape(
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_size,
        )
