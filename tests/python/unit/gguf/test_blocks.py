"""Values of every type have the bits that the package gguf computes."""

from __future__ import annotations

import numpy as np
import pytest

from adaptrt.formats.gguf.blocks import TYPES, BlockType, unread_type

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("number", [number for number, each in TYPES.items() if each.is_quantized])
def test_values_equal_those_of_the_gguf_package(number: int) -> None:
    block_type = TYPES[number]
    random = np.random.default_rng(number)
    rows = random.integers(0, 256, (40, 6 * block_type.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(rows, gguf.GGMLQuantizationType(number))
    found = block_type.values(rows)
    assert found.dtype == np.float32
    assert found.shape == expected.shape == (40, 6 * block_type.block_size)
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])


def test_mxfp4_has_every_power_of_two() -> None:
    (mxfp4,) = (each for each in TYPES.values() if each.name == "MXFP4")
    blocks = np.array([[exponent, *range(0, 256, 16)] for exponent in range(256)], np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(mxfp4.values(blocks), expected)


def test_sizes_and_names_are_ggmls() -> None:
    for number, block_type in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert block_type.name == kind.name
        assert gguf.GGML_QUANT_SIZES[kind] == (block_type.block_size, block_type.block_bytes)
    for kind in gguf.GGMLQuantizationType:
        assert kind in TYPES or unread_type(kind) == kind.name


@pytest.mark.parametrize(("number", "dtype"), [(0, "float32"), (1, "float16"), (30, "bfloat16")])
def test_plain_values_are_views(number: int, dtype: str) -> None:
    block_type: BlockType = TYPES[number]
    values = np.array([[1.5, -2.0], [0.0, 3.0]], np.float32).astype(block_type.dtype)
    found = block_type.values(values.view(np.uint8).reshape(2, -1))
    assert str(found.dtype) == dtype
    np.testing.assert_array_equal(found, values)
