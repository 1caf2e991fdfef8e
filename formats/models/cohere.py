"""Command R, R7B and A: parallel attention and MLP with one norm, interleaved rotary positions, scaled logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import ROPE_INTERLEAVED, CheckpointConfig
from ..network.network import Network
from ..network.weights import Split, whole
from .decoder import MODEL, gated_mlp, qkv_parts
from .family import Features, ModelFamily, sliding_window_of_kinds


@dataclass(frozen=True, kw_only=True)
class CohereConfig(CheckpointConfig):
    """Fields of Cohere's models, in addition to Llama's."""

    logit_scale: float = 1.0


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "logit_scale": fields.number("logit_scale", above=True, default=0.0625),
    }


def _read_cohere2_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    pattern = fields.integer("sliding_window_pattern", default=4)
    windows = sliding_window_of_kinds(fields, num_hidden_layers, lambda layer: (layer + 1) % pattern != 0)
    return {**_read_features(fields, num_hidden_layers), **windows}


def _declare(net: Network, c: CohereConfig, *, only_windows_rotate: bool) -> None:
    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary = net.rotary()
    unrotated = net.no_rotation() if only_windows_rotate else rotary
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("attention"):
            normed = net.layer_norm(x, f"{p}.input_layernorm", "input_layernorm", bias=False)
            parts = qkv_parts(c, f"{p}.self_attn")
            qkv = net.linear(normed, "attention.qkv", parts, split=Split.COLUMN, bias=c.attn_bias)
            window = c.window_of(layer)
            attended = net.attention(qkv, unrotated if window is None else rotary, window=window, interleaved=True)
            dense = whole(f"{p}.self_attn.o_proj", "attn_dense", c.hidden_size)
            x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias, add_to=x)
        with net.scope("mlp"):
            h = gated_mlp(net, c, normed, f"{p}.mlp", Activation.SILU)
            down = whole(f"{p}.mlp.down_proj", "mlp_4h_to_h", c.hidden_size)
            x = net.linear(h, "mlp.proj", [down], split=Split.ROW, add_to=x)
    with net.scope("head"):
        h = net.layer_norm(x, f"{MODEL}.norm", "transformer.ln_f", bias=False, logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens", scale=c.logit_scale)


COHERE = ModelFamily(
    architecture="CohereForCausalLM",
    config_class=CohereConfig,
    read_features=_read_features,
    declare=partial(_declare, only_windows_rotate=False),
    position_embedding_type=ROPE_INTERLEAVED,
    field_names={"rms_norm_eps": "layer_norm_eps"},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    tied_by_default=True,
    default_rope_theta=500000.0,
    neutral_fields={"use_qk_norm": False},
)

COHERE2 = replace(
    COHERE,
    architecture="Cohere2ForCausalLM",
    read_features=_read_cohere2_features,
    declare=partial(_declare, only_windows_rotate=True),
    default_rope_theta=10000.0,
    neutral_fields={
        "use_qk_norm": False,
        "rotary_pct": 1.0,
        "position_embedding_type": "rope_gptj",
        "order_of_interleaved_layers": "local_attn_first",
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
    },
    harmless_fields=frozenset({"cache_implementation", "layer_switch", "use_parallel_embedding"}),
)
"""Command R7B and Command A: sliding windows in most layers, no positions in the others."""
