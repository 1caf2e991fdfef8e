"""FalconForCausalLM: one layer for q, k and v, few key heads, attention and MLP in parallel or in sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.weights import Part, Split, whole
from .family import GELUS, Features, ModelFamily

_MODEL: Final = "transformer"


@dataclass(frozen=True, kw_only=True)
class FalconConfig(CheckpointConfig):
    """Fields of Falcon, in addition to Llama's, with TensorRT-LLM's names."""

    parallel_attention: bool = True
    """True adds attention and MLP to the same hidden state."""
    num_ln_in_parallel_attn: int = 1
    """Number of norms before parallel attention and MLP: 2 gives each its own, 1 is shared."""


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    heads = fields.raw("num_attention_heads")
    is_new = fields.raw("new_decoder_architecture") is True  # _read_features() reports other values
    stated = fields.raw("num_kv_heads")
    if is_new:
        key_value_heads = heads if stated is None else stated
    else:
        key_value_heads = 1 if fields.boolean("multi_query", default=True) else heads
    fields.discard({"num_kv_heads"})  # Without the new architecture transformers does not use it either.
    return {"max_position_embeddings": 2048, "num_key_value_heads": key_value_heads}


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    bias = fields.boolean("bias", default=False)
    is_new = fields.boolean("new_decoder_architecture", default=False)
    parallel = fields.boolean("parallel_attn", default=True)
    norms = fields.optional_integer("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if norms > 2 or (norms == 2 and not is_new):
        accepted = "1 and 2" if is_new else "1, or 2 with new_decoder_architecture"
        fields.problem("num_ln_in_parallel_attn", f"is {norms}; accepted: {accepted}")
    if is_new and norms == 1 and not parallel:
        fields.problem("parallel_attn", "is false; with new_decoder_architecture and one norm it must be true")
    return {
        "attn_bias": bias,
        "attn_dense_bias": bias,
        "mlp_bias": bias,
        "parallel_attention": parallel or is_new,
        "num_ln_in_parallel_attn": norms,
    }


def _qkv_parts(c: FalconConfig, source: str) -> list[Part]:
    """Splits the source's outputs. Each key head has a group: its query heads, the key head, its value head."""
    heads, key_value_heads, size = c.num_attention_heads, c.num_key_value_heads, c.head_size
    readers = heads // key_value_heads
    group = (readers + 2) * size
    total = key_value_heads * group

    def part(module: str, first: int, count: int) -> Part:
        return Part(
            source=source,
            module=module,
            outputs=key_value_heads * count * size,
            units=key_value_heads * count,
            rows=tuple(
                range(head * group + first * size, head * group + (first + count) * size)
                for head in range(key_value_heads)
            ),
            source_outputs=total,
        )

    return [part("attn_q", 0, readers), part("attn_k", readers, 1), part("attn_v", readers + 1, 1)]


def _declare(net: Network, c: FalconConfig) -> None:
    x = net.embedding(f"{_MODEL}.word_embeddings")
    rotary = net.rotary()
    for layer in net.layers():
        p = f"{_MODEL}.h.{layer}"
        with net.scope("attention"):
            if c.num_ln_in_parallel_attn == 2:
                h = net.layer_norm(x, f"{p}.ln_attn", "input_layernorm")
                beside = net.layer_norm(x, f"{p}.ln_mlp", "mlp_layernorm")
            else:
                h = net.layer_norm(x, f"{p}.input_layernorm", "input_layernorm")
                beside = h
            parts = _qkv_parts(c, f"{p}.self_attention.query_key_value")
            qkv = net.linear(h, "attention.qkv", parts, split=Split.COLUMN, bias=c.attn_bias)
            attended = net.attention(qkv, rotary)
            dense = whole(f"{p}.self_attention.dense", "attn_dense", c.hidden_size)
            x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias, add_to=x)
        with net.scope("mlp"):
            if not c.parallel_attention:
                beside = net.layer_norm(x, f"{p}.post_attention_layernorm", "post_layernorm")
            up = whole(f"{p}.mlp.dense_h_to_4h", "mlp_h_to_4h", c.intermediate_size)
            activation = Activation(c.hidden_act)
            h = net.linear(beside, "mlp.fc", [up], split=Split.COLUMN, bias=c.mlp_bias, activation=activation)
            down = whole(f"{p}.mlp.dense_4h_to_h", "mlp_4h_to_h", c.hidden_size)
            x = net.linear(h, "mlp.proj", [down], split=Split.ROW, bias=c.mlp_bias, add_to=x)
    with net.scope("head"):
        h = net.layer_norm(x, f"{_MODEL}.ln_f", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{_MODEL}.word_embeddings", token_classifier="classifier")


FALCON = ModelFamily(
    architecture="FalconForCausalLM",
    config_class=FalconConfig,
    read_features=_read_features,
    fill_in=_fill_in,
    declare=_declare,
    # Names in decoders that were saved without the model around them.
    older_names={f"{name}.": f"{_MODEL}.{name}." for name in ("word_embeddings", "h", "ln_f")},
    activations={**GELUS, "relu": "relu"},
    field_names={
        "hidden_act": "activation",
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    optional_fields=frozenset({"head_dim", "intermediate_size"}),
    tied_by_default=True,
    neutral_fields={"alibi": False, "apply_residual_connection_post_layernorm": False},
    harmless_fields=frozenset({"hidden_dropout", "multi_query"}),
    # Models that were published before transformers had the class.
    published_code={
        "AutoConfig": "configuration_falcon.FalconConfig",
        "AutoModel": "modeling_falcon.FalconModel",
        "AutoModelForSequenceClassification": "modeling_falcon.FalconForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_falcon.FalconForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_falcon.FalconForQuestionAnswering",
        "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
    },
    ignored_tensors=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
)
