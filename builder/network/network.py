"""A network as a family declares it, op by op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from ..._core import AttentionKind, PoolingActivation, RowKind
from ..checkpoint.config import CheckpointConfig
from ..checkpoint.rotary import RotaryScaling
from ..checkpoint.stacked_experts import StackedExperts
from ..checkpoint.tensor_names import EMBEDDING, LM_HEAD, LM_HEAD_MODULE
from .operands import Activation, AttentionShape, HeadNorm, PositionBias, RotaryTable, Routing, Sinks, Value
from .ops import (
    Attention,
    Cast,
    CrossAttention,
    CrossKeys,
    Embedding,
    Experts,
    GatedAdd,
    LayerNorm,
    Linear,
    Op,
    PoolingLayer,
    RmsNorm,
    Rotary,
)
from .weights import LinearWeight, Part, Split, Tensor, TensorName, whole


class Network:
    """The ops of a decoder in the order of execution.

    Names of tensors are those of the Hugging Face model (`source`) and of checkpoints (`name`, relative to the
    decoder layer within one). Values are made once; one that was added to must not be read again.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        older_names: Mapping[str, str] | None = None,
        inner_names: Mapping[str, str] | None = None,
        stacked_experts: StackedExperts | None = None,
    ) -> None:
        """`older_names`: what `source`s began with in older layouts of the Hugging Face model, and begin with now.

        `inner_names`: parts of paths, as files have them, with what transformers calls them in a model that is loaded.
        `stacked_experts`: parameters that hold linear layers of all experts in the Hugging Face model.
        """
        self.config: Final = config
        self.older_names: Final[Mapping[str, str]] = older_names or {}
        self.inner_names: Final[Mapping[str, str]] = inner_names or {}
        self.stacked_experts: Final[StackedExperts] = stacked_experts or {}
        self.ops: list[Op] = []
        self._num_biased_norms = 0
        self.hidden: Value | None = None
        """The hidden states behind the final norm, which lm_head reads."""
        self.logits: Value | None = None
        """None where there is no lm_head."""
        self.pooler: PoolingLayer | None = None
        """What some classifiers do to pooled hidden states before their last layer."""
        self.classes: PoolingLayer | None = None
        """A classifier's last layer: one output a class."""
        self.left_aside: Final[set[str]] = set()
        """Linear layers that the Hugging Face model may have and that nothing served reads."""
        self.encoder_output: Value | None = None
        """What the encoder makes of its input, where there is one: float32, or what linear layers read."""
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

    def embedding(
        self,
        source: str,
        *,
        scale: float = 1.0,
        inputs_embeds_scale: float = 1.0,
        positions: str | None = None,
        rows_before: int = 0,
        types: str | None = None,
        num_types: int = 0,
    ) -> Value:
        """The tokens' rows of `source`.weight [vocab_size, hidden_size] in float32, times `scale`: the residual stream.

        inputs_embeds_scale: of embeddings that the Hugging Face model is given in place of tokens: that of its own
        embedding may be `scale`, while these are taken as they are.
        `types`.weight [num_types, hidden_size] is added, where tokens are of kinds, and then
        `positions`.weight [rows_before + max_position_embeddings, hidden_size], where positions are learned.
        """
        config = self.config
        as_linear = LinearWeight(
            name=TensorName(EMBEDDING.removesuffix(".weight")),
            parts=(whole(source, "embedding", config.hidden_size, transposed=True),),
            inputs=config.vocab_size,
            split=Split.NONE,
            bias=False,
        )
        with self.scope("embedding"):
            output = self._value("embedded", config.hidden_size, self._rows)
            self.ops.append(
                Embedding(
                    scope=self._scope,
                    output=output,
                    table=Tensor(TensorName(EMBEDDING), f"{source}.weight", (config.vocab_size, config.hidden_size)),
                    scale=scale,
                    inputs_embeds_scale=inputs_embeds_scale,
                    positions=None
                    if positions is None
                    else Tensor(
                        TensorName(f"{self._part}.position_embedding.weight"),
                        f"{positions}.weight",
                        (config.max_position_embeddings, config.hidden_size),
                        rows_before=rows_before,
                    ),
                    types=None
                    if types is None
                    else Tensor(
                        TensorName(f"{self._part}.token_type_embedding.weight"),
                        f"{types}.weight",
                        (num_types, config.hidden_size),
                    ),
                    as_linear=None if config.num_encoder_layers else as_linear,
                )
            )
        return output

    def rotary(
        self,
        size: int | None = None,
        base: float | None = None,
        scaling: RotaryScaling | None = None,
        *,
        scope: str = "rotary",
    ) -> RotaryTable:
        """The rotation by a step's positions of the first `size` elements of a head; all by the config, if not said."""
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
                )
            )
        return table

    def no_rotation(self) -> RotaryTable:
        """Angles of zero, for attention that has no rotary positions."""
        return self.rotary(2, 0.0, scope="no_rotation")

    def rms_norm(
        self,
        x: Value,
        source: str,
        name: str,
        *,
        plus_one: bool = False,
        logit_rows: bool = False,
        add_to: Value | None = None,
    ) -> Value:
        """`x` normalised, in the type that linear layers read. With `logit_rows`, only of the rows of logits.

        `plus_one`: the model stores its weight as the difference from one. With `add_to` the result is added to that
        value.
        """
        output = self._value("normed" if add_to is None else "sum", x.width, RowKind.LOGITS if logit_rows else x.rows)
        self.ops.append(
            RmsNorm(
                scope=self._scope,
                input=self._read(x),
                output=output,
                weight=self._vector(source, f"{name}.weight", x.width, plus_one=plus_one),
                epsilon=self.config.norm_epsilon,
                gather_logit_rows=logit_rows,
                add_to=None if add_to is None else self._overwrite(add_to),
            )
        )
        return output

    def layer_norm(
        self,
        x: Value,
        source: str,
        name: str,
        *,
        bias: bool = True,
        logit_rows: bool = False,
        is_stream: bool = False,
    ) -> Value:
        """`x` with its mean and deviation taken out, in the type that linear layers read.

        With `is_stream` it is a residual stream, float32, which linear layers read by cast().
        """
        output = self._value("normed", x.width, RowKind.LOGITS if logit_rows else x.rows)
        self.ops.append(
            LayerNorm(
                scope=self._scope,
                input=self._read(x),
                output=output,
                weight=self._vector(source, f"{name}.weight", x.width),
                bias=self._vector(source, f"{name}.bias", x.width) if bias else None,
                epsilon=self.config.norm_epsilon,
                gather_logit_rows=logit_rows,
                is_stream=is_stream,
                number=self._num_biased_norms if bias else None,
            )
        )
        self._num_biased_norms += bias
        return output

    def cast(self, x: Value) -> Value:
        """`x` in the type that linear layers read."""
        output = self._value("cast", x.width, x.rows)
        self.ops.append(Cast(scope=self._scope, input=self._read(x), output=output))
        return output

    def head_norm(self, source: str, name: str, width: int | None = None, *, plus_one: bool = False) -> HeadNorm:
        """An RMS norm of heads, for attention(); of all heads together where `width` is theirs."""
        size = self.config.head_size if width is None else width
        weight = self._vector(source, f"{name}.weight", size, plus_one=plus_one)
        return HeadNorm(weight=weight, epsilon=self.config.norm_epsilon)

    def linear(
        self,
        x: Value,
        name: str,
        parts: Sequence[Part],
        *,
        split: Split,
        bias: bool = False,
        activation: Activation | None = None,
        add_to: Value | None = None,
        scale: float = 1.0,
        quantized: bool = True,
    ) -> Value:
        """A linear layer over `x`, times `scale`; with `add_to` its result is added to that value.

        `quantized`: whether it is in checkpoints that are quantised.
        """
        weight = self.weight(x, name, parts, split=split, bias=bias, quantized=quantized)
        return self._linear(x, (weight,), activation, add_to, scale)

    def gated(
        self, x: Value, gate: LinearWeight, up: LinearWeight, activation: Activation, threshold: float = 0.0
    ) -> Value:
        """activation(x gate^T) * (x up^T). For a ReLU, gates that are not above `threshold` count as 0."""
        return self._linear(x, (gate, up), activation, threshold=threshold)

    def weight(
        self,
        x: Value | int,
        name: str,
        parts: Sequence[Part],
        *,
        split: Split = Split.COLUMN,
        bias: bool = False,
        quantized: bool = True,
        expert: int | None = None,
    ) -> LinearWeight:
        """The weight of a linear layer over `x`, or over so many inputs, of an expert where it is one's."""
        inputs = x if isinstance(x, int) else x.width
        full_name = self._name(name)
        return LinearWeight(
            name=full_name,
            parts=tuple(parts),
            inputs=inputs,
            split=split,
            bias=bias,
            quantized=quantized and not self._is_excluded(full_name),
            expert=expert,
        )

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
    ) -> Value:
        """What each head attends to; scores are multiplied by `scale`, 1 / sqrt(head_size) if it is not said.

        If it is not causal, each row sees all of its sequence's rows, and sequences must be whole.
        """
        assert self._layer is not None
        shape = self._attention_shape
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
            )
        )
        return output

    def cross_keys(self, kv: Value) -> None:
        """Keeps the keys and values [k | v] of an encoder input for cross_attention() of the decoder's layer."""
        assert self._layer is not None
        self.ops.append(CrossKeys(scope=self._scope, layer=self._layer, kv=self._read(kv), shape=self._attention_shape))

    def cross_attention(self, q: Value, *, scale: float | None = None) -> Value:
        """What each head of q finds in the sequence's encoder input; scores are multiplied as attention() does."""
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

    def experts(
        self,
        x: Value,
        router_logits: Value,
        *,
        gate: Sequence[LinearWeight],
        up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        routing: Routing,
        activation: Activation,
        add_to: Value,
    ) -> Value:
        """`add_to` plus what the experts that the router chooses for each row make of `x`, weighted."""
        assert self._layer is not None
        output = self._value("sum", add_to.width)
        self.ops.append(
            Experts(
                scope=self._scope,
                layer=self._layer,
                input=self._read(x),
                router_logits=self._read(router_logits),
                output=output,
                add_to=self._overwrite(add_to),
                routing=routing,
                activation=activation,
                gate=tuple(gate),
                up=tuple(up),
                down=tuple(down),
            )
        )
        return output

    def gated_add(self, x: Value, gate: Value, add_to: Value) -> Value:
        """`add_to` + sigmoid(`gate`) * `x`."""
        output = self._value("sum", x.width)
        self.ops.append(
            GatedAdd(
                scope=self._scope,
                input=self._read(x),
                gate=self._read(gate),
                output=output,
                add_to=self._overwrite(add_to),
            )
        )
        return output

    def float32_vector(self, source: str, name: str, size: int) -> Tensor:
        """A vector that checkpoints have in float32, whatever their dtype."""
        return Tensor(self._name(name), source, (size,), float32=True)

    def sinks(self, source: str, name: str) -> Sinks:
        """The vector `source` of a score for each head, for attention()."""
        heads = self.config.num_attention_heads
        return Sinks(scores=Tensor(self._name(name), source, (heads,)), heads=range(heads))

    def position_bias(self, source: str, name: str, num_buckets: int, buckets: Sequence[int]) -> PositionBias:
        """Of relative positions whose `buckets` are those of -r to r: `source`.weight [num_buckets, heads]."""
        shape = (num_buckets, self.config.num_attention_heads)
        tensor = TensorName(f"{self._part}.{name}.weight")
        table = Tensor(tensor, f"{source}.weight", shape)
        return PositionBias(table=table, buckets=tuple(buckets), heads=range(shape[1]))

    def lm_head(
        self,
        x: Value,
        source: str,
        embedding: str,
        *,
        bias: bool = False,
        row_bias: str | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        token_classifier: str = "score",
    ) -> None:
        """The logits: `x` times `source`.weight [vocab_size, hidden_size], or the embedding's where they are tied.

        They are multiplied by `scale`, then bounded by `softcap`. `row_bias`: a tensor [1, vocab_size] that is added. A
        classifier has score.weight [labels, hidden_size] instead, or, where it classifies tokens,
        `token_classifier`.weight and .bias.

        Adapters do not act on what several ranks have a share of, whose slices would not be theirs.
        """
        config = self.config
        self.hidden = x
        if config.classifier is not None:
            per_token = config.classifier.per_token
            name = token_classifier if per_token else "score"
            self.classifier(name, x.width, bias=per_token)
        if not config.has_lm_head:
            return
        table = Tensor(TensorName(EMBEDDING), f"{embedding}.weight", (config.vocab_size, config.hidden_size))
        part = Part(
            source=source,
            module=None if config.num_encoder_layers or config.mapping.tp_size > 1 else "lm_head",
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
            bias=bias or row_bias is not None,
            row_bias=row_bias,
            tied_to=table if config.share_embedding_table else None,
            quantized=not self._is_excluded(TensorName(LM_HEAD_MODULE)),
        )
        self.logits = self._linear(x, (weight,), None, None, scale, softcap)

    def _is_excluded(self, name: TensorName) -> bool:
        quantization = self.config.quantization
        return quantization is not None and str(name) in quantization.exclude_modules

    def classifier(self, source: str, inputs: int, *, bias: bool) -> None:
        """The linear layer that makes a classifier's outputs of hidden states that were pooled."""
        assert self.config.classifier is not None
        outputs = len(self.config.classifier.labels)
        self.classes = PoolingLayer(
            weight=Tensor(TensorName("classifier.weight"), f"{source}.weight", (outputs, inputs)),
            bias=Tensor(TensorName("classifier.bias"), f"{source}.bias", (outputs,)) if bias else None,
        )

    def pool(
        self,
        source: str,
        *,
        activation: PoolingActivation,
        bias: bool = True,
        norm: str | None = None,
        norm_bias: bool = True,
    ) -> None:
        """The linear layer `source` [hidden_size, hidden_size] that classifiers have before their last one.

        norm: a layer norm behind its activation, which has a bias if `norm_bias`; None: there is none.
        """
        size = self.config.hidden_size

        def vector(name: str, source: str) -> Tensor:
            return Tensor(TensorName(f"pooler.{name}"), source, (size,))

        self.pooler = PoolingLayer(
            weight=Tensor(TensorName("pooler.weight"), f"{source}.weight", (size, size)),
            bias=vector("bias", f"{source}.bias") if bias else None,
            activation=activation,
            norm=None if norm is None else vector("norm.weight", f"{norm}.weight"),
            norm_bias=None if norm is None or not norm_bias else vector("norm.bias", f"{norm}.bias"),
            epsilon=self.config.norm_epsilon,
        )

    def leave_aside(self, source: str) -> None:
        """The linear layer `source` is read by nothing that is served: what adapters make of it does not count."""
        self.left_aside.add(source)

    @property
    def pooling_layers(self) -> list[PoolingLayer]:
        """All that is done to pooled hidden states, outside the program."""
        return [layer for layer in (self.pooler, self.classes) if layer is not None]

    @property
    def _scope(self) -> str:
        return "/".join(self._scopes)

    @property
    def _attention_shape(self) -> AttentionShape:
        config = self.config
        return AttentionShape(
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_size,
        )

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

    def _linear(
        self,
        x: Value,
        weights: tuple[LinearWeight, ...],
        activation: Activation | None,
        add_to: Value | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        threshold: float = 0.0,
    ) -> Value:
        width = weights[0].outputs if activation is not None else sum(weight.outputs for weight in weights)
        output = self._value("linear" if add_to is None else "sum", width, x.rows)
        self.ops.append(
            Linear(
                scope=self._scope,
                input=self._read(x),
                output=output,
                weights=weights,
                layer=self._adapted_layer,
                activation=activation,
                threshold=threshold,
                add_to=None if add_to is None else self._overwrite(add_to),
                scale=scale,
                softcap=softcap,
            )
        )
        return output
