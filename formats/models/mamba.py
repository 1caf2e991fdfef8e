"""Mamba 2's layers: a causal convolution and the selective scan, with a state per sequence. Mamba2ForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...common.json_fields import JsonFields, describe, is_finite_number
from ..checkpoint.config import RELATIVE_POSITIONS
from ..network.network import Network
from ..network.operands import ScanShape, Value
from ..network.weights import Part, Split, whole
from .family import Features, ModelFamily, no_rope
from .recurrent import RecurrentConfig

NO_TIME_LIMIT: Final = 3.4028234663852886e38
"""The largest float32."""
_BACKBONE: Final = "backbone"
_HYBRID_FIELDS: Final = frozenset(
    """
    mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias
    time_step_limit
    """.split()
)


@dataclass(frozen=True, kw_only=True)
class MambaConfig(RecurrentConfig):
    """Fields of models with Mamba 2's layers."""

    mamba_layers: tuple[int, ...] = (0,)
    """Layers with a selective scan."""
    mamba_num_heads: int = 2
    mamba_head_dim: int = 4
    mamba_num_groups: int = 1
    """Groups of heads that share B and C, and of the norm after the scan."""
    mamba_state_dim: int = 4
    mamba_conv_kernel_dim: int = 2
    """Number of tokens that an output of the convolution depends on."""
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_time_min: float = 0.0
    """Bounds of the time steps."""
    mamba_time_max: float = NO_TIME_LIMIT

    @property
    def has_states(self) -> bool:
        """True if sequences keep states in addition to keys and values."""
        return bool(self.mamba_layers)

    @property
    def scan_shape(self) -> ScanShape:
        """Heads of the scans."""
        return ScanShape(
            num_heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            num_groups=self.mamba_num_groups,
            state_dim=self.mamba_state_dim,
        )

    @property
    def divided_sizes(self) -> tuple[str, ...]:
        """Fields that tp_size must divide."""
        return (*super().divided_sizes, "mamba_num_heads") if self.has_states else super().divided_sizes

    @property
    def shared_sizes(self) -> tuple[str, ...]:
        """Fields that tp_size must divide or be a multiple of."""
        return (*super().shared_sizes, "mamba_num_groups") if self.has_states else super().shared_sizes

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies() + self.layer_inconsistencies("mamba_layers", self.mamba_layers)
        if self.mamba_num_heads % self.mamba_num_groups != 0:
            found.append(
                f"mamba_num_heads {self.mamba_num_heads} is not a multiple of mamba_num_groups {self.mamba_num_groups}"
            )
        if self.mamba_time_min > self.mamba_time_max:
            found.append(f"mamba_time_min {self.mamba_time_min} is above mamba_time_max {self.mamba_time_max}")
        return found


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(MambaConfig):
    """Config of a model that has Mamba layers only."""

    @property
    def divided_sizes(self) -> tuple[str, ...]:
        """Fields that tp_size must divide."""
        return ("mamba_num_heads",)


def read_time_limits(fields: JsonFields, name: str = "time_step_limit") -> Features:
    """Reads the bounds of time steps; null or a missing field means none above 0."""
    stated = fields.raw(name)
    if stated is None:
        return {}
    if isinstance(stated, list) and len(stated) == 2:
        first, last = (_without_infinity(bound) for bound in stated)
        if is_finite_number(first) and is_finite_number(last) and 0 <= first <= last:
            return {"mamba_time_min": float(first), "mamba_time_max": min(float(last), NO_TIME_LIMIT)}
    fields.problem(name, f"is {describe(stated)}; expected two numbers, at least 0 and ascending")
    return {}


def read_mamba_features(fields: JsonFields, layers: tuple[int, ...], width: int | None = None) -> Features:
    """Reads the fields of Mamba layers in models that also have attention. Without such layers they mean nothing.

    width: of all heads together; None: mamba_expand times hidden_size.
    """
    if not layers:
        fields.discard(_HYBRID_FIELDS)
        return {}
    heads = fields.integer("mamba_n_heads", default=128)
    expand = fields.integer("mamba_expand", default=2)
    if width is None:
        width = expand * fields.integer("hidden_size")
    head_dim = width // heads
    if fields.raw("mamba_d_head") not in (None, "auto"):
        head_dim = fields.integer("mamba_d_head")
    if heads * head_dim != width:
        fields.problem("mamba_n_heads", f"times mamba_d_head is {heads * head_dim}; expected {width}, the width")
    return {
        "mamba_layers": layers,
        "mamba_num_heads": heads,
        "mamba_head_dim": max(1, head_dim),
        "mamba_num_groups": fields.integer("mamba_n_groups", default=1),
        "mamba_state_dim": fields.integer("mamba_d_state", default=256),
        "mamba_conv_kernel_dim": fields.integer("mamba_d_conv", default=4),
        "mamba_conv_bias": fields.boolean("mamba_conv_bias", default=True),
        "mamba_proj_bias": fields.boolean("mamba_proj_bias", default=False),
        **read_time_limits(fields),
    }


def _without_infinity(bound: object) -> Any:
    """Returns the largest float32 for infinity, which transformers 5 writes as an object."""
    return NO_TIME_LIMIT if bound in (float("inf"), {"__float__": "Infinity"}) else bound


@dataclass(frozen=True, kw_only=True)
class ScanFactors:
    """Factors of the outputs of in_proj."""

    gate: float = 1.0
    values: float = 1.0
    """Factor of x."""
    writing: float = 1.0
    """Factor of B."""
    reading: float = 1.0
    """Factor of C."""
    time: float = 1.0
    """Factor of dt."""


def mamba_scan(
    net: Network, c: MambaConfig, h: Value, prefix: str, factors: ScanFactors | None = None
) -> tuple[Value, Value]:
    """Declares the scan of the Mamba 2 layer `prefix` for `h`, and a value whose last columns are its gate."""
    shape = c.scan_shape
    convolved = shape.value_size + 2 * shape.group_size
    outputs = shape.value_size + convolved + shape.num_heads
    # The model's order is [gate | x | B | C | dt]; ops read the gate from the last columns.
    in_proj = Part(
        source=f"{prefix}.in_proj",
        module="mamba_in_proj",
        outputs=outputs,
        units=1,
        rows=(range(shape.value_size, outputs), range(shape.value_size)),
        source_outputs=outputs,
        sections=(
            (shape.value_size, shape.num_heads),
            (shape.group_size, shape.num_groups),
            (shape.group_size, shape.num_groups),
            (shape.num_heads, shape.num_heads),
            (shape.value_size, shape.num_heads),
        ),
    )
    values = net.linear(h, "mamba.in_proj", [in_proj], split=Split.COLUMN, bias=c.mamba_proj_bias)
    if factors is not None:
        columns = [
            (shape.value_size, factors.values),
            (shape.group_size, factors.writing),
            (shape.group_size, factors.reading),
            (shape.num_heads, factors.time),
            (shape.value_size, factors.gate),
        ]
        values = net.scaled_columns(values, columns)
    values = net.causal_convolution(
        values,
        f"{prefix}.conv1d",
        "mamba.conv1d",
        width=convolved,
        taps=c.mamba_conv_kernel_dim,
        bias=c.mamba_conv_bias,
    )
    limits = (c.mamba_time_min, c.mamba_time_max)
    return net.selective_scan(values, shape, prefix, "mamba", time_limits=limits), values


def mamba_output(
    net: Network, c: MambaConfig, gated: Value, x: Value, prefix: str, *, bias: bool, scale: float
) -> Value:
    """Declares `x` plus `scale` times the last linear layer of the Mamba 2 layer `prefix`."""
    out_proj = whole(f"{prefix}.out_proj", "mamba_out_proj", c.hidden_size)
    return net.linear(gated, "mamba.out_proj", [out_proj], split=Split.ROW, bias=bias, add_to=x, scale=scale)


def mamba_layer(net: Network, c: MambaConfig, h: Value, x: Value, prefix: str, scale: float = 1.0) -> Value:
    """Declares `x` plus `scale` times the output of the Mamba 2 layer `prefix` for `h`."""
    shape = c.scan_shape
    scanned, values = mamba_scan(net, c, h, prefix)
    normed = net.gated_rms_norm(
        scanned,
        values,
        f"{prefix}.norm",
        "mamba.norm",
        head_size=shape.value_size,
        gate_first=True,
        num_groups=shape.num_groups,
    )
    return mamba_output(net, c, normed, x, prefix, bias=c.mamba_proj_bias, scale=scale)


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    proj_bias = fields.boolean("use_bias", default=False)
    heads, head_dim = fields.integer("num_heads", default=128), fields.integer("head_dim", default=64)
    expand, hidden = fields.integer("expand", default=2), fields.integer("hidden_size", default=4096)
    if expand * hidden != heads * head_dim:
        fields.problem("num_heads", f"times head_dim is {heads * head_dim}; expected expand times hidden_size")
    return {
        "mamba_layers": tuple(range(num_hidden_layers)),
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "mamba_num_groups": fields.integer("n_groups", default=8),
        "mamba_state_dim": fields.integer("state_size", default=128),
        "mamba_conv_kernel_dim": fields.integer("conv_kernel", default=4),
        "mamba_conv_bias": fields.boolean("use_conv_bias", default=True),
        "mamba_proj_bias": proj_bias,
        **read_time_limits(fields),
    }


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    """Adds sizes of attention and MLPs, which the model does not have."""
    return {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 1, "max_position_embeddings": 2048}


def _declare(net: Network, c: Mamba2Config) -> None:
    x = net.embedding(f"{_BACKBONE}.embeddings")
    for layer in net.layers():
        p = f"{_BACKBONE}.layers.{layer}"
        with net.scope("mamba"):
            h = net.rms_norm(x, f"{p}.norm", "input_layernorm")
            x = mamba_layer(net, c, h, x, f"{p}.mixer")
    with net.scope("head"):
        h = net.rms_norm(x, f"{_BACKBONE}.norm_f", "transformer.ln_f", logit_rows=True)
        net.lm_head(h, "lm_head", f"{_BACKBONE}.embeddings")


MAMBA2 = ModelFamily(
    architecture="Mamba2ForCausalLM",
    config_class=Mamba2Config,
    read_features=_read_features,
    read_rope=no_rope,
    declare=_declare,
    position_embedding_type=RELATIVE_POSITIONS,
    field_names={"rms_norm_eps": "layer_norm_epsilon"},
    fill_in=_fill_in,
    ignored_tensors=(),
    older_names={f"{_BACKBONE}.embedding.": f"{_BACKBONE}.embeddings."},
    # Fields of training, of kernels, and of initialisation. The residual stream is float32 in any case.
    harmless_fields=frozenset(
        """
        chunk_size rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_max time_step_min time_step_rank
        """.split()
    ),
)
