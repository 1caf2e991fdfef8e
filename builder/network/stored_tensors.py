"""Locations of an ONNX graph's weights in the file of a checkpoint's rank."""

from __future__ import annotations

from onnx import TensorProto, helper

from ...common.safetensors_stream import SafetensorsReader
from ...formats.checkpoint.quantization import QuantConfig
from .graph import StoredTensor


def stored_tensors(reader: SafetensorsReader, quantization: QuantConfig | None) -> dict[str, StoredTensor]:
    """Each tensor of the file as the graph declares it. `quantization` is that of the linear layers."""
    stored = {}
    for name, spec in reader.specs.items():
        element_type, shape = int(helper.np_dtype_to_tensor_dtype(spec.dtype)), spec.shape
        how = quantization.of_weight(name) if quantization is not None else None
        if how is not None and how.has_few_bits and how.scales_of(name) in reader.specs:
            # A byte has two elements, and ONNX counts elements.
            element_type = TensorProto.INT4
            if how.has_zero_point or how.has_minimum or how.is_codebook:
                element_type = TensorProto.UINT4
            shape = (shape[0], 2 * shape[1])
        stored[name] = StoredTensor(element_type, shape, reader.path.name, reader.offset(name), spec.num_bytes)
    return stored
