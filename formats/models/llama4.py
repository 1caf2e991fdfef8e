"""Llama 4's language model: attention within chunks, layers without positions, and experts whose inputs are scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ..._core import RouterScores
from ...common.json_fields import JsonFields, describe, is_integer
from ..checkpoint.config import ROPE_INTERLEAVED
from ..checkpoint.stacked_experts import CONSECUTIVE_EXPERTS
from ..network.network import Network
from ..network.operands import QueryScaling, RotaryTable, Value
from ..network.weights import Split, whole
from .decoder import MODEL, dense_mlp, qkv_parts
from .family import FULL_ATTENTION, Features, ModelFamily, VisionTower
from .mixture import ROUTER_FIELDS, ExpertNames, MixtureConfig, add_experts, add_shared_expert

_CHUNKED: Final = "chunked_attention"
_NAMES: Final = ExpertNames(router="router")


@dataclass(frozen=True, kw_only=True)
class Llama4Config(MixtureConfig):
    """Fields of Llama 4, in addition to those of mixtures."""

    attention_chunk_size: int | None = None
    """In chunked_layers, tokens attend only to their own chunk of so many positions."""
    chunked_layers: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    """Layers whose attention does not depend on positions, except by query_scaling."""
    has_plain_norms: bool = True
    """True if the other layers normalise each head of q and k after its rotation, without a weight."""
    query_scaling_beta: float = 0.0
    """Above 0: unrotated layers scale queries by their position."""
    query_scaling_length: int = 1

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        for name in ("chunked_layers", "unrotated_layers"):
            layers = getattr(self, name)
            if list(layers) != sorted(set(layers)) or any(layer >= self.num_hidden_layers for layer in layers):
                found.append(f"{name} {list(layers)} must ascend and stay below {self.num_hidden_layers}")
        if self.chunked_layers and self.attention_chunk_size is None:
            found.append("attention_chunk_size is missing, but there are chunked_layers")
        return found


def _layers(
    fields: JsonFields, name: str, num_hidden_layers: int, accepted: tuple[Any, Any], default: Sequence[Any]
) -> tuple[int, ...]:
    """Returns the layers whose item in a list of the config is the first of the accepted ones."""
    items = fields.raw(name) or default
    if (
        not isinstance(items, (list, tuple))
        or len(items) != num_hidden_layers
        or any(item not in accepted for item in items)
    ):
        expected = f"expected {num_hidden_layers} times {accepted[0]} or {accepted[1]}"
        fields.problem(name, f"is {describe(items)}; {expected}")
        return ()
    return tuple(layer for layer, item in enumerate(items) if item == accepted[0])


def _dense_layers(fields: JsonFields, num_hidden_layers: int) -> tuple[int, ...]:
    """Reads the layers without experts: all but each interleave_moe_layer_step-th, or but those of moe_layers."""
    step = fields.integer("interleave_moe_layer_step", default=1)
    named = None if fields.raw("moe_layers") is None else fields.integers("moe_layers")
    with_experts = range(step - 1, num_hidden_layers, step) if named is None else named
    return tuple(layer for layer in range(num_hidden_layers) if layer not in with_experts)


def _scales_queries(fields: JsonFields) -> bool:
    """Reads attn_temperature_tuning; published models have an integer there."""
    stated = fields.raw("attn_temperature_tuning")
    if stated is None or is_integer(stated):
        return bool(stated != 0)
    return fields.boolean("attn_temperature_tuning")


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    interval = fields.integer("no_rope_layer_interval", default=4)
    chunk = 8192 if "attention_chunk_size" not in fields else fields.optional_integer("attention_chunk_size")
    rotated = [int((layer + 1) % interval != 0) for layer in range(num_hidden_layers)]
    unrotated = _layers(fields, "no_rope_layers", num_hidden_layers, (0, 1), rotated)
    kinds = [FULL_ATTENTION if layer in unrotated or chunk is None else _CHUNKED for layer in range(num_hidden_layers)]
    inner = fields.integer("intermediate_size")
    scaling, length = fields.number("attn_scale", default=0.1), fields.integer("floor_scale", default=8192)
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "moe_num_experts": fields.integer("num_local_experts", default=16),
        "moe_top_k": fields.integer("num_experts_per_tok", default=1),
        "moe_intermediate_size": inner,
        "moe_normalised": False,
        "shared_expert_intermediate_size": inner,
        "dense_layers": _dense_layers(fields, num_hidden_layers),
        "attention_chunk_size": chunk,
        "unrotated_layers": unrotated,
        "chunked_layers": _layers(fields, "layer_types", num_hidden_layers, (_CHUNKED, FULL_ATTENTION), kinds),
        "has_plain_norms": fields.boolean("use_qk_norm", default=True),
        "query_scaling_beta": scaling if _scales_queries(fields) else 0.0,
        "query_scaling_length": length,
    }


def _attention(
    net: Network, c: Llama4Config, layer: int, h: Value, x: Value, prefix: str, tables: dict[bool, RotaryTable]
) -> Value:
    qkv = net.linear(h, "attention.qkv", qkv_parts(c, prefix), split=Split.COLUMN, bias=c.attn_bias)
    is_rotated = layer not in c.unrotated_layers
    scaling = None
    if not is_rotated and c.query_scaling_beta != 0.0:
        scaling = QueryScaling(beta=c.query_scaling_beta, length=c.query_scaling_length, offset=1)
    attended = net.attention(
        qkv,
        tables[is_rotated],
        interleaved=is_rotated,
        norms_after_rotation=is_rotated and c.has_plain_norms,
        plain_norm_epsilon=c.norm_epsilon if is_rotated and c.has_plain_norms else None,
        query_scaling=scaling,
        chunk=c.attention_chunk_size if layer in c.chunked_layers else None,
    )
    dense = whole(f"{prefix}.o_proj", "attn_dense", c.hidden_size)
    return net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias, add_to=x)


def _mlp(net: Network, c: Llama4Config, layer: int, h: Value, x: Value, prefix: str) -> Value:
    if layer in c.dense_layers:
        return dense_mlp(net, c, h, x, prefix)
    routing = replace(c.routing(RouterScores.SIGMOID), scales_inputs=True)
    x = add_experts(net, c, h, x, prefix, routing, _NAMES)
    return add_shared_expert(net, h, x, f"{prefix}.shared_expert", c.moe_intermediate_size)


def _declare(net: Network, c: Llama4Config, *, model: str = "") -> None:
    """Declares the network; `model` is the path of the ...ForCausalLM in the Hugging Face model, with a dot."""
    decoder = f"{model}{MODEL}"
    x = net.embedding(f"{decoder}.embed_tokens")
    tables = {True: net.rotary(), False: net.no_rotation()}
    for layer in net.layers():
        p = f"{decoder}.layers.{layer}"
        with net.scope("attention"):
            h = net.rms_norm(x, f"{p}.input_layernorm", "input_layernorm")
            x = _attention(net, c, layer, h, x, f"{p}.self_attn", tables)
        with net.scope("mlp"):
            h = net.rms_norm(x, f"{p}.post_attention_layernorm", "post_layernorm")
            x = _mlp(net, c, layer, h, x, f"{p}.feed_forward")
    with net.scope("head"):
        h = net.rms_norm(x, f"{decoder}.norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, f"{model}lm_head", f"{decoder}.embed_tokens")


LLAMA4 = ModelFamily(
    architecture="Llama4ForCausalLM",
    config_class=Llama4Config,
    read_features=_read_features,
    declare=_declare,
    position_embedding_type=ROPE_INTERLEAVED,
    field_names={"intermediate_size": "intermediate_size_mlp"},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    default_rope_theta=500000.0,
    stacked_experts=replace(CONSECUTIVE_EXPERTS, inputs_first=True, swapped_by_peft=True),
    harmless_fields=ROUTER_FIELDS | {"for_llm_compressor"},
)

LLAMA4_VISION = replace(
    LLAMA4,
    architecture="Llama4ForConditionalGeneration",
    declare=partial(_declare, model="language_model."),
    # Adapters of the text alone have these names.
    older_names={f"{MODEL}.": f"language_model.{MODEL}.", "lm_head.": "language_model.lm_head."},
    vision=VisionTower(
        tensor_prefixes=("vision_model.", "multi_modal_projector."),
        fields=frozenset(
            """
            vision_config boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id image_token_id
            """.split()
        ),
        text_model_types=frozenset({"llama4_text"}),
    ),
)
