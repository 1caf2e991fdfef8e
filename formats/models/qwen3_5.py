"""Qwen3.5 and its text in vision-language models, with experts or without, and Qwen3-Next.

Most layers have linear attention: a causal convolution and the gated delta rule, with a state per sequence. The other
layers have attention with an output gate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ...common.json_fields import JsonFields, describe
from ..checkpoint.config import CheckpointConfig
from ..checkpoint.stacked_experts import CONSECUTIVE_EXPERTS
from ..network.network import Network
from ..network.operands import DeltaShape, RotaryTable, Value
from ..network.weights import Part, Split, whole
from .decoder import MODEL, GivenRows, dense_mlp, qkv_parts
from .family import FULL_ATTENTION, Features, ModelFamily, PartialRotaryConfig
from .mixture import (
    ROUTER_FIELDS,
    MixtureConfig,
    add_experts,
    add_shared_expert,
    layers_without_experts,
    number_of_experts,
)
from .qwen_tower import QWEN3_5_TOWER, qwen3_5_tower_fields
from .qwen_vl import QwenVlConfig, image_rows, vision_of
from .recurrent import RecurrentConfig

LINEAR_ATTENTION: Final = "linear_attention"
_VISION_DECODER: Final = "model.language_model"
# Fields of heads that predict several tokens. AdaptRT does not use these heads.
_PREDICTION_FIELDS: Final = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(RecurrentConfig, PartialRotaryConfig):
    """Fields of Qwen3.5, in addition to Llama's."""

    linear_layers: tuple[int, ...] = (0,)
    """Layers with linear attention; the others have attention with an output gate."""
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 2
    linear_key_head_dim: int = 4
    linear_value_head_dim: int = 4
    linear_conv_kernel_dim: int = 2
    """Number of tokens that an output of the convolution depends on."""

    @property
    def has_states(self) -> bool:
        """True if sequences keep states in addition to keys and values."""
        return bool(self.linear_layers)

    @property
    def delta_shape(self) -> DeltaShape:
        """Heads of linear attention."""
        return DeltaShape(
            num_key_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
        )

    @property
    def divided_sizes(self) -> tuple[str, ...]:
        """Fields that tp_size must divide."""
        return (*super().divided_sizes, "linear_num_value_heads") if self.has_states else super().divided_sizes

    @property
    def shared_sizes(self) -> tuple[str, ...]:
        """Fields that tp_size must divide or be a multiple of."""
        return (*super().shared_sizes, "linear_num_key_heads") if self.has_states else super().shared_sizes

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies() + self.layer_inconsistencies("linear_layers", self.linear_layers)
        if self.linear_num_value_heads % self.linear_num_key_heads != 0:
            found.append(
                f"linear_num_value_heads {self.linear_num_value_heads} is not a multiple of linear_num_key_heads "
                f"{self.linear_num_key_heads}"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(Qwen35Config, MixtureConfig):
    """Fields of Qwen3.5 with experts."""


@dataclass(frozen=True, kw_only=True)
class Qwen35VlConfig(QwenVlConfig, Qwen35Config):
    """Fields of Qwen3.5 with a vision tower."""


@dataclass(frozen=True, kw_only=True)
class Qwen35VlMoeConfig(QwenVlConfig, Qwen35MoeConfig):
    """Fields of Qwen3.5 with experts and a vision tower."""


def linear_layers(fields: JsonFields, num_hidden_layers: int) -> tuple[int, ...]:
    """Reads layer_types; by default all but each full_attention_interval-th layer have linear attention."""
    interval = fields.integer("full_attention_interval", default=4)
    kinds = fields.raw("layer_types")
    if kinds is None:
        return tuple(layer for layer in range(num_hidden_layers) if (layer + 1) % interval != 0)
    if (
        isinstance(kinds, list)
        and len(kinds) == num_hidden_layers
        and all(kind in (LINEAR_ATTENTION, FULL_ATTENTION) for kind in kinds)
    ):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR_ATTENTION)
    fields.problem(
        "layer_types",
        f"is {describe(kinds)}; expected {num_hidden_layers} times {LINEAR_ATTENTION} or {FULL_ATTENTION}",
    )
    return ()


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "qk_layernorm": True,
        "linear_layers": linear_layers(fields, num_hidden_layers),
        "linear_num_key_heads": fields.integer("linear_num_key_heads", default=16),
        "linear_num_value_heads": fields.integer("linear_num_value_heads", default=32),
        "linear_key_head_dim": fields.integer("linear_key_head_dim", default=128),
        "linear_value_head_dim": fields.integer("linear_value_head_dim", default=128),
        "linear_conv_kernel_dim": fields.integer("linear_conv_kernel_dim", default=4),
    }


def _read_moe_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        **_read_features(fields, num_hidden_layers),
        "moe_num_experts": number_of_experts(fields, "num_experts"),
        "moe_top_k": fields.integer("num_experts_per_tok"),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "shared_expert_intermediate_size": fields.integer("shared_expert_intermediate_size"),
    }


def _read_next_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        **_read_moe_features(fields, num_hidden_layers),
        **layers_without_experts(fields, num_hidden_layers),
        "moe_normalised": fields.boolean("norm_topk_prob", default=True),
    }


def _gated_qkv_parts(c: CheckpointConfig, prefix: str) -> list[Part]:
    """Returns [q | k | v | gate]. The outputs of q_proj are [q | gate] of each head."""
    query, key, value = qkv_parts(c, prefix)
    size = c.head_size

    def half(module: str, at: int) -> Part:
        rows = tuple(range((2 * head + at) * size, (2 * head + at + 1) * size) for head in range(query.units))
        return replace(query, module=module, rows=rows, source_outputs=2 * query.outputs)

    return [half("attn_q", 0), key, value, half("attn_gate", 1)]


def _linear_parts(c: Qwen35Config, prefix: str) -> tuple[list[Part], list[Part]]:
    """Returns [q | k | v | z] and [b | a] of linear attention, each from a layer of its own, or q, k and v from one."""
    shape = c.delta_shape
    heads = shape.num_value_heads
    qkv = whole(f"{prefix}.in_proj_qkv", "linear_attn_qkv", 2 * shape.key_size + shape.value_size)
    z = whole(f"{prefix}.in_proj_z", "linear_attn_z", shape.value_size, heads)
    b = whole(f"{prefix}.in_proj_b", "linear_attn_b", heads)
    a = whole(f"{prefix}.in_proj_a", "linear_attn_a", heads)
    return [replace(qkv, sections=shape.sections), z], [b, a]


def _fused_linear_parts(c: Qwen35Config, prefix: str) -> tuple[list[Part], list[Part]]:
    """Returns the same from Qwen3-Next's two layers, whose outputs are [q | k | v | z] and [b | a] of each key head."""
    shape = c.delta_shape
    heads = shape.num_value_heads // shape.num_key_heads
    values = heads * shape.value_dim

    def parts(source: str, sizes: tuple[int, ...], modules: dict[str, tuple[int, ...]]) -> list[Part]:
        stride = sum(sizes)

        def rows(piece: int) -> list[range]:
            first = sum(sizes[:piece])
            return [
                range(stride * head + first, stride * head + first + sizes[piece])
                for head in range(shape.num_key_heads)
            ]

        return [
            Part(
                source=f"{prefix}.{source}",
                module=module,
                outputs=shape.num_key_heads * sum(sizes[piece] for piece in pieces),
                units=shape.num_value_heads,
                sections=shape.sections if len(pieces) > 1 else (),
                rows=tuple(piece_rows for piece in pieces for piece_rows in rows(piece)),
                source_outputs=shape.num_key_heads * stride,
            )
            for module, pieces in modules.items()
        ]

    sizes = (shape.key_dim, shape.key_dim, values, values)
    return (
        parts("in_proj_qkvz", sizes, {"linear_attn_qkv": (0, 1, 2), "linear_attn_z": (3,)}),
        parts("in_proj_ba", (heads, heads), {"linear_attn_b": (0,), "linear_attn_a": (1,)}),
    )


LinearParts = Callable[[Qwen35Config, str], tuple[list[Part], list[Part]]]
"""Arguments: the config, and the path of a layer's linear attention."""


def _linear_attention(net: Network, c: Qwen35Config, h: Value, x: Value, prefix: str, parts: LinearParts) -> Value:
    """Declares `x` plus the linear attention of `h`."""
    shape = c.delta_shape
    qkvz_parts, gate_parts = parts(c, prefix)
    qkvz = net.linear(h, "linear_attention.qkvz", qkvz_parts, split=Split.COLUMN)
    # A few outputs that decide how fast states decay: too small to gain from quantisation.
    gates = net.linear(h, "linear_attention.ba", gate_parts, split=Split.COLUMN, quantized=False)
    qkvz = net.causal_convolution(
        qkvz,
        f"{prefix}.conv1d",
        "linear_attention.conv1d",
        width=2 * shape.key_size + shape.value_size,
        taps=c.linear_conv_kernel_dim,
    )
    attended = net.gated_delta(qkvz, gates, shape, prefix, "linear_attention")
    normed = net.gated_rms_norm(attended, qkvz, f"{prefix}.norm", "linear_attention.norm", head_size=shape.value_dim)
    dense = whole(f"{prefix}.out_proj", "linear_attn_dense", c.hidden_size)
    return net.linear(normed, "linear_attention.dense", [dense], split=Split.ROW, add_to=x)


def _gated_attention(net: Network, c: Qwen35Config, h: Value, x: Value, prefix: str, rotary: RotaryTable) -> Value:
    """Declares `x` plus the attention of `h`, multiplied by the sigmoid of its gate."""
    qkv = net.linear(h, "attention.qkv", _gated_qkv_parts(c, prefix), split=Split.COLUMN, bias=c.attn_bias)
    attended = net.attention(
        qkv,
        rotary,
        query_norm=net.head_norm(f"{prefix}.q_norm", "attention.q_layernorm", plus_one=True),
        key_norm=net.head_norm(f"{prefix}.k_norm", "attention.k_layernorm", plus_one=True),
    )
    gated = net.sigmoid_gate(attended, qkv)
    dense = whole(f"{prefix}.o_proj", "attn_dense", c.hidden_size)
    return net.linear(gated, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias, add_to=x)


def _mlp(net: Network, c: Qwen35Config, layer: int, h: Value, x: Value, block: str) -> Value:
    if not isinstance(c, MixtureConfig) or layer in c.dense_layers:
        return dense_mlp(net, c, h, x, block)
    x = add_experts(net, c, h, x, block, c.routing())
    inner = c.shared_expert_intermediate_size or c.moe_intermediate_size
    return add_shared_expert(net, h, x, f"{block}.shared_expert", inner, f"{block}.shared_expert_gate")


def _declare(
    net: Network,
    c: Qwen35Config,
    *,
    decoder: str = MODEL,
    parts: LinearParts = _linear_parts,
    given: GivenRows | None = None,
) -> None:
    given = given or GivenRows()
    x = net.embedding(f"{decoder}.embed_tokens", num_coordinates=given.num_coordinates)
    rotary = net.rotary(columns=given.columns(c.hidden_size))
    for layer in net.layers():
        p = f"{decoder}.layers.{layer}"
        with net.scope("attention"):
            h = net.rms_norm(x, f"{p}.input_layernorm", "input_layernorm", plus_one=True)
            if layer in c.linear_layers:
                x = _linear_attention(net, c, h, x, f"{p}.linear_attn", parts)
            else:
                x = _gated_attention(net, c, h, x, f"{p}.self_attn", rotary)
        with net.scope("mlp"):
            h = net.rms_norm(x, f"{p}.post_attention_layernorm", "post_layernorm", plus_one=True)
            x = _mlp(net, c, layer, h, x, f"{p}.mlp")
    with net.scope("head"):
        h = net.rms_norm(x, f"{decoder}.norm", "transformer.ln_f", plus_one=True, logit_rows=True)
        net.lm_head(h, "lm_head", f"{decoder}.embed_tokens")


def _declare_vision(net: Network, c: Qwen35VlConfig) -> None:
    _declare(net, c, decoder=_VISION_DECODER, given=image_rows(net, c))


_TEXT_NAMES: Final = {f"{MODEL}.{name}.": f"{_VISION_DECODER}.{name}." for name in ("embed_tokens", "layers", "norm")}
"""Names of the text alone, which its adapters have."""


def _in_vision_model(
    text: ModelFamily, architecture: str, model_type: str, config_class: type[CheckpointConfig]
) -> ModelFamily:
    """Returns the family of a vision-language model with this text."""
    return replace(
        text,
        architecture=architecture,
        config_class=config_class,
        declare=_declare_vision,
        older_names=_TEXT_NAMES,
        vision=vision_of(model_type, QWEN3_5_TOWER, qwen3_5_tower_fields),
    )


QWEN3_5 = ModelFamily(
    architecture="Qwen3_5ForCausalLM",
    config_class=Qwen35Config,
    read_features=_read_features,
    declare=_declare,
    prediction_tensors=r"mtp\..+",
    # Names in vision-language models, from which transformers loads the text alone too.
    older_names={f"{_VISION_DECODER}.": f"{MODEL}."},
    harmless_fields=_PREDICTION_FIELDS,
    neutral_fields={"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mlp_bias": False, "mlp_only_layers": []},
    partial_rotary_factor=0.25,
    mrope=True,
)
QWEN3_5_VISION = _in_vision_model(QWEN3_5, "Qwen3_5ForConditionalGeneration", "qwen3_5", Qwen35VlConfig)

QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    config_class=Qwen35MoeConfig,
    read_features=_read_moe_features,
    optional_fields=frozenset({"intermediate_size"}),
    harmless_fields=_PREDICTION_FIELDS | ROUTER_FIELDS,
    stacked_experts=CONSECUTIVE_EXPERTS,
)

QWEN3_5_MOE_VISION = _in_vision_model(
    QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", Qwen35VlMoeConfig
)

QWEN3_NEXT = replace(
    QWEN3_5,
    architecture="Qwen3NextForCausalLM",
    config_class=Qwen35MoeConfig,
    read_features=_read_next_features,
    declare=partial(_declare, parts=_fused_linear_parts),
    older_names={},
    harmless_fields=_PREDICTION_FIELDS | ROUTER_FIELDS,
    stacked_experts=CONSECUTIVE_EXPERTS,
    mrope=False,
)
