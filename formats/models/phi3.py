"""Phi3ForCausalLM (Phi-3, 3.5 and Phi-4-mini): fused q, k, v and gate, up; longrope."""

from __future__ import annotations

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..network.network import Network
from ..network.weights import Split, stacked, whole
from .decoder import MODEL, fused_gated_mlp
from .family import Features, ModelFamily, PartialRotaryConfig, sliding_window_of_all_layers


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return sliding_window_of_all_layers(fields, num_hidden_layers)


def _declare(net: Network, c: PartialRotaryConfig) -> None:
    heads, kv_heads, size = c.num_attention_heads, c.num_key_value_heads, c.head_size
    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("attention"):
            h = net.rms_norm(x, f"{p}.input_layernorm", "input_layernorm")
            parts = [("attn_q", heads * size, heads), ("attn_k", kv_heads * size, kv_heads)]
            parts.append(("attn_v", kv_heads * size, kv_heads))
            qkv = net.linear(h, "attention.qkv", stacked(f"{p}.self_attn.qkv_proj", parts), split=Split.COLUMN)
            attended = net.attention(qkv, rotary, window=c.window_of(layer))
            dense = whole(f"{p}.self_attn.o_proj", "attn_dense", c.hidden_size)
            x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, add_to=x)
        with net.scope("mlp"):
            h = net.rms_norm(x, f"{p}.post_attention_layernorm", "post_layernorm")
            h = fused_gated_mlp(net, c, h, f"{p}.mlp.gate_up_proj", Activation.SILU)
            down = whole(f"{p}.mlp.down_proj", "mlp_4h_to_h", c.hidden_size)
            x = net.linear(h, "mlp.proj", [down], split=Split.ROW, add_to=x)
    with net.scope("head"):
        h = net.rms_norm(x, f"{MODEL}.norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens")


PHI3 = ModelFamily(
    architecture="Phi3ForCausalLM",
    config_class=PartialRotaryConfig,
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    partial_rotary_factor=1.0,
    neutral_fields={"attention_bias": False, "mlp_bias": False, "full_attn_mod": 1, "lm_head_bias": False},
    published_code={
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    },
    harmless_fields=frozenset({"embd_pdrop", "resid_pdrop", "original_max_position_embeddings", "interpolate_factor"}),
)
