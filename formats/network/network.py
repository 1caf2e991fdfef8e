"""A network as a family declares it, op by op."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from ..._core import PoolingActivation, RowKind
from ..checkpoint.activation import Activation
from ..checkpoint.config import CheckpointConfig
from ..checkpoint.pooling import ACTIVATIONS, DenseLayer
from ..checkpoint.stacked_experts import StackedExperts
from ..checkpoint.tensor_names import EMBEDDING, LM_HEAD, LM_HEAD_MODULE
from .declared_latent import DeclaredLatent
from .operands import Routing, Value
from .ops import (
    AddGivenColumns,
    Cast,
    Embedding,
    Experts,
    GatedAdd,
    GatedColumns,
    JoinColumns,
    JoinNeighbours,
    LayerNorm,
    Linear,
    Op,
    PatchEmbedding,
    PoolingLayer,
    RmsNorm,
    Scale,
)
from .weights import LinearWeight, Part, Split, Tensor, TensorName, whole


class Network(DeclaredLatent):
    """The ops of a network in the order of execution.

    Tensor names are those of the Hugging Face model (`source`) and of checkpoints (`name`, relative to the decoder
    layer inside of one).
    """

    def __init__(
        self,
        config: CheckpointConfig,
        older_names: Mapping[str, str] | None = None,
        inner_names: Mapping[str, str] | None = None,
        stacked_experts: StackedExperts | None = None,
        older_endings: Mapping[str, str] | None = None,
        fused_layers: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Starts without ops.

        older_names: beginnings of `source` in older layouts of the Hugging Face model, with the current ones.
        inner_names: parts of paths in files, with transformers' names in a loaded model.
        stacked_experts: parameters that hold linear layers of all experts in the Hugging Face model.
        older_endings: older ends of tensor names, with the current ones.
        fused_layers: linear layers of files that hold several layers of the model, by the end of their path.
        """
        super().__init__(config)
        self.older_names: Final[Mapping[str, str]] = older_names or {}
        self.inner_names: Final[Mapping[str, str]] = inner_names or {}
        self.stacked_experts: Final = stacked_experts
        self.older_endings: Final[Mapping[str, str]] = older_endings or {}
        self.fused_layers: Final[Mapping[str, tuple[str, ...]]] = fused_layers or {}
        self._num_biased_norms = 0
        self.hidden: Value | None = None
        """Hidden states after the final norm, which lm_head reads."""
        self.logits: Value | None = None
        """None without an lm_head."""
        self.pooler: PoolingLayer | None = None
        """Layer before the last one of some classifiers, on pooled hidden states."""
        self.classes: PoolingLayer | None = None
        """A classifier's last layer: one output per class."""
        self.embedding_layers: tuple[PoolingLayer, ...] = tuple(
            _embedding_layer(number, layer)
            for number, layer in enumerate(config.embedding_pooling.dense if config.embedding_pooling else ())
        )
        """Layers on pooled hidden states that make a text's embedding."""
        self.unused_tensors: Final[set[str]] = set()
        """Names of tensors that the Hugging Face model may have and does not use."""
        self.patches: PatchEmbedding | None = None
        """Input of a vision tower; None for other networks."""
        self.ignored: Final[set[str]] = set()
        """Linear layers that the Hugging Face model may have and AdaptRT does not use."""
        self.elsewhere: Final[set[str]] = set()
        """Paths of the Hugging Face model below which another network uses adapters: a vision tower, or its text."""
        self.encoder_output: Value | None = None
        """Output of the encoder, if there is one: float32, or the dtype that linear layers read."""

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
        adapted: bool = True,
        num_later_elements: int = 0,
        num_coordinates: int = 0,
    ) -> Value:
        """Declares the residual stream: rows of `source`.weight [vocab_size, hidden_size] * `scale`, in float32.

        inputs_embeds_scale: factor for embeddings that the Hugging Face model gets in place of tokens. It may differ
            from `scale`: some models use such embeddings unchanged.
        types: adds the rows of `types`.weight [num_types, hidden_size], for models with token types.
        positions: adds the rows of `positions`.weight [rows_before + max_position_embeddings, hidden_size], for models
            with learned positions.
        adapted: False if adapters do not act on the table.
        num_later_elements, num_coordinates: number of elements of rows that are given in place of tokens, after the
            first hidden_size: those of add_given_columns(), then coordinates.
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
                    as_linear=as_linear if adapted and not config.num_encoder_layers else None,
                    num_later_elements=num_later_elements,
                    num_coordinates=num_coordinates,
                )
            )
        return output

    def second_embedding(self, source: str, name: str, width: int, scale: float) -> Value:
        """Declares rows of another table, `source`.weight [vocab_size, width], times `scale`, in float32.

        Adapters do not act on it. A network that has one takes no embeddings in place of tokens.
        """
        output = self._value("embedded", width, self._rows)
        self.ops.append(
            Embedding(
                scope=self._scope,
                output=output,
                table=Tensor(self._name(f"{name}.weight"), f"{source}.weight", (self.config.vocab_size, width)),
                scale=scale,
                inputs_embeds_scale=1.0,
                positions=None,
                types=None,
                as_linear=None,
            )
        )
        return output

    def rms_norm(
        self,
        x: Value,
        source: str,
        name: str,
        *,
        plus_one: bool = False,
        logit_rows: bool = False,
        add_to: Value | None = None,
        epsilon: float | None = None,
        weight: str = "weight",
        num_groups: int = 1,
        is_stream: bool = False,
        sum_scale: Tensor | float | None = None,
    ) -> Value:
        """Declares an RMS norm of `x`, in the dtype that linear layers read.

        logit_rows: True computes only the rows of logits.
        plus_one: True if the model stores its weight as the difference from one.
        add_to: the result is added to this value.
        epsilon: None: the config's.
        weight: last name of the weight.
        num_groups: number of equal groups of a row, each of which has its own mean and the same weight.
        is_stream: True makes a residual stream in float32.
        sum_scale: factor of the sum, if the result is added; None: 1.
        """
        output = self._value("normed" if add_to is None else "sum", x.width, RowKind.LOGITS if logit_rows else x.rows)
        self.ops.append(
            RmsNorm(
                scope=self._scope,
                input=self._read(x),
                output=output,
                weight=self._vector(source, f"{name}.{weight}", x.width // num_groups, plus_one=plus_one),
                epsilon=self.config.norm_epsilon if epsilon is None else epsilon,
                gather_logit_rows=logit_rows,
                add_to=None if add_to is None else self._overwrite(add_to),
                is_stream=is_stream,
                sum_scale=sum_scale,
            )
        )
        return output

    def layer_norm(
        self,
        x: Value,
        source: str | None,
        name: str,
        *,
        bias: bool = True,
        plus_one: bool = False,
        logit_rows: bool = False,
        is_stream: bool = False,
    ) -> Value:
        """Declares a layer norm of `x`, in the dtype that linear layers read.

        source: None: there is neither a weight nor a bias.
        plus_one: True if the model stores its weight as the difference from one.
        is_stream: True makes a residual stream in float32; linear layers read it through cast().
        """
        output = self._value("normed", x.width, RowKind.LOGITS if logit_rows else x.rows)
        self.ops.append(
            LayerNorm(
                scope=self._scope,
                input=self._read(x),
                output=output,
                weight=None if source is None else self._vector(source, f"{name}.weight", x.width, plus_one=plus_one),
                bias=None if source is None or not bias else self._vector(source, f"{name}.bias", x.width),
                epsilon=self.config.norm_epsilon,
                gather_logit_rows=logit_rows,
                is_stream=is_stream,
                number=self._num_biased_norms if bias and source is not None else None,
            )
        )
        self._num_biased_norms += bias and source is not None
        return output

    def scaled(self, x: Value, factor: float = 1.0, *, logit_rows: bool = False, is_stream: bool = False) -> Value:
        """Declares `factor` times `x`, which is float32, in the dtype that linear layers read.

        logit_rows: True computes only the rows of logits: the end of a network without a last norm.
        is_stream: True keeps float32.
        """
        return self._scaled(x, ((x.width, factor),), RowKind.LOGITS if logit_rows else x.rows, is_stream=is_stream)

    def scaled_columns(self, x: Value, factors: Sequence[tuple[int, float]]) -> Value:
        """Declares `x`, which is float32, times a factor for each column, in float32.

        factors: numbers of neighbouring columns, x.width together, with their factor.
        """
        return self._scaled(x, tuple(factors), x.rows, is_stream=True)

    def _scaled(self, x: Value, factors: tuple[tuple[int, float], ...], rows: RowKind, *, is_stream: bool) -> Value:
        output = self._value("scaled", x.width, rows)
        self.ops.append(
            Scale(
                scope=self._scope,
                input=self._read(x),
                output=output,
                factors=factors,
                gather_logit_rows=rows is not x.rows,
                is_stream=is_stream,
            )
        )
        return output

    def add_given_columns(self, x: Value, first_column: int) -> Value:
        """Declares `x` plus the columns from `first_column` on of the rows that are given in place of tokens."""
        output = self._value("sum", x.width, x.rows)
        add_to = self._overwrite(x)
        self.ops.append(AddGivenColumns(scope=self._scope, output=output, add_to=add_to, first_column=first_column))
        return output

    def join_neighbours(self, x: Value, count: int, *, is_stream: bool = False) -> Value:
        """Declares the columns of `count` neighbouring rows of `x`, as an input of linear layers.

        is_stream: True if `x` is in float32; the output is too.
        """
        output = self._value("joined", x.width * count, x.rows)
        read = self._read(x)
        self.ops.append(JoinNeighbours(scope=self._scope, input=read, output=output, count=count, is_stream=is_stream))
        return output

    def join_columns(self, inputs: Sequence[Value]) -> Value:
        """Declares the columns of all inputs, for the rows of logits: the end of a network without a last norm."""
        output = self._value("hidden", sum(value.width for value in inputs), RowKind.LOGITS)
        read = tuple(self._read(self.cast(value)) for value in inputs)
        self.ops.append(JoinColumns(scope=self._scope, inputs=read, output=output))
        return output

    def cast(self, x: Value) -> Value:
        """Declares a cast of `x` to the dtype that linear layers read."""
        output = self._value("cast", x.width, x.rows)
        self.ops.append(Cast(scope=self._scope, input=self._read(x), output=output))
        return output

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
        adapted_layer: int | None = None,
    ) -> Value:
        """Declares a linear layer over `x`, times `scale`; with `add_to` its result is added to that value.

        quantized: True if quantised checkpoints quantise it.
        adapted_layer: number of the layer for adapters; None: the layer in which this is declared.
        """
        weight = self.weight(x, name, parts, split=split, bias=bias, quantized=quantized)
        return self._linear(x, (weight,), activation, add_to, scale, adapted_layer=adapted_layer)

    def gated(
        self,
        x: Value,
        gate: LinearWeight,
        up: LinearWeight,
        activation: Activation,
        threshold: float = 0.0,
        gate_scale: float = 1.0,
    ) -> Value:
        """Declares activation(`gate_scale` * x gate^T) * (x up^T). For a ReLU, gates up to `threshold` count as 0."""
        return self._linear(x, (gate, up), activation, threshold=threshold, scale=gate_scale)

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
        head: int | None = None,
    ) -> LinearWeight:
        """Returns the weight of a linear layer over `x`, or over `x` inputs.

        expert, head: index of the expert or of the head of attention that it belongs to; None: to none.
        """
        inputs = x if isinstance(x, int) else x.width
        full_name = self._name(name)
        return LinearWeight(
            name=full_name,
            parts=tuple(parts),
            inputs=inputs,
            split=split,
            bias=bias,
            quantized=quantized and str(full_name) not in _excluded_modules(self.config),
            expert=expert,
            head=head,
        )

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
        add_to: Value | None,
    ) -> Value:
        """Declares `add_to` plus the weighted outputs of the experts that the router chooses for each row of `x`.

        add_to: None: only the sum of these outputs.
        """
        assert self._layer is not None
        output = self._value("sum", down[0].outputs)
        self.ops.append(
            Experts(
                scope=self._scope,
                layer=self._layer,
                input=self._read(x),
                router_logits=self._read(router_logits),
                output=output,
                add_to=None if add_to is None else self._overwrite(add_to),
                routing=routing,
                activation=activation,
                gate=tuple(gate),
                up=tuple(up),
                down=tuple(down),
            )
        )
        return output

    def gated_add(self, x: Value, gate: Value, add_to: Value) -> Value:
        """Declares `add_to` + sigmoid(`gate`) * `x`."""
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

    def gated_columns(self, gate: Value, values: Value, first_column: int, activation: Activation) -> Value:
        """Declares activation(`gate`) * the columns of `values` from `first_column` on."""
        output = self._value("gated", gate.width, gate.rows)
        self.ops.append(
            GatedColumns(
                scope=self._scope,
                gate=self._read(gate),
                values=self._read(values),
                first_column=first_column,
                output=output,
                activation=activation,
            )
        )
        return output

    def float32_vector(self, source: str, name: str, size: int) -> Tensor:
        """Returns a vector that checkpoints have in float32, whatever their dtype."""
        return Tensor(self._name(name), source, (size,), float32=True)

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
        """Declares the logits: `x` times `source`.weight [vocab_size, hidden_size], or the embedding's if tied.

        They are multiplied by `scale`, then bounded by `softcap`. `row_bias`: a tensor [1, vocab_size] that is added.
        Classifiers have score.weight [labels, hidden_size] instead; those of tokens have `token_classifier`.weight and
        .bias.

        With tensor parallelism adapters do not act on lm_head, because ranks cut it at other places than the slices.
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
            name=_lm_head_name(config),
            parts=(part,),
            inputs=x.width,
            split=Split.COLUMN,
            bias=bias or row_bias is not None,
            row_bias=row_bias,
            tied_to=table if config.share_embedding_table else None,
            quantized=LM_HEAD_MODULE not in _excluded_modules(config),
        )
        self.logits = self._linear(x, (weight,), None, None, scale, softcap)

    def stored_as(self, config: CheckpointConfig) -> Network | None:
        """Returns the same ops for a config that differs only in how weights, keys and values are stored.

        None if the config differs in anything else, or quantises layers that this network's config excludes.
        """
        excluded = _excluded_modules(config)
        if (
            replace(self.config, quantization=config.quantization, int8_kv_cache=config.int8_kv_cache) != config
            or not _excluded_modules(self.config) <= excluded
        ):
            return None

        def stored(weight: LinearWeight) -> LinearWeight:
            return replace(weight, quantized=False) if str(weight.name) in excluded else weight

        def stored_op(op: Op) -> Op:
            if isinstance(op, Linear) and op.output == self.logits:
                quantized = LM_HEAD_MODULE not in excluded
                return replace(op, weights=(replace(op.weights[0], name=_lm_head_name(config), quantized=quantized),))
            if not excluded:
                return op
            if isinstance(op, Linear):
                return replace(op, weights=tuple(map(stored, op.weights)))
            if isinstance(op, Experts):
                gate, up, down = (tuple(map(stored, weights)) for weights in (op.gate, op.up, op.down))
                return replace(op, gate=gate, up=up, down=down)
            return op

        made = copy.copy(self)
        made.config = config
        made.ops = list(map(stored_op, self.ops))
        return made

    def classifier(self, source: str, inputs: int, *, bias: bool) -> None:
        """Declares a classifier's last linear layer, over pooled hidden states."""
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
        """Declares the linear layer `source` [hidden_size, hidden_size] before a classifier's last layer.

        norm: layer norm after its activation, with a bias if `norm_bias`; None: no norm.
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

    def project(self, source: str, *, inputs: int, outputs: int) -> None:
        """Declares the linear layer `source` [outputs, inputs] that turns a tower's rows into a language model's.

        It runs outside of the program, as poolers do.
        """
        weight = Tensor(TensorName("projection.weight"), f"{source}.weight", (outputs, inputs))
        self.pooler = PoolingLayer(weight=weight)

    def embed_patches(
        self,
        source: str,
        positions: str,
        *,
        channels: int,
        patch_size: int,
        num_positions: int,
        bias: bool = True,
        first: str | None = None,
    ) -> None:
        """Declares the convolution `source` over patches and the table `positions` [num_positions, hidden_size].

        first: tensor [hidden_size] of a row before those of the patches, which has the first position; None: no row.
        """
        size = self.config.hidden_size

        def tensor(name: str, source: str, *shape: int) -> Tensor:
            return Tensor(TensorName(f"patches.{name}"), source, shape)

        self.patches = PatchEmbedding(
            weight=tensor("weight", f"{source}.weight", size, channels, patch_size, patch_size),
            bias=tensor("bias", f"{source}.bias", size) if bias else None,
            positions=tensor("positions", f"{positions}.weight", num_positions, size),
            first=None if first is None else tensor("first", first, size),
        )

    def leave_to_other(self, path: str) -> None:
        """Leaves the part `path` of the Hugging Face model, and the adapters of its layers, to another network."""
        self.elsewhere.add(path)

    def leave_aside(self, source: str) -> None:
        """Ignores the linear layer `source`: AdaptRT does not use it, and changes of adapters to it have no effect."""
        self.ignored.add(source)

    @property
    def given_columns(self) -> tuple[int, int]:
        """Number of elements of rows that are given in place of tokens, after the first hidden_size.

        These are elements that later ops add, and coordinates.
        """
        embedding = next(op for op in self.ops if isinstance(op, Embedding))
        return embedding.num_later_elements, embedding.num_coordinates

    @property
    def outside_layers(self) -> list[PoolingLayer | PatchEmbedding]:
        """Layers outside of the program: on pooled hidden states, and before a vision tower."""
        others = (self.patches, self.pooler, self.classes)
        return [*self.embedding_layers, *(layer for layer in others if layer is not None)]

    def _linear(
        self,
        x: Value,
        weights: tuple[LinearWeight, ...],
        activation: Activation | None,
        add_to: Value | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        threshold: float = 0.0,
        adapted_layer: int | None = None,
    ) -> Value:
        width = weights[0].outputs if activation is not None else sum(weight.outputs for weight in weights)
        output = self._value("linear" if add_to is None else "sum", width, x.rows)
        self.ops.append(
            Linear(
                scope=self._scope,
                input=self._read(x),
                output=output,
                weights=weights,
                layer=self._adapted_layer if adapted_layer is None else adapted_layer,
                activation=activation,
                threshold=threshold,
                add_to=None if add_to is None else self._overwrite(add_to),
                scale=scale,
                softcap=softcap,
            )
        )
        return output


def _embedding_layer(number: int, layer: DenseLayer) -> PoolingLayer:
    name, source = f"embedding_pooling.{number}", f"{layer.path}.linear"
    bias = Tensor(TensorName(f"{name}.bias"), f"{source}.bias", (layer.outputs,))
    return PoolingLayer(
        weight=Tensor(TensorName(f"{name}.weight"), f"{source}.weight", (layer.outputs, layer.inputs)),
        bias=bias if layer.bias else None,
        activation=ACTIVATIONS[layer.activation],
    )


def _lm_head_name(config: CheckpointConfig) -> TensorName:
    return TensorName((EMBEDDING if config.lm_head_is_embedding else LM_HEAD).removesuffix(".weight"))


def _excluded_modules(config: CheckpointConfig) -> frozenset[str]:
    """Names of the linear layers that stay as they are where the others are quantised."""
    return frozenset() if config.quantization is None else frozenset(config.quantization.exclude_modules)
