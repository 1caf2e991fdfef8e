"""OLMo 2 and 3: norms after attention and MLP, and one norm each over all heads of q and of k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.operands import RotaryTable, Value
from ..network.weights import Split, whole
from .decoder import MODEL, gated_mlp, qkv_parts
from .family import Features, ModelFamily, read_rope_of_kinds, sliding_window_of_kinds


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {"attn_bias": attention_bias, "attn_dense_bias": attention_bias, "qk_layernorm": True}


def olmo_layer(
    net: Network,
    c: CheckpointConfig,
    layer: int,
    x: Value,
    rotary: RotaryTable,
    *,
    norm_each_head: bool = False,
) -> Value:
    """Declares a layer whose norms come after attention and MLP."""
    p = f"{MODEL}.layers.{layer}"
    with net.scope("attention"):
        parts = qkv_parts(c, f"{p}.self_attn")
        qkv = net.linear(net.cast(x), "attention.qkv", parts, split=Split.COLUMN, bias=c.attn_bias)
        query, key = (None if norm_each_head else part.outputs for part in parts[:2])
        attended = net.attention(
            qkv,
            rotary,
            window=c.window_of(layer),
            query_norm=net.head_norm(f"{p}.self_attn.q_norm", "attention.q_layernorm", query),
            key_norm=net.head_norm(f"{p}.self_attn.k_norm", "attention.k_layernorm", key),
        )
        dense = whole(f"{p}.self_attn.o_proj", "attn_dense", c.hidden_size)
        h = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias)
        x = net.rms_norm(h, f"{p}.post_attention_layernorm", "post_layernorm", add_to=x)
    with net.scope("mlp"):
        h = gated_mlp(net, c, net.cast(x), f"{p}.mlp", Activation.SILU)
        down = whole(f"{p}.mlp.down_proj", "mlp_4h_to_h", c.hidden_size)
        h = net.linear(h, "mlp.proj", [down], split=Split.ROW)
        return net.rms_norm(h, f"{p}.post_feedforward_layernorm", "post_feedforward_layernorm", add_to=x)


def declare_olmo(
    net: Network, c: CheckpointConfig, tables: Mapping[bool, RotaryTable], *, norm_each_head: bool = False
) -> None:
    """Declares OLMo 2 or 3, or EXAONE 4 with a norm per head; `tables` belong to layers without and with a window."""
    x = net.embedding(f"{MODEL}.embed_tokens")
    for layer in net.layers():
        rotary = tables[c.window_of(layer) is not None]
        x = olmo_layer(net, c, layer, x, rotary, norm_each_head=norm_each_head)
    with net.scope("head"):
        h = net.rms_norm(x, f"{MODEL}.norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens")


def _declare(net: Network, c: CheckpointConfig) -> None:
    declare_olmo(net, c, {False: net.rotary()})


OLMO2 = ModelFamily(
    architecture="Olmo2ForCausalLM",
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
)


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(CheckpointConfig):
    """Fields of OLMo 3, in addition to Llama's."""

    rotary_local_base: float = 500000.0
    """Rotary base of layers with a window; the others have rotary_base and rotary_scaling."""


def _read_olmo3_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    windows = sliding_window_of_kinds(fields, num_hidden_layers, lambda layer: (layer + 1) % 4 != 0)
    return {**_read_features(fields, num_hidden_layers), **windows}


def _read_olmo3_rope(fields: JsonFields, max_position_embeddings: int) -> Features:
    return read_rope_of_kinds(fields, max_position_embeddings, base=5e5, local_base=5e5)


def _declare_olmo3(net: Network, c: Olmo3Config) -> None:
    declare_olmo(net, c, {False: net.rotary(), True: net.rotary(base=c.rotary_local_base, scope="local_rotary")})


OLMO3 = ModelFamily(
    architecture="Olmo3ForCausalLM",
    config_class=Olmo3Config,
    read_features=_read_olmo3_features,
    read_rope=_read_olmo3_rope,
    declare=_declare_olmo3,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
)
