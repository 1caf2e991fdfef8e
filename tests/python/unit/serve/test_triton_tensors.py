"""Tensors of KServe v2: every format arrives unchanged, and invalid tensors are rejected by name."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptrt.serve.errors import ApiError
from adaptrt.serve.options import ServerLimits
from adaptrt.serve.triton_tensors import (
    OutputTensor,
    RequestTensor,
    TensorSpec,
    read_infer,
    read_tensors,
    tensor_of_value,
    write_infer,
)

SPECS = {
    spec.name: spec
    for spec in (
        TensorSpec("ids", ("INT32",), (-1,)),
        TensorSpec("seed", ("UINT64", "INT64"), (1,)),
        TensorSpec("flag", ("BOOL",), (1,)),
        TensorSpec("text", ("BYTES",), (-1,)),
        TensorSpec("weights", ("FP16", "BF16", "FP32"), (-1, -1)),
    )
}
NUMPY = {
    "INT32": np.int32, "UINT64": np.uint64, "INT64": np.int64, "BOOL": np.bool_, "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16, "FP32": np.float32,
}  # fmt: skip


def read(*tensors: dict[str, Any], binary: bytes = b"") -> dict[str, np.ndarray]:
    return read_tensors([RequestTensor(**tensor) for tensor in tensors], memoryview(binary), SPECS)


def binary_tensor(name: str, datatype: str, array: np.ndarray) -> tuple[dict[str, Any], bytes]:
    data = array.tobytes()
    head = {
        "name": name,
        "datatype": datatype,
        "shape": list(array.shape),
        "parameters": {"binary_data_size": len(data)},
    }
    return head, data


@given(
    name_and_type=st.sampled_from([(spec.name, t) for spec in SPECS.values() for t in spec.datatypes if t != "BYTES"]),
    batch=st.booleans(),
    seed=st.integers(0, 1000),
    before=st.sampled_from(["", "a", "ab", "é€"]),
)
def test_binary_tensors_arrive_wherever_they_lie(
    name_and_type: tuple[str, str], batch: bool, seed: int, before: str
) -> None:
    name, datatype = name_and_type
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(0, 5)) if dim == -1 else dim for dim in SPECS[name].dims]
    sent = rng.integers(0, 2, [1] * batch + sizes).astype(NUMPY[datatype])
    # The first tensor moves the second to an odd position in the body.
    element = struct.pack("<I", len(before.encode())) + before.encode()
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(element)}}
    head, data = binary_tensor(name, datatype, sent)
    arrays = read(text, head, binary=element + data)
    assert arrays["text"].tolist() == [before]
    assert arrays[name].dtype == NUMPY[datatype]
    assert arrays[name].flags.aligned
    np.testing.assert_array_equal(arrays[name], sent.reshape(sizes))


@pytest.mark.parametrize(
    ("name", "datatype", "shape", "data", "expected"),
    [
        ("ids", "INT32", [1, 3], [[1, 2, 3]], np.array([1, 2, 3], np.int32)),
        ("ids", "INT32", [3], [1, 2, 3], np.array([1, 2, 3], np.int32)),
        ("ids", "INT32", [1, 0], [], np.array([], np.int32)),
        ("seed", "UINT64", [1], [2**64 - 1], np.array([2**64 - 1], np.uint64)),
        ("flag", "BOOL", [1, 1], [True], np.array([True])),
        ("text", "BYTES", [2], ["", "é"], np.array(["", "é"], object)),
        ("weights", "FP32", [1, 2, 2], [[[1, 2], [3.5, 4]]], np.array([[1, 2], [3.5, 4]], np.float32)),
    ],
)
def test_json_tensors(name: str, datatype: str, shape: list[int], data: list[Any], expected: np.ndarray) -> None:
    array = read({"name": name, "datatype": datatype, "shape": shape, "data": data})[name]
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    ("change", "binary", "said"),
    [
        ({"name": "idz"}, b"", "input 'idz' is not known; accepted: ids, seed"),
        ({"datatype": "INT64"}, b"", "datatype is 'INT64'; accepted: INT32"),
        ({"shape": [2, 3]}, b"", "the batch dimension must be 1"),
        ({"shape": [1, 1, 3]}, b"", r"shape is \[1, 1, 3\]; accepted: \[-1\] or \[1, -1\]"),
        ({"shape": [-3]}, b"", "sizes are at least 0"),
        ({"shape": [4]}, b"", r"has 3 values; shape \[4\] has 4"),
        ({"data": None}, b"", "neither data nor binary_data_size"),
        ({"data": [[1, 2], [3]]}, b"", "not nested as the shape"),
        ({"data": [1, True, 3]}, b"", "value 1 is true, which is not a value of INT32"),
        ({"data": [1, 2.0, 3]}, b"", "value 1 is 2.0, which is not"),
        ({"data": [1, 2, 2**31]}, b"", "value 2 is 2147483648, which is not"),
        ({"parameters": {"shared_memory_region": "x"}}, b"", "parameter 'shared_memory_region' is not known"),
        ({"parameters": {"binary_data_size": 12}}, bytes(12), "has data and binary_data_size"),
        ({"data": None, "parameters": {"binary_data_size": 8}}, bytes(8), "3 elements of INT32 have 12 bytes"),
        ({"data": None, "parameters": {"binary_data_size": 12}}, bytes(8), "8 bytes of binary data are left"),
        ({"data": None, "parameters": {"binary_data_size": -4}}, bytes(8), "8 bytes of binary data are left"),
        ({"data": None, "parameters": {"binary_data_size": True}}, bytes(8), "8 bytes of binary data are left"),
        ({"data": None, "parameters": {"binary_data_size": 12}}, bytes(16), "16 bytes of binary data; .* are 12"),
        (
            {
                "data": None,
                "shape": [2**62, 2],
                "parameters": {"binary_data_size": 0},
                "name": "weights",
                "datatype": "FP16",
            },
            b"",
            "have 18446744073709551616 bytes",
        ),
        (
            {"name": "weights", "datatype": "FP16", "shape": [1, 3], "data": [1, 2, 3]},
            b"",
            "FP16 is sent as binary data",
        ),
        ({"name": "weights", "datatype": "FP32", "shape": [1, 1], "data": [1e39]}, b"", "not a value of FP32"),
        ({"name": "flag", "datatype": "BOOL", "shape": [1], "data": [1]}, b"", "value 0 is 1, which is not"),
        (
            {"name": "flag", "datatype": "BOOL", "shape": [1], "data": None, "parameters": {"binary_data_size": 1}},
            b"\x02",
            "a BOOL is 0 or 1",
        ),
        (
            {"name": "text", "datatype": "BYTES", "shape": [1], "data": None, "parameters": {"binary_data_size": 5}},
            b"\xff\xff\xff\xffa",
            "element 0 ends after the tensor's 5 bytes",
        ),
        (
            {"name": "text", "datatype": "BYTES", "shape": [9], "data": None, "parameters": {"binary_data_size": 5}},
            b"\1\0\0\0a",
            "not 9 elements",
        ),
        (
            {"name": "text", "datatype": "BYTES", "shape": [1], "data": None, "parameters": {"binary_data_size": 5}},
            b"\1\0\0\0\xff",
            "not UTF-8: byte 0 is 0xff",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(change: dict[str, Any], binary: bytes, said: str) -> None:
    tensor = {"name": "ids", "datatype": "INT32", "shape": [3], "data": [1, 2, 3], **change}
    with pytest.raises(ApiError, match=said) as raised:
        read(tensor, binary=binary)
    assert str(raised.value).count(tensor["name"]) or "binary data" in said


def test_a_tensor_is_there_once() -> None:
    tensor = {"name": "ids", "datatype": "INT32", "shape": [1], "data": [1]}
    with pytest.raises(ApiError, match="input 'ids' is given twice"):
        read(tensor, tensor)


@pytest.mark.parametrize("length", ["-1", "1e3", "+5", "", "999", "٣"])
def test_the_length_of_the_json_is_checked(length: str) -> None:
    with pytest.raises(ApiError, match="Inference-Header-Content-Length is"):
        read_infer(b'{"inputs": []}', length, ServerLimits())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ids", 5, [5]),
        ("ids", [1, 2], [1, 2]),
        ("ids", [[1, 2]], [1, 2]),
        ("weights", [[1.5, 2]], [[1.5, 2.0]]),
        ("text", "a", ["a"]),
        ("flag", True, [True]),
        ("seed", 2**64 - 1, [2**64 - 1]),
    ],
)
def test_members_of_a_body_are_tensors(name: str, value: object, expected: list[Any]) -> None:
    assert tensor_of_value(name, value, SPECS).tolist() == expected


@pytest.mark.parametrize("value", [None, {}, [[[1]]], [[1], [2]], [1, [2]], "a", [None], [[], [1]]])
def test_members_that_are_no_tensors_are_refused(value: object) -> None:
    with pytest.raises(ApiError, match="input 'ids'"):
        tensor_of_value("ids", value, SPECS)


def test_an_answer_has_its_binary_tensors_in_the_order_of_its_json() -> None:
    tensors = [
        OutputTensor("a", np.array([[1, 2]], np.int32)),
        OutputTensor("b", np.array([["é", ""]], object)),
        OutputTensor("c", np.array([0.5], np.float32)),
    ]
    body, length = asyncio.run(write_infer({"id": "é"}, list(zip(tensors, [True, True, False], strict=True))))
    head = json.loads(body[:length])
    assert [output["name"] for output in head["outputs"]] == ["a", "b", "c"]
    sizes = [output.get("parameters", {}).get("binary_data_size") for output in head["outputs"]]
    assert sizes == [8, 10, None]
    assert body[length:] == struct.pack("<2i", 1, 2) + b"\2\0\0\0\xc3\xa9" + bytes(4)
    assert head["outputs"][2] == {"name": "c", "datatype": "FP32", "shape": [1], "data": [0.5]}


def test_infinite_values_are_binary() -> None:
    tensor = OutputTensor("logits", np.array([-np.inf], np.float32))
    with pytest.raises(ApiError, match="ask for it as binary data"):
        asyncio.run(write_infer({}, [(tensor, False)]))
    assert asyncio.run(write_infer({}, [(tensor, True)]))[0].endswith(b"\0\0\x80\xff")
