"""ModernBertModel: rotary positions with two bases, windows in both directions, and a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..._core import PoolingActivation
from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.pooling import CLS, MEAN
from ..network.network import Network
from ..network.operands import Value
from ..network.weights import Split, stacked, whole
from .decoder import fused_gated_mlp
from .encoder import EncoderConfig
from .family import GELUS, Features, ModelFamily, read_rope_of_kinds, sliding_layers

_MODEL: Final = "model"
_CLASSIFIER_ACTIVATIONS: Final = {
    **{name: getattr(PoolingActivation, gelu.upper()) for name, gelu in GELUS.items()},
    "relu": PoolingActivation.RELU,
    "silu": PoolingActivation.SILU,
    "tanh": PoolingActivation.TANH,
}


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    """Fields of ModernBERT, in addition to those of other encoders."""

    rotary_local_base: float = 10000.0
    """Rotary base of layers with a window; the others have rotary_base."""
    norm_bias: bool = False
    classifier_pooling: str = CLS
    """CLS or MEAN: hidden state that classifiers of texts read."""
    classifier_bias: bool = False
    """True if the layer before a classifier's last one has a bias."""
    classifier_activation: str = "gelu"

    @property
    def classified_row(self) -> str:
        """The first hidden state, or the mean of all."""
        return self.classifier_pooling

    def classifiers_need_pooler(self, *, per_token: bool) -> bool:
        """True for all classifiers."""
        return True

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        problems = super().inconsistencies()
        for name, value, accepted in (
            ("classifier_pooling", self.classifier_pooling, (CLS, MEAN)),
            ("classifier_activation", self.classifier_activation, tuple(_CLASSIFIER_ACTIVATIONS)),
        ):
            if value not in accepted:
                problems.append(f"{name} is {value}; accepted: {', '.join(accepted)}")
        return problems


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    every = fields.integer("global_attn_every_n_layers", default=3)
    layer_types = fields.raw("layer_types")
    if layer_types is None:
        layers = tuple(layer for layer in range(num_hidden_layers) if layer % every != 0)
    else:
        layers = sliding_layers(fields, layer_types, num_hidden_layers)
    # A token attends to half of the window before it, and half after it.
    reach = fields.integer("local_attention", default=128) // 2
    bias = fields.boolean("attention_bias", default=False)
    return {
        "attn_bias": bias,
        "attn_dense_bias": bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "norm_bias": fields.boolean("norm_bias", default=False),
        "sliding_window": reach + 1 if layers else None,
        "sliding_window_layers": layers,
        "classifier_pooling": fields.string("classifier_pooling", choices=(CLS, MEAN), default=CLS),
        "classifier_bias": fields.boolean("classifier_bias", default=False),
        "classifier_activation": fields.string(
            "classifier_activation", choices=_CLASSIFIER_ACTIVATIONS, default="gelu"
        ),
    }


def _read_rope(fields: JsonFields, max_position_embeddings: int) -> Features:
    names = ("global_rope_theta", "local_rope_theta")
    for name in names:
        if name in fields and fields.raw(name) is None:
            fields.problem(name, "is null; expected a number")
    if fields.raw("rope_scaling") is not None:
        fields.problem("rope_scaling", "is given; accepted: rope_parameters, with scaling for each kind of layer")
    return read_rope_of_kinds(fields, max_position_embeddings, base=160_000.0, local_base=10_000.0, names=names)


def _declare(net: Network, c: ModernBertConfig) -> None:
    x = net.embedding(f"{_MODEL}.embeddings.tok_embeddings")
    with net.scope("embedding"):
        norm = f"{_MODEL}.embeddings.norm"
        x = net.layer_norm(x, norm, "transformer.ln_embed", bias=c.norm_bias, is_stream=True)
    tables = {False: net.rotary()}
    if c.sliding_window_layers:
        tables[True] = net.rotary(base=c.rotary_local_base, scope="local_rotary")
    for layer in net.layers():
        p = f"{_MODEL}.layers.{layer}"
        window = c.window_of(layer)
        with net.scope("attention"):
            # The embedding's norm serves the first layer.
            h = net.cast(x) if layer == 0 else _normed(net, c, x, f"{p}.attn_norm", "input_layernorm")
            heads, width = c.num_attention_heads, c.num_attention_heads * c.head_size
            parts = stacked(f"{p}.attn.Wqkv", [(module, width, heads) for module in ("attn_q", "attn_k", "attn_v")])
            qkv = net.linear(h, "attention.qkv", parts, split=Split.COLUMN, bias=c.attn_bias)
            attended = net.attention(qkv, tables[window is not None], window=window, is_causal=False)
            dense = whole(f"{p}.attn.Wo", "attn_dense", c.hidden_size)
            x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias, add_to=x)
        with net.scope("mlp"):
            h = _normed(net, c, x, f"{p}.mlp_norm", "post_layernorm")
            h = fused_gated_mlp(net, c, h, f"{p}.mlp.Wi", Activation(c.hidden_act))
            down = whole(f"{p}.mlp.Wo", "mlp_4h_to_h", c.hidden_size)
            x = net.linear(h, "mlp.proj", [down], split=Split.ROW, bias=c.mlp_bias, add_to=x)
    with net.scope("head"):
        norm = f"{_MODEL}.final_norm"
        net.hidden = net.layer_norm(x, norm, "transformer.ln_f", bias=c.norm_bias, logit_rows=True)
    if c.classifier is not None:
        activation = _CLASSIFIER_ACTIVATIONS[c.classifier_activation]
        net.pool("head.dense", activation=activation, bias=c.classifier_bias, norm="head.norm", norm_bias=c.norm_bias)
        net.classifier("classifier", c.hidden_size, bias=True)


def _normed(net: Network, c: ModernBertConfig, x: Value, source: str, name: str) -> Value:
    return net.layer_norm(x, source, name, bias=c.norm_bias)


MODERNBERT = ModelFamily(
    architecture="ModernBertModel",
    bare_architectures=frozenset({"ModernBertForMaskedLM"}),
    config_class=ModernBertConfig,
    read_features=_read_features,
    read_rope=_read_rope,
    declare=_declare,
    # Names in models that were saved without a head.
    older_names={f"{name}.": f"{_MODEL}.{name}." for name in ("embeddings", "layers", "final_norm")},
    activations={**GELUS, "silu": "silu"},
    field_names={"hidden_act": "hidden_activation", "rms_norm_eps": "norm_eps"},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    tied_by_default=True,
    neutral_fields={"is_decoder": False, "position_embedding_type": "absolute"},
    harmless_fields=frozenset(
        {
            "classifier_dropout",
            "cls_token_id",
            "decoder_bias",
            "deterministic_flash_attn",
            "embedding_dropout",
            "gradient_checkpointing",
            "initializer_cutoff_factor",
            "layer_norm_eps",
            "mlp_dropout",
            "reference_compile",
            "repad_logits_with_grad",
            "sparse_pred_ignore_index",
            "sparse_prediction",
        }
    ),
    # Head of bare_architectures.
    ignored_tensors=(r"(head|decoder)\..*",),
)
