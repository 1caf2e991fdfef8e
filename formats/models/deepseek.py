"""DeepSeek V2 and V3, and Kimi K2, which is V3 in other sizes: latent attention, grouped routing, shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..._core import RouterScores
from ...common.json_fields import JsonFields
from ..checkpoint.config import ROPE_INTERLEAVED
from ..checkpoint.heads_apart import KEYS, VALUES, LayerOfHeads, head_path
from ..checkpoint.rotary import YarnScaling, yarn_mscale
from ..network.network import Network
from ..network.operands import LatentShape, RotaryTable, Value
from ..network.weights import LinearWeight, Split, whole
from .decoder import MODEL, dense_mlp
from .family import Features, ModelFamily
from .mixture import (
    ROUTER_FIELDS,
    GroupedMixtureConfig,
    add_experts,
    add_shared_expert,
    number_of_experts,
)

_KV_B: Final = "kv_b_proj"
# transformers gives the norms of compressed rows this epsilon, whatever the config says.
_EPSILON: Final = 1e-6
# The layer after the last one of DeepSeek V3 predicts more tokens; it forms a draft model.
_PREDICTION_LAYER: Final = r"model\.layers\.61\..*"
# Fields of training and of parallel runs.
_HARMLESS: Final = ROUTER_FIELDS | {
    "aux_loss_alpha",
    "ep_size",
    "head_dim",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "qk_head_dim",
    "seq_aux",
}


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(GroupedMixtureConfig):
    """Fields of latent attention. `head_size` is the number of a head's rotated elements."""

    q_lora_rank: int | None = 4
    """Width of compressed queries; None: queries are not compressed."""
    kv_lora_rank: int = 4
    """Width of compressed keys and values, without the rotated elements."""
    qk_nope_head_dim: int = 4
    """Elements of a head's query and key that are not rotated."""
    v_head_dim: int = 4
    """Elements of a head's value."""

    @property
    def latent_shape(self) -> LatentShape:
        """Sizes of each layer's attention."""
        return LatentShape(
            num_heads=self.num_attention_heads,
            latent_dim=self.kv_lora_rank,
            rotary_dim=self.head_size,
            plain_dim=self.qk_nope_head_dim,
            value_dim=self.v_head_dim,
        )

    @property
    def layer_of_heads(self) -> LayerOfHeads:
        """The layer that makes keys and values of compressed rows."""
        return LayerOfHeads(_KV_B, self.num_attention_heads, self.qk_nope_head_dim, self.v_head_dim)

    def describe_heads(self) -> str:
        """Text for people: 16 heads of 192, latent, with rows of 576."""
        size = self.qk_nope_head_dim + self.head_size
        return f"{self.num_attention_heads} heads of {size}, latent, with rows of {self.latent_shape.key_dim}"

    @property
    def score_scale(self) -> float:
        """Factor of attention's scores, with YaRN's."""
        scale = float((self.qk_nope_head_dim + self.head_size) ** -0.5)
        scaling = self.rotary_scaling
        if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
            scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
        return scale

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        if self.kv_lora_rank % 2 != 0:
            found.append(f"kv_lora_rank {self.kv_lora_rank} is odd; expected an even number")
        if self.num_key_value_heads != self.num_attention_heads:
            found.append(
                f"num_key_value_heads is {self.num_key_value_heads}; expected num_attention_heads "
                f"{self.num_attention_heads}, because all heads share compressed rows"
            )
        if self.int8_kv_cache:
            found.append("kv_cache_quant_algo is INT8; compressed rows are kept in the checkpoint's dtype")
        return found


def _read_common(fields: JsonFields, num_hidden_layers: int, *, dense_layers: int, shared_experts: int) -> Features:
    """Reads the fields of both versions; the integers are transformers' defaults."""
    inner = fields.integer("moe_intermediate_size")
    dense = fields.integer("first_k_dense_replace", minimum=0, default=dense_layers)
    bias = fields.boolean("attention_bias", default=False)
    if "q_lora_rank" not in fields:
        fields.problem("q_lora_rank", "is missing; expected an integer, or null for queries that are not compressed")
    return {
        "attn_bias": bias,
        "attn_dense_bias": bias,
        "q_lora_rank": fields.optional_integer("q_lora_rank"),
        "kv_lora_rank": fields.integer("kv_lora_rank"),
        "qk_nope_head_dim": fields.integer("qk_nope_head_dim"),
        "v_head_dim": fields.integer("v_head_dim"),
        "moe_num_experts": number_of_experts(fields, "n_routed_experts"),
        "moe_top_k": fields.integer("num_experts_per_tok"),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner * fields.integer("n_shared_experts", default=shared_experts),
        "dense_layers": tuple(range(min(dense, num_hidden_layers))),
    }


def _read_v2_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    grouped = fields.string("topk_method", choices=("greedy", "group_limited_greedy"), default="greedy") != "greedy"
    groups, taken = (fields.optional_integer(name) for name in ("n_group", "topk_group"))
    if grouped and (groups is None or taken is None):
        fields.problem("n_group", "or topk_group is missing; topk_method group_limited_greedy needs both")
    return {
        **_read_common(fields, num_hidden_layers, dense_layers=0, shared_experts=2),
        "moe_normalised": False,
        "moe_num_groups": (groups or 1) if grouped else 1,
        "moe_groups_taken": (taken or 1) if grouped else 1,
        "moe_scale": fields.number("routed_scaling_factor", above=True, default=1.0),
    }


def _read_v3_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        **_read_common(fields, num_hidden_layers, dense_layers=3, shared_experts=1),
        "moe_normalised": fields.boolean("norm_topk_prob", default=True),
        "moe_num_groups": fields.integer("n_group", default=8),
        "moe_groups_taken": fields.integer("topk_group", default=4),
        "moe_scale": fields.number("routed_scaling_factor", above=True, default=2.5),
    }


def _queries(net: Network, c: DeepseekConfig, h: Value, prefix: str) -> Value:
    """Declares [plain | rotated] of each head, from compressed queries if there are any."""
    width = c.num_attention_heads * (c.qk_nope_head_dim + c.head_size)
    if c.q_lora_rank is None:
        q = whole(f"{prefix}.q_proj", "attn_q", width, c.num_attention_heads)
        return net.linear(h, "attention.q", [q], split=Split.COLUMN)
    q_a = whole(f"{prefix}.q_a_proj", "attn_q_a", c.q_lora_rank)
    compressed = net.linear(h, "attention.q_a", [q_a], split=Split.NONE, bias=c.attn_bias)
    normed = net.rms_norm(compressed, f"{prefix}.q_a_layernorm", "attention.q_a_layernorm", epsilon=_EPSILON)
    q_b = whole(f"{prefix}.q_b_proj", "attn_q_b", width, c.num_attention_heads)
    return net.linear(normed, "attention.q_b", [q_b], split=Split.COLUMN)


def _weights_of_heads(net: Network, c: DeepseekConfig, prefix: str, kind: str) -> list[LinearWeight]:
    """Returns the keys' or values' weight of each head."""
    module, inputs, outputs = {
        KEYS: ("attn_kv_b_key", c.qk_nope_head_dim, c.kv_lora_rank),
        VALUES: ("attn_kv_b_value", c.kv_lora_rank, c.v_head_dim),
    }[kind]
    # A few numbers for each head, that every token's score depends on: too small to gain from quantisation.
    return [
        net.weight(
            inputs,
            f"attention.kv_b.{head}.{kind}",
            [whole(head_path(f"{prefix}.{_KV_B}", head, kind), module, outputs)],
            split=Split.NONE,
            quantized=False,
            head=head,
        )
        for head in range(c.num_attention_heads)
    ]


def _attention(net: Network, c: DeepseekConfig, h: Value, x: Value, prefix: str, rotary: RotaryTable) -> Value:
    """Declares `x` plus the latent attention of `h`."""
    shape = c.latent_shape
    kv_a = whole(f"{prefix}.kv_a_proj_with_mqa", "attn_kv_a", shape.key_dim)
    queries = _queries(net, c, h, prefix)
    rows = net.linear(h, "attention.kv_a", [kv_a], split=Split.NONE, bias=c.attn_bias)
    qk = net.latent_queries(
        queries,
        rows,
        shape,
        _weights_of_heads(net, c, prefix, KEYS),
        f"{prefix}.kv_a_layernorm",
        "attention.kv_a_layernorm",
        epsilon=_EPSILON,
    )
    attended = net.attention(qk, rotary, shape=shape.attention, scale=c.score_scale, interleaved=True)
    values = net.latent_values(attended, shape, _weights_of_heads(net, c, prefix, VALUES))
    dense = whole(f"{prefix}.o_proj", "attn_dense", c.hidden_size)
    return net.linear(values, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias, add_to=x)


def _mlp(net: Network, c: DeepseekConfig, layer: int, h: Value, x: Value, scores: RouterScores) -> Value:
    block = f"{MODEL}.layers.{layer}.mlp"
    if layer in c.dense_layers:
        return dense_mlp(net, c, h, x, block)
    is_v3 = scores is RouterScores.SIGMOID
    bias = f"{block}.gate.e_score_correction_bias" if is_v3 else None
    routing = c.grouped_routing(net, scores, bias, rates_groups_by_best=not is_v3)
    x = add_experts(net, c, h, x, block, routing)
    inner = c.shared_expert_intermediate_size or c.moe_intermediate_size
    return add_shared_expert(net, h, x, f"{block}.shared_experts", inner)


def _declare(net: Network, c: DeepseekConfig, scores: RouterScores) -> None:
    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("attention"):
            h = net.rms_norm(x, f"{p}.input_layernorm", "input_layernorm")
            x = _attention(net, c, h, x, f"{p}.self_attn", rotary)
        with net.scope("mlp"):
            h = net.rms_norm(x, f"{p}.post_attention_layernorm", "post_layernorm")
            x = _mlp(net, c, layer, h, x, scores)
    with net.scope("head"):
        h = net.rms_norm(x, f"{MODEL}.norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens")


def _published_code(version: str) -> dict[str, str]:
    """Entries of auto_map in published models."""
    return {
        "AutoConfig": f"configuration_deepseek.Deepseek{version}Config",
        "AutoModel": f"modeling_deepseek.Deepseek{version}Model",
        "AutoModelForCausalLM": f"modeling_deepseek.Deepseek{version}ForCausalLM",
    }


DEEPSEEK_V2 = ModelFamily(
    architecture="DeepseekV2ForCausalLM",
    config_class=DeepseekConfig,
    read_features=_read_v2_features,
    declare=lambda net, c: _declare(net, c, RouterScores.SOFTMAX),
    optional_fields=frozenset({"num_key_value_heads"}),
    field_names={"head_dim": "qk_rope_head_dim"},
    # transformers ignores norm_topk_prob, and the first code of these models did not.
    neutral_fields={"mlp_bias": False, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax"},
    harmless_fields=_HARMLESS,
    published_code=_published_code("V2"),
    position_embedding_type=ROPE_INTERLEAVED,
)
DEEPSEEK_V3 = ModelFamily(
    architecture="DeepseekV3ForCausalLM",
    config_class=DeepseekConfig,
    read_features=_read_v3_features,
    declare=lambda net, c: _declare(net, c, RouterScores.SIGMOID),
    optional_fields=frozenset({"num_key_value_heads"}),
    field_names={"head_dim": "qk_rope_head_dim"},
    neutral_fields={
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    prediction_tensors=_PREDICTION_LAYER,
    harmless_fields=_HARMLESS,
    published_code=_published_code("V3"),
    position_embedding_type=ROPE_INTERLEAVED,
)
