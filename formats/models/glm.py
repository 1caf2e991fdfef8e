"""GlmForCausalLM and Glm4ForCausalLM: half of each head rotated, interleaved; GLM-4 has norms after sublayers."""

from __future__ import annotations

from functools import partial

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import ROPE_INTERLEAVED
from ..network.network import Network
from ..network.operands import Value
from ..network.weights import Split, whole
from .decoder import MODEL, fused_gated_mlp, qkv_parts
from .family import Features, ModelFamily, PartialRotaryConfig


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {"attn_bias": fields.boolean("attention_bias", default=True)}


def _declare(net: Network, c: PartialRotaryConfig, *, norms_behind: bool) -> None:
    def add(x: Value, h: Value, name: str, source: str, module: str, norm: str) -> Value:
        """Declares x plus the sublayer's last linear layer, normalised if the family does so."""
        part = whole(source, module, c.hidden_size)
        if not norms_behind:
            return net.linear(h, name, [part], split=Split.ROW, add_to=x)
        made = net.linear(h, name, [part], split=Split.ROW)
        return net.rms_norm(made, norm, norm.rpartition(".")[2], add_to=x)

    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("attention"):
            h = net.rms_norm(x, f"{p}.input_layernorm", "input_layernorm")
            qkv = net.linear(h, "attention.qkv", qkv_parts(c, f"{p}.self_attn"), split=Split.COLUMN, bias=c.attn_bias)
            attended = net.attention(qkv, rotary, interleaved=True)
            source = f"{p}.self_attn.o_proj"
            x = add(x, attended, "attention.dense", source, "attn_dense", f"{p}.post_self_attn_layernorm")
        with net.scope("mlp"):
            h = net.rms_norm(x, f"{p}.post_attention_layernorm", "post_layernorm")
            h = fused_gated_mlp(net, c, h, f"{p}.mlp.gate_up_proj", Activation.SILU)
            x = add(x, h, "mlp.proj", f"{p}.mlp.down_proj", "mlp_4h_to_h", f"{p}.post_mlp_layernorm")
    with net.scope("head"):
        h = net.rms_norm(x, f"{MODEL}.norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens")


GLM, GLM4 = (
    ModelFamily(
        architecture=architecture,
        config_class=PartialRotaryConfig,
        read_features=_read_features,
        declare=partial(_declare, norms_behind=norms_behind),
        position_embedding_type=ROPE_INTERLEAVED,
        optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
        partial_rotary_factor=0.5,
    )
    for architecture, norms_behind in (("GlmForCausalLM", False), ("Glm4ForCausalLM", True))
)
