"""Lowers the matrix of a linear layer: a weight of the checkpoint, or a DequantizeLinear of one."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from ..._core import QuantAlgo, RowKind
from .graph_index import GraphIndex, Node
from .lowered import Weights, check_attributes, refuse
from .plan import Matrix, Quantization


@dataclass(frozen=True)
class LinearWeight:
    """W [out, in] of a linear layer."""

    value: str
    nodes: tuple[Node, ...] = ()
    """Those that make it of a quantised weight."""

    def matrix(self, index: GraphIndex, rows: tuple[int, int], row_kind: RowKind, weights: Weights) -> Matrix:
        """Panels of some of its rows. In the head, activations keep their type."""
        if not self.nodes:
            return weights.matrix(index, self.value, rows)
        *_, node = self.nodes
        weight, scales = node.inputs[:2]
        group_size = int(node.attributes.get("block_size", 0))
        how = Quantization(algo=QuantAlgo.W4A16, group_size=group_size, zero_points=len(node.inputs) > 2)
        if index.element_type(weight) == TensorProto.INT8:
            w8a8 = weights.quant_algo is QuantAlgo.W8A8 and row_kind is RowKind.TOKENS
            how = Quantization(algo=QuantAlgo.W8A8 if w8a8 else QuantAlgo.W8A16, group_size=0, zero_points=False)
        zeros = self.nodes[0].inputs[0] if len(node.inputs) > 2 else None
        return weights.quantized_matrix(index, weight, scales, zeros, how, rows)


def find_weight(index: GraphIndex, value: str) -> LinearWeight:
    """The matrix that a value is. Raises EngineError for a DequantizeLinear that the kernels do not have."""
    node = index.producer(value)
    if node is None or node.op_type != "DequantizeLinear":
        return LinearWeight(value)
    check_attributes(node, {}, ["axis", "block_size", "output_dtype"])
    axis = 1 if node.attributes.get("block_size", 0) else 0
    if node.attributes.get("axis", 1) != axis:
        raise refuse(node, f"its axis is {node.attributes.get('axis', 1)}, not {axis}")
    weight, scales, *zero = node.inputs
    expected = {TensorProto.INT8: 2, TensorProto.INT4: 2, TensorProto.UINT4: 3}
    if not (index.is_weight(weight) and index.is_weight(scales)):
        raise refuse(node, "its weight and its scales must be tensors of the checkpoint")
    if expected.get(index.element_type(weight)) != len(node.inputs):
        raise refuse(node, "it must be of int8 or int4 without, or of uint4 with zero points")
    if not zero:
        return LinearWeight(value, (node,))
    cast = index.producer(zero[0])
    if cast is None or cast.op_type != "Cast" or not index.is_weight(cast.inputs[0]):
        raise refuse(node, "its zero points must be a tensor of the checkpoint, cast to uint4")
    return LinearWeight(value, (cast, node))
