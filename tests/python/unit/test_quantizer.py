"""Rounding weights to int8 and four bits: error bounds, and the content of checkpoints."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adaptrt import _core
from adaptrt._core import DType, QuantAlgo, WeightCode
from adaptrt.builder.conversion.quantizing_tensors import QuantizingTensors
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.checkpoint.quantizer import QuantizationError, QuantizedRows, dequantize_rows, quantize_rows

CONFIGS = {
    "W8A16": QuantConfig(quant_algo=QuantAlgo.W8A16),
    "W8A8": QuantConfig(quant_algo=QuantAlgo.W8A8),
    "W4A16": QuantConfig(quant_algo=QuantAlgo.W4A16),
    "W4A16-32": QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=32),
    "W4A16-64-zero": QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=64, has_zero_point=True),
    "W4A8-32": QuantConfig(quant_algo=QuantAlgo.W4A8, group_size=32),
}
# Rounding of a scale to bfloat16, and float32 rounding in the quotient and the product.
SCALE_ROUNDING = 2.0**-8
# Scales below this are subnormal in bfloat16, so the error exceeds a step.
LEAST = 1e-36

rows_of_weights = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.sampled_from([2, 30, 64, 70])),
    elements=st.floats(-100, 100, width=32, allow_subnormal=False),
)


def group_bounds(rows: np.ndarray, config: QuantConfig) -> np.ndarray:
    """Returns the step between two values of each element's group, by the formulas of docs/formats.md."""
    steps = np.empty_like(rows)
    size = config.group_size or rows.shape[1]
    for first in range(0, rows.shape[1], size):
        group = rows[:, first : first + size]
        if config.has_zero_point:
            step = (np.maximum(group.max(1), 0) - np.minimum(group.min(1), 0)) / 15
        else:
            step = np.abs(group).max(1) / (7 if config.has_few_bits else 127)
        steps[:, first : first + size] = step[:, None]
    return steps


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=60, deadline=None)
@given(rows=rows_of_weights)
def test_values_move_by_half_a_step_at_most(name: str, rows: np.ndarray) -> None:
    config = CONFIGS[name]
    moved = np.abs(dequantize_rows(quantize_rows(rows, config), config) - rows)
    # The zero point is rounded to a step as well, so values at the ends of the range may lose another half step.
    half = 1.0 if config.has_zero_point else 0.5
    bound = group_bounds(rows, config) * half + np.abs(rows) * SCALE_ROUNDING + LEAST
    if config.has_zero_point:
        bound += 15 * group_bounds(rows, config) * SCALE_ROUNDING
    assert (moved <= bound).all()


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=30, deadline=None)
@given(rows=rows_of_weights)
def test_packed_rows_are_served_with_the_values_that_the_quantiser_gives(name: str, rows: np.ndarray) -> None:
    config = CONFIGS[name]
    quantized = quantize_rows(rows, config)
    how = _core.Quantization(
        algo=config.quant_algo, group_size=config.group_size or 0, zero_points=config.has_zero_point
    )
    n, k = rows.shape
    panels = np.empty(_core.quantized_panel_bytes(how, n, k), np.uint8)
    scales = np.ascontiguousarray(quantized.scales.astype(np.float32))
    _core.pack_quantized_panels(panels, how, n, k, 0, n, quantized.weights, scales, quantized.zeros)
    matrix = _core.PanelMatrix(data=panels, dtype=_core.DType.FLOAT32, n=n, k=k, quantization=how)
    np.testing.assert_array_equal(matrix.rows(0, n), dequantize_rows(quantized, config))


def test_quantised_values_are_kept() -> None:
    for config in CONFIGS.values():
        rows = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
        once = dequantize_rows(quantize_rows(rows, config), config)
        np.testing.assert_allclose(dequantize_rows(quantize_rows(once, config), config), once, rtol=1e-2, atol=1e-3)


def test_two_inputs_share_a_byte_the_even_one_below() -> None:
    config = CONFIGS["W4A16"]
    quantized = quantize_rows(np.asarray([[7.0, -7.0, 1.0, 0.0]], np.float32), config)
    assert quantized.weights.tolist() == [[0x97, 0x01]]  # four bits of two's complement: -7 is stored as 9
    assert quantized.scales.dtype == ml_dtypes.bfloat16
    assert dequantize_rows(quantized, config).tolist() == [[7.0, -7.0, 1.0, 0.0]]


def test_zero_points_keep_zero_exactly() -> None:
    config = CONFIGS["W4A16-64-zero"]
    rows = np.linspace(0.1, 1.0, 64, dtype=np.float32)[None]
    rows[0, 5] = 0
    quantized = quantize_rows(rows, config)
    assert quantized.zeros is not None
    assert quantized.zeros.tolist() == [[0]]
    assert dequantize_rows(quantized, config)[0, 5] == 0


def test_rows_of_zeros_stay_zeros() -> None:
    for config in CONFIGS.values():
        zeros = np.zeros((2, 64), np.float32)
        np.testing.assert_array_equal(dequantize_rows(quantize_rows(zeros, config), config), zeros)


def test_the_relative_error_is_that_of_all_rows_together() -> None:
    error = QuantizationError("w")
    error.add(np.asarray([[3.0, 0.0]], np.float32), np.asarray([[3.0, 1.0]], np.float32))
    error.add(np.asarray([[4.0, 0.0]], np.float32), np.asarray([[4.0, 0.0]], np.float32))
    assert error.relative == pytest.approx(1 / 5)
    assert QuantizationError("of nothing").relative == 0.0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"weights": np.zeros((1, 7), np.int8)}, "weights holds 7 bytes, not 8"),
        ({"scales": np.zeros(2, np.float32)}, "a scale is needed for each group"),
        ({"zeros": np.zeros(1, np.uint8)}, "not of a matrix that is quantised so"),
        ({"first_row": 1}, "not of a matrix that is quantised so"),
        ({"panels": np.zeros(8, np.uint8)}, "smaller than panel_bytes"),
    ],
)
def test_rows_that_do_not_fit_are_refused(arguments: dict[str, object], complaint: str) -> None:
    how = _core.Quantization(algo=QuantAlgo.W8A16)
    good = {
        "panels": np.zeros(_core.quantized_panel_bytes(how, 1, 8), np.uint8), "quantization": how, "n": 1, "k": 8,
        "first_row": 0, "rows": 1, "weights": np.zeros((1, 8), np.int8), "scales": np.zeros(1, np.float32),
    }  # fmt: skip
    _core.pack_quantized_panels(**good)
    with pytest.raises(ValueError, match=complaint):
        _core.pack_quantized_panels(**{**good, **arguments})


def test_groups_and_bits_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        _core.Quantization(algo=QuantAlgo.W4A16, group_size=12)
    with pytest.raises(ValueError, match="multiple of 16"):
        _core.Quantization(algo=QuantAlgo.W4A16, group_size=8, bits=2)
    with pytest.raises(ValueError, match="multiple of 32"):
        _core.Quantization(algo=QuantAlgo.W4A16, group_size=48, bits=3)
    for bits in (1, 5, -4):
        with pytest.raises(ValueError, match="bits must be 2, 3 or 4"):
            _core.Quantization(algo=QuantAlgo.W4A16, bits=bits)


def test_three_bits_of_rows_that_are_no_whole_words_are_refused() -> None:
    how = _core.Quantization(algo=QuantAlgo.W4A16, bits=3)
    panels, scales = np.zeros(_core.quantized_panel_bytes(how, 1, 48), np.uint8), np.ones(1, np.float32)
    with pytest.raises(ValueError, match="not of a matrix that is quantised so"):
        _core.pack_quantized_panels(panels, how, 1, 48, 0, 1, np.zeros((1, 24), np.uint8), scales)


@pytest.mark.parametrize(
    "how",
    [
        QuantConfig(quant_algo=QuantAlgo.W4A16, bits=2),
        QuantConfig(quant_algo=QuantAlgo.W8A16, group_size=64),
        QuantConfig(quant_algo=QuantAlgo.W8A16, code=WeightCode.E4M3, value_dtype=DType.FLOAT32),
        QuantConfig(quant_algo=QuantAlgo.W8A16, has_zero_point=True),
        QuantConfig(quant_algo=QuantAlgo.W4A16, act_order=True),
    ],
    ids=QuantConfig.describe,
)
def test_weights_are_not_rounded_to_what_is_only_published(how: QuantConfig) -> None:
    assert how.problems() == []
    nothing: Any = None
    with pytest.raises(
        _core.ConfigError, match=f"{how.describe()}, to which weights cannot be quantised here; accepted: integers"
    ):
        QuantizingTensors(nothing, how)


@pytest.mark.parametrize("algo", [QuantAlgo.W8A16, QuantAlgo.W4A16], ids=str)
def test_rows_of_a_matrix_with_act_order_have_its_inputs_where_they_belong(algo: QuantAlgo) -> None:
    """Checks packed panels from a mapping, and panels that were read into memory."""
    rng = np.random.default_rng(0)
    n, k = 70, 18
    how = _core.Quantization(algo=algo, act_order=True)
    in_order = _core.Quantization(algo=algo)
    packed = rng.integers(0, 256, (n, k if algo is QuantAlgo.W8A16 else k // 2), np.uint8)
    panels = np.zeros(_core.quantized_panel_bytes(how, n, k), np.uint8)
    behind = _core.quantized_panel_bytes(in_order, n, k)
    _core.pack_quantized_panels(panels[:behind], in_order, n, k, 0, n, packed, np.ones(n, np.float32))
    plain = _core.PanelMatrix(data=panels[:behind].copy(), dtype=DType.FLOAT32, n=n, k=k, quantization=in_order)
    order = rng.permutation(k).astype(np.int32)
    _core.pack_permutation(panels[behind:], how, n, k, order)
    matrix = _core.PanelMatrix(data=panels, dtype=DType.FLOAT32, n=n, k=k, quantization=how)
    expected = np.empty((n, k), np.float32)
    expected[:, order] = plain.rows(0, n)
    assert np.array_equal(matrix.rows(0, n), expected)
    for rows in (range(3, 9), range(60, 70), range(0, 70)):
        begin, end = matrix.panels_of(rows.start, rows.stop)
        first, last = matrix.order_bytes
        assert (end == behind, last) == (rows.stop > 64, panels.size)
        elsewhere = panels[begin:end].copy()
        found = matrix.rows_of(elsewhere, rows.start, rows.stop, panels[first:last].copy().view(np.int32))
        assert np.array_equal(found, expected[rows.start : rows.stop])
        with pytest.raises(ValueError, match="needs an order of the inputs; others have none"):
            matrix.rows_of(elsewhere, rows.start, rows.stop)
        with pytest.raises(ValueError, match="not an order of the inputs"):
            matrix.rows_of(elsewhere, rows.start, rows.stop, np.zeros(k, np.int32))
    assert plain.order_bytes == (behind, behind)
    with pytest.raises(ValueError, match="not those of a matrix with act_order"):
        _core.pack_permutation(panels[behind + 1 :], how, n, k, order)


def test_scales_of_foreign_checkpoints_are_multiplied_as_they_are() -> None:
    rows = QuantizedRows(np.asarray([[-128, 127]], np.int8), np.asarray([[0.5]], np.float32), None)
    assert dequantize_rows(rows, CONFIGS["W8A16"]).tolist() == [[-64.0, 63.5]]
