"""Values of every type have the bits that the package gguf computes."""

from __future__ import annotations

import numpy as np
import pytest

from adaptrt import _core
from adaptrt._core import QuantAlgo
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.checkpoint.quantizer import QuantizedRows, dequantize_rows
from adaptrt.formats.gguf.blocks import TYPES, BlockType, unread_type
from adaptrt.formats.hugging_face.published.gguf_blocks import KEPT, rows_of

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


def finite_blocks(block_type: BlockType) -> np.ndarray:
    """Random blocks [1500, block_bytes], without those whose scales or minimums are infinite or no numbers."""
    blocks = np.random.default_rng(7).integers(0, 256, (1500, block_type.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        return blocks[np.isfinite(gguf.dequantize(blocks, gguf.GGMLQuantizationType[block_type.name])).all(axis=1)]


def engine_values(rows: QuantizedRows, how: QuantConfig, inputs: int) -> np.ndarray:
    """The values that an engine's panels have."""
    stored = _core.Quantization(
        algo=how.quant_algo, group_size=how.group_size or 0, minimums=how.has_minimum, scale_type=how.scale_dtype,
        bits=how.bits,
    )  # fmt: skip
    n = len(rows.weights)
    panels = np.empty(_core.quantized_panel_bytes(stored, n, inputs), np.uint8)
    minimums = None if rows.minimums is None else rows.minimums.astype(np.float32)
    _core.pack_quantized_panels(
        panels, stored, n, inputs, 0, n, rows.weights, rows.scales.astype(np.float32), None, minimums
    )
    matrix = _core.PanelMatrix(data=panels, dtype=_core.DType.FLOAT32, n=n, k=inputs, quantization=stored)
    return matrix.rows(0, n)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    "block_type", [each for each in TYPES.values() if each.is_quantized], ids=lambda each: each.name
)
def test_engines_have_the_values_of_the_gguf_package(block_type: BlockType, joined: bool) -> None:
    """Exactly, also in the form that holds the numbers of any two types."""
    how = KEPT[block_type.name]
    if how.is_codebook:
        pytest.skip("tests of codebooks compare them")
    if joined:
        how = QuantConfig(quant_algo=QuantAlgo.W8A16, group_size=16, has_minimum=True, scale_dtype=_core.DType.FLOAT32)
    blocks = finite_blocks(block_type)
    num_rows = len(blocks) // 2
    blocks = blocks[: 2 * num_rows]
    assert num_rows > 500
    assert block_type.split is not None
    rows = rows_of(block_type.split(blocks), num_rows, how)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[block_type.name]).reshape(num_rows, -1)
    np.testing.assert_array_equal(dequantize_rows(rows, how), expected)
    np.testing.assert_array_equal(engine_values(rows, how, expected.shape[1]), expected)


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
