"""Layers of BERT and its derivatives: each sublayer is followed by a layer norm."""

from __future__ import annotations

from ..checkpoint.activation import Activation
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.operands import RotaryTable, Value
from ..network.weights import Split, whole


def declare_bert(
    net: Network, c: CheckpointConfig, model: str, type_vocab_size: int, unused_positions: int = 0
) -> None:
    """Declares the encoder under the name `model`; its last norm makes net.hidden.

    type_vocab_size: number of token types.
    unused_positions: rows of the position table before that of the first token.
    """
    p = f"{model}.embeddings"
    x = net.embedding(
        f"{p}.word_embeddings",
        positions=f"{p}.position_embeddings",
        rows_before=unused_positions,
        types=f"{p}.token_type_embeddings",
        num_types=type_vocab_size,
    )
    with net.scope("embedding"):
        x = net.layer_norm(x, f"{p}.LayerNorm", "transformer.ln_embed", is_stream=True)
    rotary = net.no_rotation()
    for layer in net.layers():
        p = f"{model}.encoder.layer.{layer}"
        x = _attention(net, c, x, p, rotary)
        x = _mlp(net, c, x, p)
        if layer < c.num_hidden_layers - 1:
            x = net.layer_norm(x, f"{p}.output.LayerNorm", "post_layernorm", is_stream=True)
    with net.scope("head"):
        last = f"{model}.encoder.layer.{c.num_hidden_layers - 1}.output.LayerNorm"
        net.hidden = net.layer_norm(x, last, "transformer.ln_f", logit_rows=True)


def _attention(net: Network, c: CheckpointConfig, x: Value, p: str, rotary: RotaryTable) -> Value:
    heads, width = c.num_attention_heads, c.num_attention_heads * c.head_size
    with net.scope("attention"):
        names = (("query", "attn_q"), ("key", "attn_k"), ("value", "attn_v"))
        parts = [whole(f"{p}.attention.self.{name}", module, width, heads) for name, module in names]
        qkv = net.linear(net.cast(x), "attention.qkv", parts, split=Split.COLUMN, bias=True)
        attended = net.attention(qkv, rotary, is_causal=False)
        dense = whole(f"{p}.attention.output.dense", "attn_dense", c.hidden_size)
        x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=True, add_to=x)
        return net.layer_norm(x, f"{p}.attention.output.LayerNorm", "input_layernorm", is_stream=True)


def _mlp(net: Network, c: CheckpointConfig, x: Value, p: str) -> Value:
    with net.scope("mlp"):
        up = whole(f"{p}.intermediate.dense", "mlp_h_to_4h", c.intermediate_size)
        activation = Activation(c.hidden_act)
        h = net.linear(net.cast(x), "mlp.fc", [up], split=Split.COLUMN, bias=True, activation=activation)
        down = whole(f"{p}.output.dense", "mlp_4h_to_h", c.hidden_size)
        return net.linear(h, "mlp.proj", [down], split=Split.ROW, bias=True, add_to=x)
