"""GPTNeoXForCausalLM (Pythia): q, k and v interleaved by head, attention and MLP in parallel."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..network.network import Network
from ..network.weights import Part, Split, whole
from .family import GELUS, Features, ModelFamily, PartialRotaryConfig

_MODEL = "gpt_neox"


@dataclass(frozen=True, kw_only=True)
class GptNeoXConfig(PartialRotaryConfig):
    """Fields of GPT-NeoX, in addition to Llama's."""

    use_parallel_residual: bool = True
    """True if attention and MLP read the same hidden state."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=True)
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "mlp_bias": True,
        "use_parallel_residual": fields.boolean("use_parallel_residual", default=True),
    }


def _qkv_parts(c: GptNeoXConfig, source: str) -> list[Part]:
    heads, size = c.num_attention_heads, c.head_size
    return [
        Part(
            source=source,
            module=module,
            outputs=heads * size,
            units=heads,
            rows=tuple(range((3 * head + at) * size, (3 * head + at + 1) * size) for head in range(heads)),
            source_outputs=3 * heads * size,
        )
        for at, module in enumerate(("attn_q", "attn_k", "attn_v"))
    ]


def _declare(net: Network, c: GptNeoXConfig) -> None:
    x = net.embedding(f"{_MODEL}.embed_in")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{_MODEL}.layers.{layer}"
        with net.scope("attention"):
            h = net.layer_norm(x, f"{p}.input_layernorm", "input_layernorm")
            parts = _qkv_parts(c, f"{p}.attention.query_key_value")
            qkv = net.linear(h, "attention.qkv", parts, split=Split.COLUMN, bias=c.attn_bias)
            attended = net.attention(qkv, rotary)
            mlp_norm = (f"{p}.post_attention_layernorm", "post_layernorm")
            beside = net.layer_norm(x, *mlp_norm) if c.use_parallel_residual else None
            dense = whole(f"{p}.attention.dense", "attn_dense", c.hidden_size)
            x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias, add_to=x)
        with net.scope("mlp"):
            h = net.layer_norm(x, *mlp_norm) if beside is None else beside
            up = whole(f"{p}.mlp.dense_h_to_4h", "mlp_h_to_4h", c.intermediate_size)
            h = net.linear(h, "mlp.fc", [up], split=Split.COLUMN, bias=True, activation=Activation(c.hidden_act))
            down = whole(f"{p}.mlp.dense_4h_to_h", "mlp_4h_to_h", c.hidden_size)
            x = net.linear(h, "mlp.proj", [down], split=Split.ROW, bias=True, add_to=x)
    with net.scope("head"):
        h = net.layer_norm(x, f"{_MODEL}.final_layer_norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "embed_out", f"{_MODEL}.embed_in", token_classifier="classifier")


GPT_NEOX = ModelFamily(
    architecture="GPTNeoXForCausalLM",
    config_class=GptNeoXConfig,
    read_features=_read_features,
    declare=_declare,
    activations=GELUS,
    field_names={
        "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
    },
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    partial_rotary_factor=0.25,
    harmless_fields=frozenset({"classifier_dropout", "hidden_dropout"}),
    ignored_tensors=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)
