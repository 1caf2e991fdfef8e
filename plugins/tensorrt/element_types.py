"""Conversion of ONNX element types to TensorRT's."""

from __future__ import annotations

from typing import Any, Final

from ..._core import DType
from ..definition import ENGINE_TYPE, KERNEL_TYPES, Plugin

_NAMES: Final = {
    "tensor(float)": "FLOAT",
    "tensor(float16)": "HALF",
    "tensor(bfloat16)": "BF16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
}
_NUMPY_NAMES: Final = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
}
_DTYPES: Final = {"HALF": DType.FLOAT16, "BF16": DType.BFLOAT16}


def data_type(trt: Any, element_type: str) -> Any:
    """TensorRT's DataType for a definition's element type other than T."""
    return getattr(trt.DataType, _NAMES[element_type])


def numpy_name(type_: Any) -> str:
    """numpy's name of a DataType that networks use."""
    return _NUMPY_NAMES[type_.name]


def kernel_data_types(trt: Any) -> tuple[Any, ...]:
    """Possible DataTypes of T in a plan."""
    return tuple(data_type(trt, element_type) for element_type in KERNEL_TYPES)


def dtype_of(type_: Any) -> DType:
    """The engine's type for one of kernel_data_types()."""
    return _DTYPES[type_.name]


def engine_type_index(plugin: Plugin) -> int:
    """Index of the first input of type T."""
    return next(index for index, tensor in enumerate(plugin.inputs) if tensor.type == ENGINE_TYPE)
