"""LFM 2, with experts or without: most layers have a short convolution between two gates, the others attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ..._core import RouterScores
from ...common.json_fields import JsonFields, describe, is_integer
from ..checkpoint.activation import Activation
from ..checkpoint.stacked_experts import StackedExperts
from ..network.network import Network
from ..network.operands import RotaryTable, Routing, Value
from ..network.weights import Split, whole
from .decoder import MODEL, qkv_parts
from .family import FULL_ATTENTION, Features, ModelFamily
from .mixture import ROUTER_FIELDS, ExpertNames, MixtureConfig, add_experts, number_of_experts
from .recurrent import RecurrentConfig

_CONVOLUTION: Final = "conv"
_EXPERT_NAMES: Final = ExpertNames(gate="w1", up="w3", down="w2")
_INNER: Final = "feed_forward_size"
"""Name for the width of MLPs, which follows from several fields."""


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(RecurrentConfig):
    """Fields of LFM 2, in addition to Llama's."""

    conv_layers: tuple[int, ...] = (0,)
    """Layers with a convolution instead of attention."""
    conv_kernel_dim: int = 2
    """Number of tokens that an output of the convolution depends on."""
    conv_bias: bool = False
    """True if the convolution and the linear layers around it have biases."""

    @property
    def has_states(self) -> bool:
        """True if sequences keep states in addition to keys and values."""
        return bool(self.conv_layers)

    @property
    def divided_sizes(self) -> tuple[str, ...]:
        """Fields that tp_size must divide."""
        return (*super().divided_sizes, "hidden_size") if self.has_states else super().divided_sizes

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        return super().inconsistencies() + self.layer_inconsistencies("conv_layers", self.conv_layers)


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config, MixtureConfig):
    """Fields of LFM 2 with experts."""

    moe_scale: float = 1.0
    """Factor of the experts' weights."""
    has_expert_bias: bool = True
    """True if a bias is added to the scores that choose experts."""

    def routing_of(self, net: Network, block: str) -> Routing:
        """Returns the routing of a layer. transformers adds 1e-6 to the sum of a token's scores; this is left out."""
        bias = None
        if self.has_expert_bias:
            bias = net.float32_vector(f"{block}.expert_bias", "mlp.router.expert_bias", self.moe_num_experts)
        return replace(self.routing(RouterScores.SIGMOID), scale=self.moe_scale, bias=bias)


def _read_moe_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    dense = fields.integer("num_dense_layers", minimum=0, default=2)
    return {
        **_read_features(fields, num_hidden_layers),
        "moe_num_experts": number_of_experts(fields, "num_experts"),
        "moe_top_k": fields.integer("num_experts_per_tok", default=4),
        "moe_intermediate_size": fields.integer("moe_intermediate_size", default=1792),
        "moe_normalised": fields.boolean("norm_topk_prob", default=True),
        "moe_scale": fields.number("routed_scaling_factor", above=True, default=1.0),
        "has_expert_bias": fields.boolean("use_expert_bias", default=True),
        "dense_layers": tuple(range(min(dense, num_hidden_layers))),
    }


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        "qk_layernorm": True,
        "conv_layers": _convolution_layers(fields, num_hidden_layers),
        "conv_kernel_dim": fields.integer("conv_L_cache", default=3),
        "conv_bias": fields.boolean("conv_bias", default=False),
    }


def _convolution_layers(fields: JsonFields, num_hidden_layers: int) -> tuple[int, ...]:
    """Reads layer_types, or full_attn_idxs; without both, all layers have attention."""
    kinds, attention = fields.raw("layer_types"), fields.raw("full_attn_idxs")
    layers = range(num_hidden_layers)
    if kinds is None:
        attended = layers if attention is None else fields.integers("full_attn_idxs", minimum=0)
        return tuple(layer for layer in layers if layer not in attended)
    if (
        isinstance(kinds, list)
        and len(kinds) == num_hidden_layers
        and all(kind in (_CONVOLUTION, FULL_ATTENTION) for kind in kinds)
    ):
        return tuple(layer for layer in layers if kinds[layer] == _CONVOLUTION)
    fields.problem(
        "layer_types", f"is {describe(kinds)}; expected {num_hidden_layers} times {_CONVOLUTION} or {FULL_ATTENTION}"
    )
    return ()


def _fill_in_tied(fields: JsonFields) -> Mapping[str, Any]:
    """Adds tie_word_embeddings from its other name."""
    if (tied := fields.raw("tie_embedding")) is None:
        return {}
    if "tie_word_embeddings" in fields and fields.raw("tie_word_embeddings") != tied:
        fields.problem("tie_embedding", f"is {describe(tied)}, but tie_word_embeddings is not")
    return {"tie_word_embeddings": tied}


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    """Adds the width of MLPs too."""
    found = _fill_in_tied(fields)
    size = fields.raw("block_ff_dim")
    if size is None:
        size = fields.raw("intermediate_size")
    fields.discard(("intermediate_size",))
    multiple = fields.integer("block_multiple_of", default=256)
    factor = fields.optional_number("block_ffn_dim_multiplier", above=True)
    if "block_ffn_dim_multiplier" not in fields:
        factor = 1.0
    if fields.boolean("block_auto_adjust_ff_dim", default=True) and is_integer(size):
        size = 2 * size // 3
        if factor is not None:
            size = -(-int(factor * size) // multiple) * multiple
    return found if size is None else {**found, _INNER: size}


def _attention(net: Network, c: Lfm2Config, h: Value, x: Value, prefix: str, rotary: RotaryTable) -> Value:
    qkv = net.linear(h, "attention.qkv", qkv_parts(c, prefix), split=Split.COLUMN)
    attended = net.attention(
        qkv,
        rotary,
        query_norm=net.head_norm(f"{prefix}.q_layernorm", "attention.q_layernorm"),
        key_norm=net.head_norm(f"{prefix}.k_layernorm", "attention.k_layernorm"),
    )
    dense = whole(f"{prefix}.out_proj", "attn_dense", c.hidden_size)
    return net.linear(attended, "attention.dense", [dense], split=Split.ROW, add_to=x)


def _convolution(net: Network, c: Lfm2Config, h: Value, x: Value, prefix: str) -> Value:
    gates = whole(f"{prefix}.in_proj", "conv_in", 3 * c.hidden_size)
    gates = replace(gates, sections=((c.hidden_size, c.hidden_size),) * 3)
    made = net.linear(h, "conv.in_proj", [gates], split=Split.COLUMN, bias=c.conv_bias)
    made = net.gated_convolution(made, f"{prefix}.conv", "conv.conv1d", taps=c.conv_kernel_dim, bias=c.conv_bias)
    dense = whole(f"{prefix}.out_proj", "conv_out", c.hidden_size)
    return net.linear(made, "conv.out_proj", [dense], split=Split.ROW, bias=c.conv_bias, add_to=x)


def _mlp(net: Network, c: Lfm2Config, layer: int, h: Value, x: Value, block: str) -> Value:
    if isinstance(c, Lfm2MoeConfig) and layer not in c.dense_layers:
        return add_experts(net, c, h, x, block, c.routing_of(net, block), _EXPERT_NAMES)
    gate = net.weight(h, "mlp.fc", [whole(f"{block}.w1", "mlp_h_to_4h", c.intermediate_size)])
    up = net.weight(h, "mlp.gate", [whole(f"{block}.w3", "mlp_gate", c.intermediate_size)])
    made = net.gated(h, gate, up, Activation.SILU)
    down = whole(f"{block}.w2", "mlp_4h_to_h", c.hidden_size)
    return net.linear(made, "mlp.proj", [down], split=Split.ROW, add_to=x)


def _declare(net: Network, c: Lfm2Config) -> None:
    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("attention"):
            h = net.rms_norm(x, f"{p}.operator_norm", "input_layernorm")
            if layer in c.conv_layers:
                x = _convolution(net, c, h, x, f"{p}.conv")
            else:
                x = _attention(net, c, h, x, f"{p}.self_attn", rotary)
        with net.scope("mlp"):
            h = net.rms_norm(x, f"{p}.ffn_norm", "post_layernorm")
            x = _mlp(net, c, layer, h, x, f"{p}.feed_forward")
    with net.scope("head"):
        h = net.rms_norm(x, f"{MODEL}.embedding_norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens")


LFM2 = ModelFamily(
    architecture="Lfm2ForCausalLM",
    config_class=Lfm2Config,
    read_features=_read_features,
    declare=_declare,
    field_names={"rms_norm_eps": "norm_eps", "intermediate_size": _INNER},
    optional_fields=frozenset({"head_dim"}),
    fill_in=_fill_in,
    default_rope_theta=1000000.0,
    tied_by_default=True,
    # Fields that transformers does not read, and of initialisation.
    harmless_fields=frozenset(
        """
        block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init
        conv_dim conv_dim_out conv_use_xavier_init
        """.split()
    ),
    neutral_fields={"attention_bias": False, "mlp_bias": False, "use_pos_enc": True},
)

LFM2_MOE = replace(
    LFM2,
    architecture="Lfm2MoeForCausalLM",
    config_class=Lfm2MoeConfig,
    read_features=_read_moe_features,
    field_names={"rms_norm_eps": "norm_eps"},
    fill_in=_fill_in_tied,
    harmless_fields=LFM2.harmless_fields | ROUTER_FIELDS,
    stacked_experts=StackedExperts(
        {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}, alternates=False, inputs_first=False
    ),
)
