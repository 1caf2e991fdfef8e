"""StableLmForCausalLM: Llama with layer norms, partly rotated heads; attention and MLP in sequence or in parallel."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..network.network import Network
from ..network.weights import Split, whole
from .decoder import MODEL, gated_mlp, qkv_parts
from .family import Features, ModelFamily, PartialRotaryConfig


@dataclass(frozen=True, kw_only=True)
class StableLmConfig(PartialRotaryConfig):
    """Fields of StableLM, in addition to Llama's."""

    use_parallel_residual: bool = False
    """True if attention and MLP share one norm."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        "attn_bias": fields.boolean("use_qkv_bias", default=False),
        "use_parallel_residual": fields.boolean("use_parallel_residual", default=False),
    }


def _declare(net: Network, c: StableLmConfig) -> None:
    x = net.embedding(f"{MODEL}.embed_tokens")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("attention"):
            normed = net.layer_norm(x, f"{p}.input_layernorm", "input_layernorm")
            parts = qkv_parts(c, f"{p}.self_attn")
            qkv = net.linear(normed, "attention.qkv", parts, split=Split.COLUMN, bias=c.attn_bias)
            attended = net.attention(qkv, rotary)
            dense = whole(f"{p}.self_attn.o_proj", "attn_dense", c.hidden_size)
            x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, add_to=x)
        with net.scope("mlp"):
            if not c.use_parallel_residual:
                normed = net.layer_norm(x, f"{p}.post_attention_layernorm", "post_layernorm")
            h = gated_mlp(net, c, normed, f"{p}.mlp", Activation.SILU)
            down = whole(f"{p}.mlp.down_proj", "mlp_4h_to_h", c.hidden_size)
            x = net.linear(h, "mlp.proj", [down], split=Split.ROW, add_to=x)
    with net.scope("head"):
        h = net.layer_norm(x, f"{MODEL}.norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens")


STABLELM = ModelFamily(
    architecture="StableLmForCausalLM",
    config_class=StableLmConfig,
    read_features=_read_features,
    declare=_declare,
    field_names={"rms_norm_eps": "layer_norm_eps"},
    optional_fields=frozenset({"head_dim"}),
    partial_rotary_factor=0.25,
    neutral_fields={"qk_layernorm": False},
    harmless_fields=frozenset({"hidden_dropout"}),
)
