"""Gemma 4, and the text of its models that also take images and sound.

Attention has larger heads in layers without a window, norms of values, and keys and values that later layers share.
Some models have embeddings of each layer, or experts in addition to each MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ..._core import RouterScores, stage_layers
from ...common.json_fields import JsonFields, describe
from ..checkpoint.activation import Activation
from ..checkpoint.rotary import ProportionalScaling
from ..checkpoint.stacked_experts import CONSECUTIVE_EXPERTS
from ..network.network import Network
from ..network.operands import AttentionShape, RotaryTable, Routing, Value
from ..network.weights import Split, whole
from .decoder import MODEL
from .family import FULL_ATTENTION, SLIDING_ATTENTION, Features, ModelFamily, VisionTower, sliding_window_of_kinds
from .gemma2 import GEMMA_ACTIVATIONS
from .mixture import MixtureConfig, routed_experts

_VISION_DECODER: Final = "model.language_model"


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(MixtureConfig):
    """Fields of Gemma 4, in addition to Llama's. Those of `global` heads are about layers without a window."""

    rotary_local_base: float = 10000.0
    """Rotary base of layers with a window; the others have rotary_base."""
    global_rotary_share: float = 1.0
    """Share of a head's pairs that rotate."""
    global_rotary_factor: float = 1.0
    """Divisor of angles."""
    global_head_size: int = 4
    num_global_key_value_heads: int = 2
    global_values_from_keys: bool = False
    """True if values are the keys before their norm and their rotation; there is no v_proj then."""
    num_kv_shared_layers: int | None = None
    """Number of last layers that use the keys and values of an earlier layer of their kind; None: there are none."""
    wide_shared_mlps: bool = False
    """True if layers that share keys and values have an MLP of twice the intermediate size."""
    per_layer_input_size: int | None = 4
    """Width of each layer's own embeddings of tokens; None: there are none."""
    has_experts: bool = False
    final_logit_softcapping: float | None = None

    @property
    def num_experts(self) -> int:
        """Number of experts in each layer; 0: none."""
        return self.moe_num_experts if self.has_experts else 0

    @property
    def native_only(self) -> str | None:
        """Something in the network that TensorRT does not have, for messages."""
        return "heads of two sizes and norms of values"

    @property
    def num_token_tables(self) -> int:
        """Number of tables with a row for each token."""
        return 1 if self.per_layer_input_size is None else 2

    @property
    def first_shared_layer(self) -> int:
        """Number of layers that store keys and values."""
        return self.num_hidden_layers - (self.num_kv_shared_layers or 0)

    def has_window(self, layer: int) -> bool:
        """True if the layer's attention has a window."""
        return layer in self.sliding_window_layers

    def source_of_keys(self, layer: int) -> int | None:
        """Layer whose keys and values a layer uses; None: its own."""
        first = self.first_shared_layer
        if layer < first:
            return None
        return max(
            (before for before in range(first) if self.has_window(before) == self.has_window(layer)), default=None
        )

    def shape_of(self, layer: int) -> AttentionShape:
        """Heads of a layer's attention."""
        has_window = self.has_window(layer)
        return AttentionShape(
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads if has_window else self.num_global_key_value_heads,
            head_dim=self.head_size if has_window else self.global_head_size,
        )

    def mlp_size(self, layer: int) -> int:
        """Intermediate size of a layer's MLP."""
        is_wide = self.wide_shared_mlps and layer >= self.first_shared_layer
        return self.intermediate_size * (2 if is_wide else 1)

    def describe_layers(self) -> str:
        """Text for people: 30 of hidden size 2816, mlp 2112, 128 experts of 704, 8 a token."""
        wide = self.num_hidden_layers - self.first_shared_layer if self.wide_shared_mlps else 0
        return (
            f"{self.num_hidden_layers} of hidden size {self.hidden_size}, mlp {self.intermediate_size}"
            + (f" ({self.intermediate_size * 2} in {wide} of them)" if wide else "")
            + (f", {self.moe_num_experts} experts of {self.moe_intermediate_size}" if self.has_experts else "")
            + (f", {self.moe_top_k} a token" if self.has_experts else "")
            + (f", own embeddings of {self.per_layer_input_size}" if self.per_layer_input_size else "")
        )

    def describe_heads(self) -> str:
        """Text for people: 8 heads of 256, 2 for k and v; without a window 8 heads of 512, 1 for k and v."""
        return (
            f"{super().describe_heads()}; without a window {self.num_attention_heads} heads of "
            f"{self.global_head_size}, {self.num_global_key_value_heads} for k and v"
        )

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        if self.num_attention_heads % self.num_global_key_value_heads != 0:
            found.append(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_global_key_value_heads "
                f"{self.num_global_key_value_heads}"
            )
        if self.global_head_size % 2 != 0:
            found.append(f"global_head_size {self.global_head_size} is odd; rotary embedding needs an even number")
        if not 0 < self.global_rotary_share <= 1:
            found.append(f"global_rotary_share is {self.global_rotary_share}; expected above 0, up to 1")
        if self.global_rotary_factor <= 0:
            found.append(f"global_rotary_factor is {self.global_rotary_factor}; expected above 0")
        layers = range(self.first_shared_layer, self.num_hidden_layers)
        without = [layer for layer in layers if self.source_of_keys(layer) is None]
        if without:
            found.append(
                f"num_kv_shared_layers is {self.num_kv_shared_layers}, but layer {without[0]} has no earlier layer of "
                "its kind whose keys and values it can use"
            )
        return found

    @property
    def shared_sizes(self) -> tuple[str, ...]:
        """Fields that tp_size must divide or be a multiple of."""
        return (*super().shared_sizes, "num_global_key_value_heads")

    def mapping_inconsistencies(self) -> list[str]:
        """Lists reasons why this model cannot be cut by its mapping."""
        found = super().mapping_inconsistencies()
        stages = [stage_layers(self.num_hidden_layers, self.mapping.pp_size, n) for n in range(self.mapping.pp_size)]
        for layer in range(self.first_shared_layer, self.num_hidden_layers):
            source = self.source_of_keys(layer)
            first = max(first for first, _ in stages if first <= layer)
            if source is not None and source < first:
                found.append(
                    f"pp_size is {self.mapping.pp_size}, but layer {layer} uses the keys and values of layer {source}, "
                    "which is on an earlier stage; expected a pp_size with both on one stage"
                )
                break
        return found


def _read_features(fields: JsonFields, num_hidden_layers: int, *, is_unified: bool = False) -> Features:
    """Reads Gemma 4's fields. is_unified: the model has neither embeddings of each layer nor experts."""
    attention_bias = fields.boolean("attention_bias", default=False)
    # transformers makes the last layer one without a window, whatever layer_types says.
    windows = sliding_window_of_kinds(fields, num_hidden_layers, lambda layer: (layer + 1) % 6 != 0)
    layers = tuple(layer for layer in windows["sliding_window_layers"] if layer != num_hidden_layers - 1)
    windows = {"sliding_window": windows["sliding_window"] if layers else None, "sliding_window_layers": layers}
    if fields.raw("use_bidirectional_attention") is not None:
        # "vision": only tokens of images attend to later ones.
        fields.string("use_bidirectional_attention", choices=("vision",))
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "qk_layernorm": True,
        **windows,
        **_read_global_heads(fields, [layer for layer in range(num_hidden_layers) if layer not in layers]),
        "num_kv_shared_layers": fields.integer("num_kv_shared_layers", minimum=0, default=0) or None,
        "wide_shared_mlps": fields.boolean("use_double_wide_mlp", default=False),
        "per_layer_input_size": None if is_unified else _read_per_layer_inputs(fields),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping", above=True),
        **({"has_experts": False} if is_unified else _read_experts(fields)),
    }


def _read_global_heads(fields: JsonFields, layers: list[int]) -> Features:
    """Reads the heads of `layers`: from fields of published models, or as transformers 5.24 writes them."""
    values_from_keys = fields.boolean("attention_k_eq_v", default=False)
    head_size = fields.optional_integer("head_dim") or 1
    kv_heads = fields.optional_integer("num_key_value_heads") or 1
    size = fields.optional_integer("global_head_dim") or 512
    # transformers ignores it without attention_k_eq_v.
    global_kv_heads = fields.optional_integer("num_global_key_value_heads")
    found = (size, global_kv_heads if values_from_keys and global_kv_heads is not None else kv_heads)
    by_layer = fields.object("per_layer_config", optional=True)
    if by_layer is not None:
        own = {}
        for layer in layers:
            of_layer = by_layer.object(str(layer), optional=True)
            own[layer] = (head_size, kv_heads)
            if of_layer is not None:
                own[layer] = (
                    of_layer.optional_integer("head_dim") or head_size,
                    of_layer.optional_integer("num_key_value_heads") or kv_heads,
                )
                of_layer.refuse_remaining()
        by_layer.refuse_remaining()
        if len(set(own.values())) > 1:
            fields.problem("per_layer_config", f"differs between layers of {FULL_ATTENTION}; expected the same heads")
        found = next(iter(own.values()), found)
    return {
        "global_head_size": found[0],
        "num_global_key_value_heads": found[1],
        "global_values_from_keys": values_from_keys,
    }


def _read_per_layer_inputs(fields: JsonFields) -> int | None:
    size = fields.integer("hidden_size_per_layer_input", minimum=0, default=256) or None
    rows = fields.optional_integer("vocab_size_per_layer_input") or 262144
    vocab_size = fields.raw("vocab_size")
    if size is not None and rows != vocab_size:
        fields.problem("vocab_size_per_layer_input", f"is {rows}; expected vocab_size, {describe(vocab_size)}")
    return size


def _read_experts(fields: JsonFields) -> Features:
    names = {"moe_num_experts": "num_experts", "moe_top_k": "top_k_experts", "moe_intermediate_size": None}
    if not fields.boolean("enable_moe_block", default=False):
        fields.discard(name or ours for ours, name in names.items())
        return {"has_experts": False}
    return {"has_experts": True, **{ours: fields.integer(name or ours) for ours, name in names.items()}}


def _read_rope(fields: JsonFields, max_position_embeddings: int) -> Features:
    found = {
        "rotary_base": 1e6,
        "rotary_local_base": 1e4,
        "global_rotary_share": 0.25,
        "global_rotary_factor": 1.0,
    }
    parameters = fields.object("rope_parameters", optional=True)
    if parameters is None:
        return found
    windowed = parameters.object(SLIDING_ATTENTION, optional=True)
    if windowed is not None:
        windowed.string("rope_type", choices=("default",), default="default")
        found["rotary_local_base"] = windowed.number("rope_theta", above=True)
        share = windowed.optional_number("partial_rotary_factor")
        if share not in (None, 1.0):
            windowed.problem("partial_rotary_factor", f"is {share}; only rotation of the whole head is supported")
    whole_head = parameters.object(FULL_ATTENTION)
    if whole_head is not None:
        kind = whole_head.string("rope_type", choices=("proportional", "default"), default="default")
        found["rotary_base"] = whole_head.number("rope_theta", above=True)
        share = whole_head.optional_number("partial_rotary_factor", above=True)
        found["global_rotary_share"] = 1.0 if share is None else share
        found["global_rotary_factor"] = whole_head.optional_number("factor", above=True) or 1.0
        if kind == "default" and (share or 1.0) != 1.0:
            whole_head.problem("partial_rotary_factor", f"is {share}; expected rope_type proportional, or 1")
    return found


def _attention(net: Network, c: Gemma4Config, h: Value, layer: int, prefix: str, rotary: RotaryTable) -> Value:
    """Declares the output of a layer's attention for `h`."""
    shape, source = c.shape_of(layer), c.source_of_keys(layer)
    values_from_keys = c.global_values_from_keys and not c.has_window(layer)
    keys = {"k_proj": "attn_k"} if values_from_keys else {"k_proj": "attn_k", "v_proj": "attn_v"}
    parts = [whole(f"{prefix}.q_proj", "attn_q", shape.query_size, shape.num_attention_heads)]
    key_norm = None
    if source is None:
        size, heads = shape.key_value_size, shape.num_key_value_heads
        parts += [whole(f"{prefix}.{name}", module, size, heads) for name, module in keys.items()]
        key_norm = net.head_norm(f"{prefix}.k_norm", "attention.k_layernorm", shape.head_dim)
    else:  # Published models have these tensors nevertheless.
        net.unused_tensors.update(f"{prefix}.{name}.weight" for name in ("k_norm", "k_proj", "v_proj"))
        if c.attn_bias:
            net.unused_tensors.update(f"{prefix}.{name}.bias" for name in ("k_proj", "v_proj"))
    qkv = net.linear(h, "attention.qkv", parts, split=Split.COLUMN, bias=c.attn_bias)
    attended = net.attention(
        qkv,
        rotary,
        window=c.window_of(layer),
        scale=1.0,
        query_norm=net.head_norm(f"{prefix}.q_norm", "attention.q_layernorm", shape.head_dim),
        key_norm=key_norm,
        shape=shape,
        normalizes_values=source is None,
        values_from_keys=values_from_keys and source is None,
        shared_layer=source,
    )
    dense = whole(f"{prefix}.o_proj", "attn_dense", c.hidden_size)
    return net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=c.attn_dense_bias)


def _mlp(net: Network, c: Gemma4Config, x: Value, layer: int, prefix: str) -> Value:
    """Declares the output of a layer's MLP, and of its experts, for the residual stream `x`."""
    activation = Activation(c.hidden_act)
    h = net.rms_norm(x, f"{prefix}.pre_feedforward_layernorm", "pre_feedforward_layernorm")
    gate, up = (
        net.weight(h, name, [whole(f"{prefix}.mlp.{source}", module, c.mlp_size(layer))])
        for name, source, module in (("mlp.fc", "gate_proj", "mlp_h_to_4h"), ("mlp.gate", "up_proj", "mlp_gate"))
    )
    made = net.gated(h, gate, up, activation)
    made = net.linear(
        made, "mlp.proj", [whole(f"{prefix}.mlp.down_proj", "mlp_4h_to_h", c.hidden_size)], split=Split.ROW
    )
    return _with_experts(net, c, x, made, prefix, activation) if c.has_experts else made


def _with_experts(net: Network, c: Gemma4Config, x: Value, made: Value, prefix: str, activation: Activation) -> Value:
    """Declares the sum of two norms: of an MLP's output `made`, and of the experts' output for `x`."""
    name = "post_feedforward_layernorm"
    total = net.rms_norm(made, f"{prefix}.{name}_1", f"{name}_1", is_stream=True)
    routed = net.rms_norm(x, f"{prefix}.router", "mlp.router_norm", weight="scale")
    router = [whole(f"{prefix}.router.proj", "moe_router", c.moe_num_experts)]
    scale = c.hidden_size**-0.5
    logits = net.linear(routed, "mlp.router", router, split=Split.NONE, scale=scale, quantized=False)
    h = net.rms_norm(x, f"{prefix}.pre_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    expert_scale = net.float32_vector(
        f"{prefix}.router.per_expert_scale", "mlp.router.per_expert_scale", c.moe_num_experts
    )
    routing = Routing(scores=RouterScores.SOFTMAX, top_k=c.moe_top_k, norm_topk_prob=True, expert_scale=expert_scale)
    of_experts = routed_experts(net, c, h, logits, None, prefix, routing, activation=activation)
    return net.rms_norm(of_experts, f"{prefix}.{name}_2", f"{name}_2", add_to=total)


def _per_layer_inputs(net: Network, c: Gemma4Config, x: Value, decoder: str, size: int) -> Value:
    """Declares the inputs of all layers [layers * size], from the tokens and from their embeddings `x`."""
    width = c.num_hidden_layers * size
    with net.scope("per_layer_inputs"):
        name = "per_layer_model_projection"
        projected = net.linear(
            net.cast(x),
            f"transformer.{name}",
            [whole(f"{decoder}.{name}", name, width)],
            split=Split.NONE,
            scale=c.hidden_size**-0.5,
            adapted_layer=0,
        )
        of_tokens = net.second_embedding(
            f"{decoder}.embed_tokens_per_layer", "transformer.per_layer_embedding", width, math.sqrt(size)
        )
        return net.rms_norm(
            projected,
            f"{decoder}.per_layer_projection_norm",
            "transformer.per_layer_projection_norm",
            num_groups=c.num_hidden_layers,
            add_to=of_tokens,
            sum_scale=2.0**-0.5,
        )


def _declare(net: Network, c: Gemma4Config, *, decoder: str) -> None:
    x = net.embedding(f"{decoder}.embed_tokens", scale=math.sqrt(c.hidden_size))
    size = c.per_layer_input_size
    inputs = None if size is None else _per_layer_inputs(net, c, x, decoder, size)
    scaling = ProportionalScaling(share=c.global_rotary_share, factor=c.global_rotary_factor)
    tables = {
        False: net.rotary(c.global_head_size, c.rotary_base, scaling),
        True: net.rotary(c.head_size, c.rotary_local_base, scope="local_rotary"),
    }
    for layer in net.layers():
        p = f"{decoder}.layers.{layer}"
        layer_scale = net.float32_vector(f"{p}.layer_scalar", "layer_scalar", 1)
        with net.scope("attention"):
            h = net.rms_norm(x, f"{p}.input_layernorm", "input_layernorm")
            h = _attention(net, c, h, layer, f"{p}.self_attn", tables[c.has_window(layer)])
            x = net.rms_norm(h, f"{p}.post_attention_layernorm", "post_layernorm", add_to=x)
        with net.scope("mlp"):
            h = _mlp(net, c, x, layer, p)
            name = "post_feedforward_layernorm"
            factor = layer_scale if inputs is None else None
            x = net.rms_norm(h, f"{p}.{name}", name, add_to=x, sum_scale=factor)
        if inputs is None or size is None:
            continue
        with net.scope("per_layer_input"):
            name = "per_layer_input_gate"
            gate = net.linear(net.cast(x), name, [whole(f"{p}.{name}", name, size)], split=Split.NONE)
            h = net.gated_columns(gate, inputs, layer * size, Activation(c.hidden_act))
            name = "per_layer_projection"
            h = net.linear(h, name, [whole(f"{p}.{name}", name, c.hidden_size)], split=Split.NONE)
            name = "post_per_layer_input_norm"
            x = net.rms_norm(h, f"{p}.{name}", name, add_to=x, sum_scale=layer_scale)
    with net.scope("head"):
        h = net.rms_norm(x, f"{decoder}.norm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{decoder}.embed_tokens", softcap=c.final_logit_softcapping)


_NAMES_IN_DECODER: Final = (
    "embed_tokens",
    "embed_tokens_per_layer",
    "layers",
    "norm",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)

GEMMA4 = ModelFamily(
    architecture="Gemma4ForCausalLM",
    bare_architectures=frozenset({"Gemma4TextModel"}),
    config_class=Gemma4Config,
    read_features=_read_features,
    read_rope=_read_rope,
    declare=partial(_declare, decoder=MODEL),
    activations=GEMMA_ACTIVATIONS,
    # Names in models that also take images, from which transformers loads the text alone too.
    older_names={f"{_VISION_DECODER}.": f"{MODEL}."},
    field_names={"hidden_act": "hidden_activation"},
    tied_by_default=True,
    stacked_experts=CONSECUTIVE_EXPERTS,
    harmless_fields=frozenset({"cache_implementation"}),
)

_IMAGES_AND_SOUND: Final = VisionTower(
    tensor_prefixes=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    fields=frozenset(
        """
        vision_config audio_config boi_token_id eoi_token_id image_token_id video_token_id boa_token_id
        eoa_token_id eoa_token_index audio_token_id vision_soft_tokens_per_image
        """.split()
    ),
    text_model_types=frozenset({"gemma4_text"}),
)

GEMMA4_VISION = replace(
    GEMMA4,
    architecture="Gemma4ForConditionalGeneration",
    bare_architectures=frozenset(),
    declare=partial(_declare, decoder=_VISION_DECODER),
    # Adapters of the text alone have these names.
    older_names={f"{MODEL}.{name}.": f"{_VISION_DECODER}.{name}." for name in _NAMES_IN_DECODER},
    vision=_IMAGES_AND_SOUND,
)

GEMMA4_UNIFIED = replace(
    GEMMA4,
    architecture="Gemma4UnifiedForCausalLM",
    bare_architectures=frozenset({"Gemma4UnifiedTextModel"}),
    read_features=partial(_read_features, is_unified=True),
    neutral_fields={"enable_moe_block": False, "hidden_size_per_layer_input": 0},
    stacked_experts=None,
)

GEMMA4_UNIFIED_VISION = replace(
    GEMMA4_UNIFIED,
    architecture="Gemma4UnifiedForConditionalGeneration",
    bare_architectures=frozenset(),
    declare=GEMMA4_VISION.declare,
    older_names=GEMMA4_VISION.older_names,
    vision=replace(
        _IMAGES_AND_SOUND,
        tensor_prefixes=("model.embed_vision.", "model.embed_audio."),
        text_model_types=frozenset({"gemma4_unified_text"}),
    ),
)
