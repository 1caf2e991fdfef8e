"""GPT2LMHeadModel: learned positions, layer norms, linear layers stored as [in, out]."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import LEARNED_POSITIONS, CheckpointConfig
from ..network.network import Network
from ..network.weights import Split, stacked, whole
from .family import GELU_TANH_NAMES, Features, ModelFamily, no_rope

_MODEL = "transformer"
_HARMLESS_FIELDS = frozenset(
    """
    attn_pdrop embd_pdrop resid_pdrop n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj
    """.split()
)


@dataclass(frozen=True, kw_only=True)
class Gpt2Config(CheckpointConfig):
    """Fields of GPT-2, in addition to Llama's."""

    scale_attn_by_inverse_layer_idx: bool = False
    """True also divides the scores of layer n by n + 1."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        "attn_bias": True,
        "attn_dense_bias": True,
        "mlp_bias": True,
        "scale_attn_by_inverse_layer_idx": fields.boolean("scale_attn_by_inverse_layer_idx", default=False),
    }


def _declare(net: Network, c: Gpt2Config) -> None:
    heads, width = c.num_attention_heads, c.num_attention_heads * c.head_size
    x = net.embedding(f"{_MODEL}.wte", positions=f"{_MODEL}.wpe")
    rotary = net.no_rotation()
    for layer in net.layers():
        p = f"{_MODEL}.h.{layer}"
        with net.scope("attention"):
            h = net.layer_norm(x, f"{p}.ln_1", "input_layernorm")
            parts = [(module, width, heads) for module in ("attn_q", "attn_k", "attn_v")]
            fused = stacked(f"{p}.attn.c_attn", parts, transposed=True)
            qkv = net.linear(h, "attention.qkv", fused, split=Split.COLUMN, bias=True)
            scale = c.head_size**-0.5 / (layer + 1 if c.scale_attn_by_inverse_layer_idx else 1)
            attended = net.attention(qkv, rotary, scale=scale)
            dense = whole(f"{p}.attn.c_proj", "attn_dense", c.hidden_size, transposed=True)
            x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=True, add_to=x)
        with net.scope("mlp"):
            h = net.layer_norm(x, f"{p}.ln_2", "post_layernorm")
            up = whole(f"{p}.mlp.c_fc", "mlp_h_to_4h", c.intermediate_size, transposed=True)
            h = net.linear(h, "mlp.fc", [up], split=Split.COLUMN, bias=True, activation=Activation(c.hidden_act))
            down = whole(f"{p}.mlp.c_proj", "mlp_4h_to_h", c.hidden_size, transposed=True)
            x = net.linear(h, "mlp.proj", [down], split=Split.ROW, bias=True, add_to=x)
    with net.scope("head"):
        h = net.layer_norm(x, f"{_MODEL}.ln_f", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{_MODEL}.wte", token_classifier="classifier")


GPT2 = ModelFamily(
    architecture="GPT2LMHeadModel",
    config_class=Gpt2Config,
    read_features=_read_features,
    read_rope=no_rope,
    declare=_declare,
    # Names in decoders that were saved without the model around them.
    older_names={f"{name}.": f"{_MODEL}.{name}." for name in ("wte", "wpe", "h", "ln_f")},
    position_embedding_type=LEARNED_POSITIONS,
    activations={**dict.fromkeys(GELU_TANH_NAMES, "gelu_tanh"), "gelu": "gelu"},
    field_names={
        "hidden_act": "activation_function",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    optional_fields=frozenset({"num_key_value_heads", "head_dim", "intermediate_size"}),
    tied_by_default=True,
    neutral_fields={"scale_attn_weights": True},
    harmless_fields=_HARMLESS_FIELDS,
    ignored_tensors=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
)
