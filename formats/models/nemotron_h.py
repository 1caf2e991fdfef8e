"""NemotronHForCausalLM (Nemotron-H): each layer is a Mamba layer, attention without positions, or an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..._core import stage_layers
from ...common.json_fields import JsonFields, describe
from ..network.network import Network
from ..network.operands import RotaryTable, Value
from ..network.weights import Split, whole
from .decoder import MODEL, plain_mlp, qkv_parts
from .family import Features, ModelFamily, no_rope
from .mamba import MambaConfig, mamba_layer
from .mixture import ROUTER_FIELDS

_MAMBA, _ATTENTION, _MLP = "linear_attention", "full_attention", "mlp"
_KINDS: Final = {"M": _MAMBA, "mamba": _MAMBA, "*": _ATTENTION, "attention": _ATTENTION, "-": _MLP}
"""Kinds of layers, by other names and by their letters in hybrid_override_pattern."""


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(MambaConfig):
    """Fields of Nemotron-H, in addition to those of Mamba layers."""

    attention_layers: tuple[int, ...] = ()
    """Layers with attention. Those that are neither these nor Mamba layers are MLPs."""

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies() + self.layer_inconsistencies("attention_layers", self.attention_layers)
        if both := sorted(set(self.attention_layers) & set(self.mamba_layers)):
            found.append(f"attention_layers and mamba_layers share {both}")
        return found

    def mapping_inconsistencies(self) -> list[str]:
        """Lists reasons why this model cannot be cut by its mapping."""
        found = super().mapping_inconsistencies()
        stages = self.mapping.pp_size
        for stage in range(stages) if 1 < stages <= self.num_hidden_layers else ():
            first, count = stage_layers(self.num_hidden_layers, stages, stage)
            if set(range(first, first + count)).isdisjoint({*self.mamba_layers, *self.attention_layers}):
                found.append(
                    f"pp_size {stages} gives stage {stage} only MLPs (layers {first} to {first + count - 1}); "
                    "expected a Mamba layer or attention in each stage"
                )
        return found


def _kinds(fields: JsonFields) -> list[Any]:
    """Reads the kind of each layer: layers_block_type, layer_types, or the letters of hybrid_override_pattern."""
    stated = [fields.raw(name) for name in ("layers_block_type", "layer_types", "hybrid_override_pattern")]
    kinds: Any = next((kind for kind in stated if kind is not None), [])
    if not isinstance(kinds, (list, str)):
        return [kinds]
    return [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    return {"num_hidden_layers": len(_kinds(fields))}


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    kinds = _kinds(fields)
    if len(kinds) != num_hidden_layers or any(kind not in (_MAMBA, _ATTENTION, _MLP) for kind in kinds):
        fields.problem(
            "layers_block_type",
            f"is {describe(kinds)}; expected {num_hidden_layers} times {_MAMBA}, {_ATTENTION} or {_MLP}; layers with "
            "experts are not supported",
        )
    return {
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "attention_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == _ATTENTION),
        "mamba_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == _MAMBA),
        "mamba_num_heads": fields.integer("mamba_num_heads", default=128),
        "mamba_head_dim": fields.integer("mamba_head_dim", default=64),
        "mamba_num_groups": fields.integer("n_groups", default=8),
        "mamba_state_dim": fields.integer("ssm_state_size", default=128),
        "mamba_conv_kernel_dim": fields.integer("conv_kernel", default=4),
        "mamba_conv_bias": fields.boolean("use_conv_bias", default=True),
        "mamba_proj_bias": fields.boolean("use_bias", default=False),
        "mamba_time_min": fields.number("time_step_min", default=0.001),
    }


def _attention(net: Network, c: NemotronHConfig, h: Value, x: Value, prefix: str, rotary: RotaryTable) -> Value:
    qkv = net.linear(h, "attention.qkv", qkv_parts(c, prefix), split=Split.COLUMN)
    dense = whole(f"{prefix}.o_proj", "attn_dense", c.hidden_size)
    return net.linear(net.attention(qkv, rotary), "attention.dense", [dense], split=Split.ROW, add_to=x)


def _declare(net: Network, c: NemotronHConfig) -> None:
    x = net.embedding(f"{MODEL}.embeddings")
    rotary = net.no_rotation()
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("mixer"):
            h = net.rms_norm(x, f"{p}.norm", "input_layernorm")
            if layer in c.mamba_layers:
                x = mamba_layer(net, c, h, x, f"{p}.mixer")
            elif layer in c.attention_layers:
                x = _attention(net, c, h, x, f"{p}.mixer", rotary)
            else:
                x = plain_mlp(net, c, h, x, f"{p}.mixer")
    with net.scope("head"):
        h = net.rms_norm(x, f"{MODEL}.norm_f", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embeddings")


NEMOTRON_H = ModelFamily(
    architecture="NemotronHForCausalLM",
    config_class=NemotronHConfig,
    read_features=_read_features,
    read_rope=no_rope,
    declare=_declare,
    fill_in=_fill_in,
    field_names={"hidden_act": "mlp_hidden_act", "rms_norm_eps": "layer_norm_epsilon"},
    optional_fields=frozenset({"num_key_value_heads"}),
    activations={"relu2": "relu_squared"},
    ignored_tensors=(),
    prediction_tensors=r"mtp\..+",
    older_names={"backbone.": f"{MODEL}."},
    neutral_fields={"attention_bias": False, "mamba_hidden_act": "silu"},
    # Fields of training, kernels and initialisation, of layers with experts, and of heads that are not used.
    harmless_fields=ROUTER_FIELDS
    | frozenset(
        """
        chunk_size expand hidden_dropout mamba_proj_bias mamba_ssm_cache_dtype moe_intermediate_size moe_latent_size
        moe_shared_expert_intermediate_size moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type
        n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_logits_to_keep
        num_nextn_predict_layers rescale_prenorm_residual residual_in_fp32 rope_theta routed_scaling_factor
        time_step_floor time_step_limit time_step_max topk_group use_mamba_kernels
        """.split()
    ),
)
