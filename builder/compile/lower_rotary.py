"""Lowers the computation of the rotary embedding's cosines and sines to one op."""

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import TensorProto

from ..._core import DType, RopeKind, RowKind
from .graph_index import GraphIndex, Node
from .lowered import LoweredOp, Weights, buffer_name, nodes_of, refuse
from .pattern import Constant, Input, Match, Op, Pattern, Value, match
from .plan import RopeTableOp

_POSITIONS: Final = Op("Unsqueeze", Op("Cast", Input("positions"), to=TensorProto.FLOAT), Constant("axis_1"))

# A token's sequence is the number of sequences that end at or before it.
_PROMPT_LENGTHS: Final = Op(
    "Gather",
    Input("prompt_lengths"),
    Op(
        "ReduceSum",
        Op(
            "Cast",
            Op(
                "GreaterOrEqual",
                Op(
                    "Unsqueeze",
                    Op(
                        "Cast",
                        Op(
                            "Range",
                            Constant("zero"),
                            Op("Squeeze", Op("Shape", Input("input_ids"))),
                            Constant("step"),
                        ),
                        to=TensorProto.INT32,
                    ),
                    Constant("axis_1"),
                ),
                Op(
                    "Unsqueeze",
                    Op("Slice", Input("sequence_offsets"), Constant("second"), Constant("past_the_end")),
                    Constant("axis_0"),
                ),
            ),
            to=TensorProto.INT32,
        ),
        Constant("axis_1"),
        keepdims=0,
    ),
    axis=0,
)
_LENGTH: Final = Op(
    "Max",
    Op("Cast", Op("Max", _PROMPT_LENGTHS, Op("Add", Input("positions"), Constant("one"))), to=TensorProto.FLOAT),
    Constant("original"),
)
_GROWTH: Final = Op(
    "Sub",
    Op("Div", Op("Mul", _LENGTH, Constant("factor")), Constant("original")),
    Constant("factor_minus_1"),
)
_BASE: Final = Op("Mul", Op("Pow", _GROWTH, Constant("base_exponent")), Constant("base"))
_DYNAMIC_FREQUENCIES: Final = Op(
    "Reciprocal", Op("Pow", Op("Unsqueeze", _BASE, Constant("axis_1")), Constant("exponents"))
)


def lower_rotary(index: GraphIndex, cosine: str, sine: str, reader: Node, weights: Weights) -> LoweredOp:
    """The op that makes these two values, which an attention node reads."""
    for kind, frequencies in ((RopeKind.STATIC, Constant("frequencies")), (RopeKind.DYNAMIC, _DYNAMIC_FREQUENCIES)):
        for scaled in (False, True):
            found = _match(index, cosine, sine, frequencies, scaled)
            if found is not None:
                return _rope_table(index, cosine, sine, kind, found, weights)
    raise refuse(reader, f"'{cosine}' and '{sine}' are made of the positions in a way that it does not know")


def _match(index: GraphIndex, cosine: str, sine: str, frequencies: Pattern, scaled: bool) -> tuple[Match, Match] | None:
    def pattern(function: str) -> Pattern:
        turned = Op(function, Value("angles"))
        return Op("Mul", turned, Constant("scaling")) if scaled else turned

    cosines, sines = match(index, cosine, pattern("Cos")), match(index, sine, pattern("Sin"))
    if cosines is None or sines is None or cosines.values != sines.values:
        return None
    if scaled and cosines.constants["scaling"] != sines.constants["scaling"]:
        return None
    angles = match(index, cosines.values["angles"], Op("Mul", _POSITIONS, frequencies))
    if angles is None:
        return None
    cosines.nodes += sines.nodes
    return cosines, angles


def _rope_table(
    index: GraphIndex, cosine: str, sine: str, kind: RopeKind, found: tuple[Match, Match], weights: Weights
) -> LoweredOp:
    turned, angles = found
    base, factor, original = 1.0, 1.0, 0
    if kind is RopeKind.STATIC:
        frequencies = angles.constants["frequencies"]
    else:
        base, factor, original = (
            angles.scalar("base"), angles.scalar("factor"), int(angles.scalar("original")),
        )  # fmt: skip
        exponents = angles.constants["exponents"]
        _check_dynamic(angles, base, factor)
        frequencies = np.float32(1.0) / np.float32(base) ** exponents
    op = RopeTableOp(
        kind=kind,
        inverse_frequencies=weights.constant("inverse_frequencies", frequencies),
        attention_scaling=turned.scalar("scaling") if "scaling" in turned.constants else 1.0,
        base=base,
        factor=factor,
        original_max_position=original,
        cosine=buffer_name(cosine),
        sine=buffer_name(sine),
    )
    return LoweredOp(op, nodes_of(turned.nodes, angles.nodes), (), (cosine, sine), DType.FLOAT32, RowKind.TOKENS)


def _check_dynamic(found: Match, base: float, factor: float) -> None:
    """The op has one formula; a graph with other constants is another one."""
    exponents = found.constants["exponents"].reshape(-1)
    size = 2 * exponents.size
    expected = {
        "exponents": np.arange(0, size, 2, dtype=np.float32) / np.float32(size),
        "base_exponent": np.float32(size / (size - 2)) if size > 2 else np.float32(0.0),
        "factor_minus_1": np.float32(factor - 1),
        "one": np.int32(1),
        "zero": np.int64(0),
        "step": np.int64(1),
        "second": np.int64(1),
        "past_the_end": np.iinfo(np.int64).max,
    }
    for name, value in expected.items():
        if not np.array_equal(found.constants[name].reshape(-1), np.asarray(value).reshape(-1)):
            raise refuse(found.nodes[0], f"constant {name} of the dynamic rotary embedding is not {value}")
