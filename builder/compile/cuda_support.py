"""The networks that backend cuda runs: a list of ops and of the values that their fields may have.

An op or field that is not in the list is refused, so nothing that is added to networks later is ignored by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import fields, replace
from typing import Any, Final

from ..._core import AttentionKind, QuantAlgo
from ...formats.checkpoint.activation import Activation
from ...formats.checkpoint.quantization import QuantConfig
from ...formats.engine.build_config import CUDA, NATIVE
from ...formats.network.network import Network
from ...formats.network.operands import LatentShape, Routing
from ...formats.network.ops import (
    Attention,
    Cast,
    CausalConvolution,
    Embedding,
    Experts,
    GatedAdd,
    GatedColumns,
    GatedConvolution,
    GatedDelta,
    GatedRmsNorm,
    LatentQueries,
    LatentValues,
    LayerNorm,
    Linear,
    Op,
    RmsNorm,
    Rotary,
    Scale,
    SelectiveScan,
    SigmoidGate,
    SiluGate,
    Xielu,
)
from ...formats.network.weights import LinearWeight
from .emit_linear import exact_outputs

WIDTH_MULTIPLE: Final = 8
"""Kernels read rows in pieces of this many elements."""
MOST_HEAD_DIM: Final = 512
MOST_HEAD_DIM_NORMED_LATE: Final = 256
"""Maximum head_dim if norms come after the rotation: a warp has one head."""
MOST_KEY_DIM: Final = 576
"""Maximum width of a compressed row with its rotated elements (latent attention)."""
ROTATED_MULTIPLE: Final = 16
"""Rotated elements of a compressed row."""
MOST_STATE_ROWS: Final = 256
MOST_TAPS: Final = 4
MOST_EXPERTS: Final = 1024
MOST_EXPERTS_OF_TOKEN: Final = 32
COLUMNS_TOGETHER: Final = 16
"""Inputs of quantised weights that one instruction multiplies."""

_Problem = str | None
_Check = Callable[[Any], _Problem]


def problems_of_network(network: Network) -> list[str]:
    """Lists everything for which backend cuda has no kernel, each once."""
    architecture = network.config.architecture
    found = dict.fromkeys(problem for op in network.ops for problem in _problems_of_op(op))
    problems = [
        f"{architecture} needs {missing}, which backend {CUDA} does not have; use backend {NATIVE}" for missing in found
    ]
    exact = exact_outputs(network)
    sizes = dict.fromkeys(problem for op in network.ops for problem in _size_problems(op, exact))
    if network.config.quantization is not None:
        for weight in _quantized_weights(network):
            how = network.config.quantization.of_weight(f"{weight.name}.weight")
            sizes |= dict.fromkeys(_quantization_problems(how, weight.inputs))
    return problems + [f"{architecture} has {problem}; use backend {NATIVE}" for problem in sizes]


def _problems_of_op(op: Op) -> Iterator[str]:
    """Yields what an op needs: the op itself, or one of its fields."""
    name = type(op).__name__
    accepted = _ACCEPTED.get(type(op))
    if accepted is None:
        yield f"the op {name}"
        return
    for field in fields(op):
        check = accepted.get(field.name, _needs_default)
        problem = check(getattr(op, field.name))
        if problem is not None:
            yield f"the op {name} with {field.name}{problem}"
    if isinstance(op, Linear):
        yield from _problems_of_linear(op)
    if isinstance(op, RmsNorm) and op.add_to is None and op.weight.shape != (op.input.width,):
        yield "the op RmsNorm of groups without add_to"
    if isinstance(op, Attention) and op.norms_after_rotation and op.normalizes_values:
        yield "the op Attention with normalizes_values and norms_after_rotation"
    if isinstance(op, Attention) and op.shape.values_are_keys:
        for name in ("softcap", "sinks", "query_norm", "key_norm", "chunk", "plain_norm_epsilon", "query_scaling"):
            if getattr(op, name) is not None:
                yield f"the op Attention with {name} and keys as values"
    if isinstance(op, Attention) and op.values_from_keys and (op.key_norm is None or not op.normalizes_values):
        yield "the op Attention with values_from_keys, and without norms of keys and values"


def _problems_of_linear(op: Linear) -> Iterator[str]:
    """Yields the combinations of a linear layer's fields that no kernel computes."""
    is_gated = len(op.weights) == 2
    if op.activation is not None:
        accepted = _GATED if is_gated else _ACTIVATED
        if op.activation not in accepted:
            yield f"the op Linear with the activation {op.activation.value} and {'a' if is_gated else 'no'} gate"
        if op.add_to is not None:
            yield "the op Linear with activation and add_to"
    if op.layer is None and (op.activation is not None or op.add_to is not None):
        yield "the op Linear with activation or add_to in lm_head"


def _size_problems(op: Op, exact: Set[str]) -> Iterator[str]:
    """exact: names of the values that linear layers store as float32."""
    if isinstance(op, (LatentQueries, LatentValues)):
        yield from _latent_size_problems(op.shape)
    if isinstance(op, Attention) and not op.shape.values_are_keys:
        size = op.shape.head_dim
        if size % WIDTH_MULTIPLE or size > MOST_HEAD_DIM:
            accepted = f"a multiple of {WIDTH_MULTIPLE} up to {MOST_HEAD_DIM}"
            yield f"a head_dim of {size}; expected {accepted} with backend {CUDA}"
        half = op.rotary.cosine.width
        if op.norms_after_rotation and size > MOST_HEAD_DIM_NORMED_LATE:
            yield (
                f"a head_dim of {size} with norms after the rotation; expected up to {MOST_HEAD_DIM_NORMED_LATE} with "
                f"backend {CUDA}"
            )
        if op.norms_after_rotation and half % WIDTH_MULTIPLE:
            yield (
                f"{2 * half} rotated elements of a head with norms after the rotation; expected a multiple of "
                f"{2 * WIDTH_MULTIPLE} with backend {CUDA}"
            )
    if isinstance(op, (CausalConvolution, GatedConvolution)) and op.weight.shape[-1] > MOST_TAPS:
        yield f"convolutions over {op.weight.shape[-1]} tokens; expected at most {MOST_TAPS} with backend {CUDA}"
    if isinstance(op, (GatedDelta, SelectiveScan)):
        rows = op.shape.key_dim if isinstance(op, GatedDelta) else op.shape.state_dim
        if rows > MOST_STATE_ROWS:
            yield f"states of {rows} rows; expected at most {MOST_STATE_ROWS} with backend {CUDA}"
    if isinstance(op, Scale) and op.input.width % WIDTH_MULTIPLE:
        yield f"{op.input.width} scaled values; expected a multiple of {WIDTH_MULTIPLE} with backend {CUDA}"
    if isinstance(op, SigmoidGate):
        for what, size in (("a gate of attention", op.gate.width), ("attention with a gate", op.output.width)):
            if size % WIDTH_MULTIPLE:
                yield f"{what} of {size} elements; expected a multiple of {WIDTH_MULTIPLE} with backend {CUDA}"
    if isinstance(op, Experts) and len(op.down) > MOST_EXPERTS:
        yield f"{len(op.down)} experts; expected at most {MOST_EXPERTS} with backend {CUDA}"
    if isinstance(op, (Linear, Experts)):
        for weight in op.weights if isinstance(op, Linear) else (op.gate[0], op.down[0]):
            # Rows of zeros complete layers with float32 outputs, so they have any number of outputs.
            is_exact = isinstance(op, Linear) and (op.layer is None or op.output.name in exact)
            outputs = () if is_exact else weight.parts
            for what, size in (("inputs", weight.inputs), *(("outputs", part.outputs) for part in outputs)):
                if size % WIDTH_MULTIPLE:
                    yield (
                        f"a linear layer of {size} {what}; expected a multiple of {WIDTH_MULTIPLE} with backend {CUDA}"
                    )


def _latent_size_problems(shape: LatentShape) -> Iterator[str]:
    for what, size in (
        ("compressed rows", shape.latent_dim),
        ("queries without their rotated elements", shape.plain_dim),
        ("values", shape.value_dim),
    ):
        if size % WIDTH_MULTIPLE:
            yield f"{what} of {size} elements; expected a multiple of {WIDTH_MULTIPLE} with backend {CUDA}"
    if shape.rotary_dim % ROTATED_MULTIPLE:
        yield (
            f"{shape.rotary_dim} rotated elements of a compressed row; expected a multiple of {ROTATED_MULTIPLE} with "
            f"backend {CUDA}"
        )
    if shape.key_dim > MOST_KEY_DIM:
        yield (
            f"compressed rows of {shape.key_dim} elements with the rotated ones; expected at most {MOST_KEY_DIM} with "
            f"backend {CUDA}"
        )
    if shape.num_heads > MOST_EXPERTS:
        yield f"{shape.num_heads} heads of latent attention; expected at most {MOST_EXPERTS} with backend {CUDA}"


def _quantized_weights(network: Network) -> Iterator[LinearWeight]:
    for op in network.ops:
        # All experts of a layer have the sizes of the first one.
        of_op = op.weights if isinstance(op, Linear) else (op.gate[0], op.down[0]) if isinstance(op, Experts) else ()
        yield from (weight for weight in of_op if weight.quantized)


def _quantization_problems(how: QuantConfig, inputs: int) -> Iterator[str]:
    """Yields the reasons why no kernel multiplies such weights."""
    accepted = QuantConfig(
        quant_algo=how.quant_algo,
        group_size=how.group_size,
        has_zero_point=how.has_zero_point,
        scale_dtype=how.scale_dtype,
        exclude_modules=how.exclude_modules,
        quantized_layers=how.quantized_layers,
    )
    if how != accepted or how.quant_algo not in (QuantAlgo.W8A16, QuantAlgo.W4A16):
        integers = "integers of W8A16 and of four bits of W4A16, without minimums and an input permutation"
        yield f"weights of {replace(how, quantized_layers=()).describe()}; accepted with backend {CUDA}: {integers}"
        return
    together = 2 * COLUMNS_TOGETHER if how.has_few_bits else COLUMNS_TOGETHER
    if inputs % together:
        yield (
            f"a linear layer of {inputs} inputs with weights of {how.quant_algo.name}; expected a multiple of "
            f"{together} with backend {CUDA}"
        )
    if how.group_size is not None and how.group_size % COLUMNS_TOGETHER:
        yield f"a group_size of {how.group_size}; expected a multiple of {COLUMNS_TOGETHER} with backend {CUDA}"


def _any(value: Any) -> _Problem:
    return None


def _needs_default(value: Any) -> _Problem:
    """The check of fields that are not in the list: the field must not be set."""
    return None if value in (None, False, 0, 0.0, ()) else ""


def _causal(kind: AttentionKind) -> _Problem:
    return None if kind is AttentionKind.CAUSAL else f" {kind.name}"


def _known_routing(routing: Routing) -> _Problem:
    if routing.top_k > MOST_EXPERTS_OF_TOKEN:
        return f" of {routing.top_k} experts for a token"
    others = (field for field in fields(routing) if field.name not in _ROUTING)
    missing = [field.name for field in others if getattr(routing, field.name) != field.default]
    return f" with {', '.join(missing)}" if missing else None


def _gated(activation: Activation) -> _Problem:
    return None if activation in _GATED else f" {activation.value}"


def _one_or_two(weights: tuple[LinearWeight, ...]) -> _Problem:
    return None if len(weights) in (1, 2) else f" of {len(weights)} matrices"


_ROUTING: Final = frozenset(
    (
        "scores",
        "top_k",
        "num_groups",
        "topk_groups",
        "norm_topk_prob",
        "rates_groups_by_best",
        "scale",
        "bias",
        "expert_scale",
        "scales_inputs",
    )
)
"""Fields of Routing that the kernels know; others must have their defaults."""
_GATED: Final = frozenset(
    (
        Activation.SILU,
        Activation.GELU,
        Activation.GELU_TANH,
        Activation.RELU,
        Activation.RELU_BOTH,
        Activation.CLAMPED_SILU,
    )
)
_GATED_COLUMNS: Final = frozenset((Activation.SILU, Activation.GELU, Activation.GELU_TANH))
_ACTIVATED: Final = frozenset((Activation.GELU, Activation.GELU_TANH, Activation.RELU, Activation.RELU_SQUARED))

_ACCEPTED: Final[Mapping[type[Op], Mapping[str, _Check]]] = {
    Embedding: {
        "scope": _any,
        "output": _any,
        "table": _any,
        "scale": _any,
        # Only requests with embeddings in place of tokens use it, and the engine refuses them.
        "inputs_embeds_scale": _any,
        "as_linear": _any,
        "positions": _any,
    },
    Rotary: dict.fromkeys(("scope", "output", "size", "base", "scaling", "max_position_embeddings"), _any),
    RmsNorm: dict.fromkeys(
        (
            "scope",
            "input",
            "output",
            "weight",
            "epsilon",
            "gather_logit_rows",
            "add_to",
            "is_stream",
            "sum_scale",
        ),
        _any,
    ),
    Scale: dict.fromkeys(("scope", "input", "output", "factors", "gather_logit_rows", "is_stream"), _any),
    LayerNorm: dict.fromkeys(
        ("scope", "input", "output", "weight", "bias", "epsilon", "gather_logit_rows", "is_stream", "number"), _any
    ),
    Cast: dict.fromkeys(("scope", "input", "output"), _any),
    Experts: {
        **dict.fromkeys(("scope", "layer", "input", "router_logits", "output", "add_to", "gate", "up", "down"), _any),
        "routing": _known_routing,
        "activation": _gated,
    },
    GatedAdd: dict.fromkeys(("scope", "input", "gate", "output", "add_to"), _any),
    GatedColumns: {
        **dict.fromkeys(("scope", "gate", "values", "first_column", "output"), _any),
        "activation": lambda activation: None if activation in _GATED_COLUMNS else f" {activation.value}",
    },
    Xielu: dict.fromkeys(("scope", "input", "output", "parameters"), _any),
    SigmoidGate: dict.fromkeys(("scope", "input", "gate", "output"), _any),
    SiluGate: dict.fromkeys(("scope", "input", "gate", "output"), _any),
    GatedRmsNorm: {
        **dict.fromkeys(("scope", "input", "gate", "output", "weight", "epsilon", "gate_first", "num_groups"), _any),
        "group_ranks": lambda ranks: None if ranks == 1 else f" {ranks}",
    },
    CausalConvolution: dict.fromkeys(("scope", "layer", "input", "output", "weight", "bias"), _any),
    GatedConvolution: dict.fromkeys(("scope", "layer", "input", "output", "weight", "bias"), _any),
    GatedDelta: dict.fromkeys(
        ("scope", "layer", "qkv", "gates", "output", "shape", "log_decay", "time_bias", "update_scale"), _any
    ),
    SelectiveScan: dict.fromkeys(
        (
            "scope",
            "layer",
            "values",
            "output",
            "shape",
            "log_decay",
            "time_bias",
            "skip",
            "time_min",
            "time_max",
        ),
        _any,
    ),
    Attention: {
        **dict.fromkeys(("scope", "layer", "qkv", "rotary", "output", "shape", "scale", "window", "softcap"), _any),
        **dict.fromkeys(("query_norm", "key_norm", "interleaved", "sinks", "norms_after_rotation"), _any),
        **dict.fromkeys(("normalizes_values", "values_from_keys", "shared_layer", "query_scaling"), _any),
        **dict.fromkeys(("chunk", "plain_norm_epsilon"), _any),
        "kind": _causal,
    },
    LatentQueries: dict.fromkeys(
        ("scope", "layer", "queries", "rows", "output", "shape", "norm", "epsilon", "keys"), _any
    ),
    LatentValues: dict.fromkeys(("scope", "layer", "input", "output", "shape", "values"), _any),
    Linear: {
        **dict.fromkeys(
            ("scope", "input", "output", "layer", "activation", "threshold", "add_to", "scale", "softcap"), _any
        ),
        "weights": _one_or_two,
    },
}
"""Checks by op and field. A field without one must not be set: None, False or 0."""
