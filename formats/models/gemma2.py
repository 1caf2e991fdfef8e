"""Gemma2ForCausalLM: norms before and after sublayers, soft caps, a window in every other layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.operands import RotaryTable
from ..network.weights import Split, whole
from .decoder import MODEL, gated_mlp, qkv_parts
from .family import GELU_TANH_NAMES, Features, ModelFamily, sliding_window_of_kinds

GEMMA_ACTIVATIONS = dict.fromkeys(GELU_TANH_NAMES, "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(CheckpointConfig):
    """Fields of Gemma 2 and 3, in addition to Llama's."""

    query_pre_attn_scalar: float = 1.0
    """Scores are divided by its square root."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None


def read_gemma_features(fields: JsonFields, num_hidden_layers: int, pattern: int) -> Features:
    """Reads the fields of Gemma 2 and 3; by default every layer has a window, except each `pattern`th."""
    attention_bias = fields.boolean("attention_bias", default=False)
    windows = sliding_window_of_kinds(fields, num_hidden_layers, lambda layer: (layer + 1) % pattern != 0)
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        **windows,
        "query_pre_attn_scalar": fields.number("query_pre_attn_scalar", above=True),
        "attn_logit_softcapping": fields.optional_number("attn_logit_softcapping", above=True),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping", above=True),
    }


def declare_gemma(
    net: Network,
    c: GemmaConfig,
    tables: dict[bool, RotaryTable] | None = None,
    decoder: str = MODEL,
    *,
    takes_images: bool = False,
) -> None:
    """Declares Gemma 2; or Gemma 3, with head norms (qk_layernorm) and `tables` of layers without and with a window.

    takes_images: True if rows of images, which attend to each other in both directions, may replace tokens. After
    their elements they have a number of the image, and a coordinate without a value.
    """
    x = net.embedding(
        f"{decoder}.embed_tokens", scale=math.sqrt(c.hidden_size), num_coordinates=2 if takes_images else 0
    )
    tables = tables or dict.fromkeys((False, True), net.rotary())
    for layer in net.layers():
        p = f"{decoder}.layers.{layer}"
        window = c.window_of(layer)
        with net.scope("attention"):
            h = net.rms_norm(x, f"{p}.input_layernorm", "input_layernorm", plus_one=True)
            qkv = net.linear(h, "attention.qkv", qkv_parts(c, f"{p}.self_attn"), split=Split.COLUMN, bias=c.attn_bias)
            query_norm = key_norm = None
            if c.qk_layernorm:
                query_norm = net.head_norm(f"{p}.self_attn.q_norm", "attention.q_layernorm", plus_one=True)
                key_norm = net.head_norm(f"{p}.self_attn.k_norm", "attention.k_layernorm", plus_one=True)
            attended = net.attention(
                qkv,
                tables[window is not None],
                window=window,
                scale=c.query_pre_attn_scalar**-0.5,
                softcap=c.attn_logit_softcapping,
                query_norm=query_norm,
                key_norm=key_norm,
                is_causal=not c.is_encoder_only,
                joint_column=c.hidden_size if takes_images else None,
            )
            dense = whole(f"{p}.self_attn.o_proj", "attn_dense", c.hidden_size)
            h = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias)
            x = net.rms_norm(h, f"{p}.post_attention_layernorm", "post_layernorm", plus_one=True, add_to=x)
        with net.scope("mlp"):
            name = "pre_feedforward_layernorm"
            h = net.rms_norm(x, f"{p}.{name}", name, plus_one=True)
            h = gated_mlp(net, c, h, f"{p}.mlp", Activation(c.hidden_act))
            down = whole(f"{p}.mlp.down_proj", "mlp_4h_to_h", c.hidden_size)
            h = net.linear(h, "mlp.proj", [down], split=Split.ROW)
            name = "post_feedforward_layernorm"
            x = net.rms_norm(h, f"{p}.{name}", name, plus_one=True, add_to=x)
    with net.scope("head"):
        h = net.rms_norm(x, f"{decoder}.norm", "transformer.ln_f", plus_one=True, logit_rows=True)
        net.lm_head(h, "lm_head", f"{decoder}.embed_tokens", softcap=c.final_logit_softcapping)


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    # Older files have hidden_act and hidden_activation; transformers only reads the latter.
    fields.discard(("hidden_act",))
    return read_gemma_features(fields, num_hidden_layers, pattern=2)


GEMMA2 = ModelFamily(
    architecture="Gemma2ForCausalLM",
    config_class=GemmaConfig,
    read_features=_read_features,
    declare=declare_gemma,
    activations=GEMMA_ACTIVATIONS,
    field_names={"hidden_act": "hidden_activation"},
    tied_by_default=True,
    neutral_fields={"use_bidirectional_attention": False},
    harmless_fields=frozenset({"cache_implementation"}),
)
