"""FalconH1ForCausalLM (Falcon-H1): each layer has attention beside a Mamba layer, with factors of many values."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.json_fields import JsonFields, describe
from ..network.network import Network
from ..network.operands import RotaryTable, Value
from ..network.weights import Split, whole
from .decoder import MODEL, dense_mlp, qkv_parts
from .family import Features, ModelFamily
from .mamba import MambaConfig, ScanFactors, mamba_output, mamba_scan, read_mamba_features

_NUMBERS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(MambaConfig):
    """Fields of Falcon-H1, in addition to those of Mamba layers."""

    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of the outputs of in_proj: of the gate, x, B, C and dt."""
    mlp_multipliers: tuple[float, ...] = (1.0, 1.0)
    """Factors of an MLP's gate and of its output."""
    mamba_out_bias: bool = False
    """True if out_proj has a bias."""
    mamba_has_norm: bool = False
    """True if a norm follows the scan."""
    mamba_norm_before_gate: bool = True

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        counts = (("ssm_multipliers", self.ssm_multipliers, 5), ("mlp_multipliers", self.mlp_multipliers, 2))
        wrong = [
            f"{name} has {len(found)} numbers; expected {count}" for name, found, count in counts if len(found) != count
        ]
        return super().inconsistencies() + wrong


def _numbers(fields: JsonFields, name: str, count: int) -> tuple[float, ...]:
    """Reads `count` numbers, by default ones."""
    found = fields.numbers(name) or (1.0,) * count
    if len(found) != count:
        fields.problem(name, f"is {describe(list(found))}; expected {count} numbers")
        return (1.0,) * count
    return found


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    width = 1024 if "mamba_d_ssm" not in fields else fields.optional_integer("mamba_d_ssm")
    return {
        "attn_bias": attention_bias,
        "attn_dense_bias": attention_bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "mamba_out_bias": fields.boolean("projectors_bias", default=False),
        "mamba_has_norm": fields.boolean("mamba_rms_norm", default=False),
        "mamba_norm_before_gate": fields.boolean("mamba_norm_before_gate", default=True),
        "ssm_multipliers": _numbers(fields, "ssm_multipliers", 5),
        "mlp_multipliers": _numbers(fields, "mlp_multipliers", 2),
        **{name: fields.number(name, default=1.0) for name in _NUMBERS},
        **read_mamba_features(fields, tuple(range(num_hidden_layers)), width),
    }


def _mamba(net: Network, c: FalconH1Config, h: Value, x: Value, prefix: str) -> Value:
    gate, values, writing, reading, time = c.ssm_multipliers
    factors = ScanFactors(gate=gate, values=values, writing=writing, reading=reading, time=time)
    scanned, gates = mamba_scan(net, c, h, prefix, factors)
    if c.mamba_has_norm:
        gated = net.gated_rms_norm(
            scanned,
            gates,
            f"{prefix}.norm",
            "mamba.norm",
            head_size=scanned.width,
            gate_first=not c.mamba_norm_before_gate,
            num_groups=c.mamba_num_groups,
        )
    else:
        gated = net.silu_gate(scanned, gates)
    return mamba_output(net, c, gated, x, prefix, bias=c.mamba_out_bias, scale=c.ssm_out_multiplier)


def _attention(net: Network, c: FalconH1Config, h: Value, x: Value, prefix: str, rotary: RotaryTable) -> Value:
    qkv = net.linear(h, "attention.qkv", qkv_parts(c, prefix), split=Split.COLUMN, bias=c.attn_bias)
    attended = net.attention(qkv, rotary, scale=c.key_multiplier * c.head_size**-0.5)
    dense = whole(f"{prefix}.o_proj", "attn_dense", c.hidden_size)
    return net.linear(
        attended,
        "attention.dense",
        [dense],
        split=Split.ROW,
        bias=c.attn_dense_bias,
        add_to=x,
        scale=c.attention_out_multiplier,
    )


def _declare(net: Network, c: FalconH1Config) -> None:
    x = net.embedding(f"{MODEL}.embed_tokens", scale=c.embedding_multiplier)
    rotary = net.rotary()
    gate_scale, down_scale = c.mlp_multipliers
    for layer in net.layers():
        p = f"{MODEL}.layers.{layer}"
        with net.scope("mixers"):
            # Adapters and biases come after the factors of inputs, so no linear layer's scale can replace these.
            h = net.rms_norm(x, f"{p}.input_layernorm", "input_layernorm", is_stream=True)
            x = _mamba(net, c, net.scaled(h, c.ssm_in_multiplier), x, f"{p}.mamba")
            x = _attention(net, c, net.scaled(h, c.attention_in_multiplier), x, f"{p}.self_attn", rotary)
        with net.scope("mlp"):
            h = net.rms_norm(x, f"{p}.pre_ff_layernorm", "post_layernorm")
            x = dense_mlp(net, c, h, x, f"{p}.feed_forward", down_scale, gate_scale)
    with net.scope("head"):
        h = net.rms_norm(x, f"{MODEL}.final_layernorm", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{MODEL}.embed_tokens", scale=c.lm_head_multiplier)


FALCON_H1 = ModelFamily(
    architecture="FalconH1ForCausalLM",
    config_class=FalconH1Config,
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    neutral_fields={"mamba_use_mlp": True},
    # Fields of kernels, and one that transformers does not read.
    harmless_fields=frozenset({"mamba_chunk_size", "mlp_expansion_factor", "num_logits_to_keep"}),
)
