"""DistilBertModel: BERT's layers under other names, without token types and pooler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..._core import PoolingActivation
from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import LEARNED_POSITIONS
from ..checkpoint.pooling import CLS, HeadLayer
from ..network.network import Network
from ..network.operands import RotaryTable, Value
from ..network.weights import Split, whole
from .encoder import EncoderConfig
from .family import GELUS, Features, ModelFamily, no_rope

_MODEL: Final = "distilbert"
_HEAD_LAYER: Final = HeadLayer("pre_classifier", PoolingActivation.RELU)


@dataclass(frozen=True, kw_only=True)
class DistilBertConfig(EncoderConfig):
    """An encoder whose text classifiers have an additional layer before the last one."""

    @property
    def classified_row(self) -> str:
        """The first hidden state."""
        return CLS

    def classifiers_need_pooler(self, *, per_token: bool) -> bool:
        """True for classifiers of texts."""
        return not per_token

    @property
    def head_layer(self) -> HeadLayer | None:
        """PEFT saves this layer with the last one: it selects by ends of names, and "classifier" ends this name too."""
        return _HEAD_LAYER


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    return {"layer_norm_eps": 1e-12}  # the family has no field for it


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {"attn_bias": True, "attn_dense_bias": True, "mlp_bias": True}


def _declare(net: Network, c: DistilBertConfig) -> None:
    p = f"{_MODEL}.embeddings"
    x = net.embedding(f"{p}.word_embeddings", positions=f"{p}.position_embeddings")
    with net.scope("embedding"):
        x = net.layer_norm(x, f"{p}.LayerNorm", "transformer.ln_embed", is_stream=True)
    rotary = net.no_rotation()
    for layer in net.layers():
        p = f"{_MODEL}.transformer.layer.{layer}"
        x = _attention(net, c, x, p, rotary)
        x = _mlp(net, c, x, p)
        if layer < c.num_hidden_layers - 1:
            x = net.layer_norm(x, f"{p}.output_layer_norm", "post_layernorm", is_stream=True)
    with net.scope("head"):
        last = f"{_MODEL}.transformer.layer.{c.num_hidden_layers - 1}.output_layer_norm"
        net.hidden = net.layer_norm(x, last, "transformer.ln_f", logit_rows=True)
    if c.classifier is not None:
        if not c.classifier.per_token:
            net.pool(_HEAD_LAYER.path, activation=_HEAD_LAYER.activation)
        net.classifier("classifier", c.hidden_size, bias=True)


def _attention(net: Network, c: DistilBertConfig, x: Value, p: str, rotary: RotaryTable) -> Value:
    heads, width = c.num_attention_heads, c.num_attention_heads * c.head_size
    with net.scope("attention"):
        names = (("q_lin", "attn_q"), ("k_lin", "attn_k"), ("v_lin", "attn_v"))
        parts = [whole(f"{p}.attention.{name}", module, width, heads) for name, module in names]
        qkv = net.linear(net.cast(x), "attention.qkv", parts, split=Split.COLUMN, bias=True)
        attended = net.attention(qkv, rotary, is_causal=False)
        dense = whole(f"{p}.attention.out_lin", "attn_dense", c.hidden_size)
        x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=True, add_to=x)
        return net.layer_norm(x, f"{p}.sa_layer_norm", "input_layernorm", is_stream=True)


def _mlp(net: Network, c: DistilBertConfig, x: Value, p: str) -> Value:
    with net.scope("mlp"):
        up = whole(f"{p}.ffn.lin1", "mlp_h_to_4h", c.intermediate_size)
        activation = Activation(c.hidden_act)
        h = net.linear(net.cast(x), "mlp.fc", [up], split=Split.COLUMN, bias=True, activation=activation)
        down = whole(f"{p}.ffn.lin2", "mlp_4h_to_h", c.hidden_size)
        return net.linear(h, "mlp.proj", [down], split=Split.ROW, bias=True, add_to=x)


DISTILBERT = ModelFamily(
    architecture="DistilBertModel",
    bare_architectures=frozenset({"DistilBertForMaskedLM"}),
    config_class=DistilBertConfig,
    read_features=_read_features,
    read_rope=no_rope,
    declare=_declare,
    fill_in=_fill_in,
    # Names in models that were saved without a head.
    older_names={f"{part}.": f"{_MODEL}.{part}." for part in ("embeddings", "transformer")},
    position_embedding_type=LEARNED_POSITIONS,
    activations={**GELUS, "relu": "relu"},
    field_names={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "rms_norm_eps": "layer_norm_eps",
    },
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    tied_by_default=True,
    neutral_fields={"is_decoder": False},
    # Sinusoidal positions are stored in the table like learned ones.
    harmless_fields=frozenset(
        {"dropout", "output_past", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"}
    ),
    # Head of bare_architectures, and positions that were saved as a buffer.
    ignored_tensors=(r"vocab_(transform|layer_norm|projector)\..*", r"distilbert\.embeddings\.position_ids"),
)
