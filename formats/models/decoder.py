"""Layers that many families share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ..checkpoint.activation import Activation
from ..checkpoint.config import ROPE_INTERLEAVED, CheckpointConfig
from ..network.network import Network
from ..network.operands import QueryScaling, RotaryTable, Value
from ..network.weights import Part, Split, stacked, whole

MODEL = "model"
"""Path of the decoder in a ...ForCausalLM."""


def qkv_parts(c: CheckpointConfig, prefix: str) -> tuple[Part, ...]:
    """Returns q_proj, k_proj and v_proj of `prefix`."""
    heads, kv_heads, size = c.num_attention_heads, c.num_key_value_heads, c.head_size
    return (
        whole(f"{prefix}.q_proj", "attn_q", heads * size, heads),
        whole(f"{prefix}.k_proj", "attn_k", kv_heads * size, kv_heads),
        whole(f"{prefix}.v_proj", "attn_v", kv_heads * size, kv_heads),
    )


def gate_and_up(c: CheckpointConfig, source: str) -> tuple[Part, Part]:
    """Returns the two halves of a layer that stacks the outputs of gate and up, gate first."""
    gate, up = stacked(
        source,
        [
            ("mlp_h_to_4h", c.intermediate_size, c.intermediate_size),
            ("mlp_gate", c.intermediate_size, c.intermediate_size),
        ],
    )
    return gate, up


def fused_gated_mlp(net: Network, c: CheckpointConfig, x: Value, source: str, activation: Activation) -> Value:
    """Declares activation(gate) * up, from one linear layer `source` that computes both."""
    gate, up = gate_and_up(c, source)
    first, second = (
        net.weight(x, name, [part], bias=c.mlp_bias) for name, part in (("mlp.fc", gate), ("mlp.gate", up))
    )
    return net.gated(x, first, second, activation)


def gated_mlp(
    net: Network, c: CheckpointConfig, x: Value, prefix: str, activation: Activation, gate_scale: float = 1.0
) -> Value:
    """Declares activation(`gate_scale` * gate_proj(x)) * up_proj(x), the input of down_proj."""
    gate, up = (
        net.weight(x, name, [whole(f"{prefix}.{source}", module, c.intermediate_size)], bias=c.mlp_bias)
        for name, source, module in (("mlp.fc", "gate_proj", "mlp_h_to_4h"), ("mlp.gate", "up_proj", "mlp_gate"))
    )
    return net.gated(x, gate, up, activation, c.relu_threshold, gate_scale)


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Factors that some families apply and Llama does not."""

    embedding: float = 1.0
    inputs_embeds: float = 1.0
    """Factor of embeddings that the model gets in place of tokens."""
    residual: float = 1.0
    scores: float | None = None
    """None: 1 / sqrt(head_size)."""
    logits: float = 1.0


def dense_mlp(
    net: Network, c: CheckpointConfig, h: Value, x: Value, prefix: str, scale: float = 1.0, gate_scale: float = 1.0
) -> Value:
    """Declares `x` plus `scale` times the output of the MLP `prefix` for `h`; its gate is multiplied too."""
    made = gated_mlp(net, c, h, prefix, Activation(c.hidden_act), gate_scale)
    down = whole(f"{prefix}.down_proj", "mlp_4h_to_h", c.hidden_size)
    return net.linear(made, "mlp.proj", [down], split=Split.ROW, bias=c.mlp_bias, add_to=x, scale=scale)


def plain_mlp(
    net: Network,
    c: CheckpointConfig,
    h: Value,
    x: Value,
    prefix: str,
    names: tuple[str, str] = ("up_proj", "down_proj"),
) -> Value:
    """Declares `x` plus the output of the MLP `prefix` for `h`, which has two linear layers and no gate."""
    up = whole(f"{prefix}.{names[0]}", "mlp_h_to_4h", c.intermediate_size)
    activation = Activation(c.hidden_act)
    made = net.linear(h, "mlp.fc", [up], split=Split.COLUMN, bias=c.mlp_bias, activation=activation)
    down = whole(f"{prefix}.{names[1]}", "mlp_4h_to_h", c.hidden_size)
    return net.linear(made, "mlp.proj", [down], split=Split.ROW, bias=c.mlp_bias, add_to=x)


@dataclass(frozen=True, kw_only=True)
class GivenRows:
    """Elements of rows that are given in place of tokens, after the first hidden_size."""

    num_layers: int = 0
    """Number of first layers after which hidden_size elements of such a row are added."""
    num_coordinates: int = 0
    axes: tuple[int, ...] = ()
    """For each pair of a head: the number of the coordinate with its rotary position."""

    def columns(self, hidden_size: int) -> tuple[int, ...]:
        """Returns the columns with the rotary positions of pairs."""
        return tuple((1 + self.num_layers) * hidden_size + axis for axis in self.axes)


Mlp = Callable[[int, Value, Value], Value]
"""Arguments: a layer's number, its normalised rows, and the residual stream, to which it adds."""


def _rotary_tables(
    net: Network, c: CheckpointConfig, bases: Sequence[float], columns: Sequence[int]
) -> list[RotaryTable]:
    """Declares the rotation of each layer; layers with the same base share a table."""
    tables: dict[float, RotaryTable] = {}
    for base in sorted(set(bases), reverse=True):
        if base == 0.0:
            tables[base] = net.no_rotation()
        elif base == c.rotary_base:
            tables[base] = net.rotary(columns=columns)
        else:
            tables[base] = net.rotary(base=base, scaling=c.rotary_scaling, scope=f"rotary_{len(tables)}")
    return [tables[base] for base in bases]


def declare_llama_like(
    net: Network,
    c: CheckpointConfig,
    factors: Multipliers | None = None,
    unrotated: Collection[int] = (),
    decoder: str = MODEL,
    *,
    plus_one: bool = False,
    mlp: Mlp | None = None,
    norms_of_all_heads: bool = False,
    mixers: Mapping[int, Mlp] | None = None,
    layer_norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    last_norm: str = "norm",
    norm_names: tuple[str, str] = ("q_norm", "k_norm"),
    norms_after_rotation: bool = False,
    sinks: bool = False,
    bases: Sequence[float] = (),
    query_scaling: QueryScaling | None = None,
    given: GivenRows | None = None,
) -> None:
    """Declares Llama's network, or that of a family that differs only in CheckpointConfig and in these arguments.

    unrotated: layers whose attention does not depend on positions.
    decoder: path of the decoder in the Hugging Face model.
    plus_one: True if the model stores norm weights as differences from one.
    mlp: replaces Llama's MLP.
    norms_of_all_heads: True normalises q and k over all heads together, if they are normalised.
    mixers: replace attention, by the number of the layer.
    layer_norms: names of the norms before attention and MLP.
    last_norm: name of the norm before lm_head.
    norm_names: names of the norms of q and k.
    norms_after_rotation: True normalises heads after their rotation.
    sinks: True adds a learned score to each head's softmax.
    bases: rotary base of each layer, 0 for layers whose attention does not depend on positions; (): the config's base.
    query_scaling: scores depend on the position of the query.
    given: rows that are given in place of tokens have more elements than the embedding.
    """
    factors = factors or Multipliers()
    given = given or GivenRows()
    query, key, _ = (part.outputs for part in qkv_parts(c, ""))
    x = net.embedding(
        f"{decoder}.embed_tokens",
        scale=factors.embedding,
        inputs_embeds_scale=factors.inputs_embeds,
        num_later_elements=given.num_layers * c.hidden_size,
        num_coordinates=given.num_coordinates,
    )
    tables = _rotary_tables(
        net,
        c,
        bases or [0.0 if layer in unrotated else c.rotary_base for layer in range(c.num_hidden_layers)],
        given.columns(c.hidden_size),
    )

    def attention(layer: int, h: Value, x: Value) -> Value:
        p = f"{decoder}.layers.{layer}"
        qkv = net.linear(h, "attention.qkv", qkv_parts(c, f"{p}.self_attn"), split=Split.COLUMN, bias=c.attn_bias)
        query_norm = key_norm = None
        if c.qk_layernorm:
            widths = (query, key) if norms_of_all_heads else (None, None)
            query_norm = net.head_norm(f"{p}.self_attn.{norm_names[0]}", "attention.q_layernorm", widths[0])
            key_norm = net.head_norm(f"{p}.self_attn.{norm_names[1]}", "attention.k_layernorm", widths[1])
        attended = net.attention(
            qkv,
            tables[layer],
            window=c.window_of(layer),
            scale=factors.scores,
            query_norm=query_norm,
            key_norm=key_norm,
            interleaved=c.position_embedding_type == ROPE_INTERLEAVED,
            sinks=net.sinks(f"{p}.self_attn.sinks", "attention.sinks") if sinks else None,
            norms_after_rotation=norms_after_rotation,
            query_scaling=query_scaling,
        )
        dense = whole(f"{p}.self_attn.o_proj", "attn_dense", c.hidden_size)
        return net.linear(
            attended,
            "attention.dense",
            [dense],
            split=Split.ROW,
            bias=c.attn_dense_bias,
            add_to=x,
            scale=factors.residual,
        )

    for layer in net.layers():
        p = f"{decoder}.layers.{layer}"
        with net.scope("attention"):
            h = net.rms_norm(x, f"{p}.{layer_norms[0]}", "input_layernorm", plus_one=plus_one)
            x = (mixers or {}).get(layer, attention)(layer, h, x)
        with net.scope("mlp"):
            h = net.rms_norm(x, f"{p}.{layer_norms[1]}", "post_layernorm", plus_one=plus_one)
            x = dense_mlp(net, c, h, x, f"{p}.mlp", factors.residual) if mlp is None else mlp(layer, h, x)
        if layer < given.num_layers:
            x = net.add_given_columns(x, (1 + layer) * c.hidden_size)
    with net.scope("head"):
        h = net.rms_norm(x, f"{decoder}.{last_norm}", "transformer.ln_f", plus_one=plus_one, logit_rows=True)
        net.lm_head(h, "lm_head", f"{decoder}.embed_tokens", scale=factors.logits)


def declare_with_layer_norms(
    net: Network,
    c: CheckpointConfig,
    *,
    mlp_names: tuple[str, str] = ("up_proj", "down_proj"),
    plus_one: bool = False,
) -> None:
    """Declares a network of Llama's shape with layer norms, and MLPs without a gate.

    mlp_names: names of an MLP's two linear layers.
    plus_one: True if the model stores norm weights as differences from one.
    """
    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("attention"):
            h = net.layer_norm(x, f"{p}.input_layernorm", "input_layernorm", plus_one=plus_one)
            qkv = net.linear(h, "attention.qkv", qkv_parts(c, f"{p}.self_attn"), split=Split.COLUMN, bias=c.attn_bias)
            attended = net.attention(qkv, rotary, window=c.window_of(layer))
            dense = whole(f"{p}.self_attn.o_proj", "attn_dense", c.hidden_size)
            x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias, add_to=x)
        with net.scope("mlp"):
            h = net.layer_norm(x, f"{p}.post_attention_layernorm", "post_layernorm", plus_one=plus_one)
            x = plain_mlp(net, c, h, x, f"{p}.mlp", mlp_names)
    with net.scope("head"):
        h = net.layer_norm(x, f"{MODEL}.norm", "transformer.ln_f", plus_one=plus_one, logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens")
