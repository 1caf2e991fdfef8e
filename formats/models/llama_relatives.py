"""Families with Llama's network and their own names: Seed-OSS, ERNIE 4.5, Helium, Ministral and CWM."""

from __future__ import annotations

from ...common.json_fields import JsonFields
from ..checkpoint.config import ROPE_INTERLEAVED
from .decoder import declare_llama_like
from .family import Features, ModelFamily, sliding_window_of_kinds


def _read_seed_oss(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        "attn_bias": fields.boolean("attention_bias", default=True),
        "attn_dense_bias": fields.boolean("attention_out_bias", default=False),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
    }


SEED_OSS = ModelFamily(
    architecture="SeedOssForCausalLM",
    read_features=_read_seed_oss,
    declare=declare_llama_like,
    harmless_fields=frozenset({"residual_dropout"}),
)


def _read_ernie(fields: JsonFields, num_hidden_layers: int) -> Features:
    bias = fields.boolean("use_bias", default=False)
    return {"attn_bias": bias, "attn_dense_bias": bias, "mlp_bias": bias}


ERNIE4_5 = ModelFamily(
    architecture="Ernie4_5ForCausalLM",
    read_features=_read_ernie,
    declare=declare_llama_like,
    position_embedding_type=ROPE_INTERLEAVED,
    default_rope_theta=500000.0,
    tied_by_default=True,
)


def _read_helium(fields: JsonFields, num_hidden_layers: int) -> Features:
    # o_proj never has a bias.
    return {
        "attn_bias": fields.boolean("attention_bias", default=False),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
    }


HELIUM = ModelFamily(
    architecture="HeliumForCausalLM",
    read_features=_read_helium,
    declare=declare_llama_like,
    position_embedding_type=ROPE_INTERLEAVED,
    default_rope_theta=100000.0,
)


def _read_ministral(fields: JsonFields, num_hidden_layers: int) -> Features:
    has_window = fields.raw("sliding_window") is not None
    return sliding_window_of_kinds(fields, num_hidden_layers, lambda layer: has_window)


MINISTRAL = ModelFamily(
    architecture="MinistralForCausalLM",
    read_features=_read_ministral,
    declare=declare_llama_like,
    neutral_fields={"attention_bias": False, "mlp_bias": False},
)


def _read_cwm(fields: JsonFields, num_hidden_layers: int) -> Features:
    return sliding_window_of_kinds(fields, num_hidden_layers, lambda layer: layer % 4 != 0)


CWM = ModelFamily(
    architecture="CwmForCausalLM",
    read_features=_read_cwm,
    declare=declare_llama_like,
    default_rope_theta=1000000.0,
    neutral_fields={"attention_bias": False, "mlp_bias": False},
)
