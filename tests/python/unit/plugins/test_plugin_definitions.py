"""Each plugin's schema, reference op and maths agree; shapes are inferred and checked."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from adaptrt.plugins import DOMAIN, DORA, LORA, PAGED_ATTENTION, PLUGINS, reference_ops, register_schemas
from adaptrt.plugins.adapter_tables import NUM_MODULES

RNG = np.random.default_rng(0)


def model_of(plugin, shapes: dict[str, list], types: dict[str, int] | None = None, **attributes) -> onnx.ModelProto:
    """Makes a graph of one node with inputs of these shapes."""
    known = {"T": TensorProto.FLOAT, "tensor(float)": TensorProto.FLOAT, "tensor(int32)": TensorProto.INT32}
    element = {t.name: known.get(t.type, TensorProto.INT64) for t in plugin.inputs} | (types or {})
    node = helper.make_node(
        plugin.name,
        [t.name for t in plugin.inputs],
        [t.name for t in plugin.outputs],
        domain=DOMAIN,
        plugin_version="1",
        plugin_namespace="adaptrt",
        **attributes,
    )
    inputs = [helper.make_tensor_value_info(t.name, element[t.name], shapes[t.name]) for t in plugin.inputs]
    outputs = [helper.make_empty_tensor_value_info(t.name) for t in plugin.outputs]
    graph = helper.make_graph([node], "one", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(DOMAIN, 1)], ir_version=11)


def infer(model: onnx.ModelProto) -> dict[str, tuple[int, list]]:
    register_schemas(PLUGINS)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    onnx.checker.check_model(inferred, full_check=True)
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in inferred.graph.output
    }


LORA_SHAPES = {
    "x": ["T", 5],
    "base": ["T", 7],
    "sequence_offsets": ["S1"],
    "adapter_slots": ["S"],
    "ranks": ["slots", 2, NUM_MODULES],
    "pointers": ["slots", 2, NUM_MODULES, 3],
}
MODULES = {"layer": 1, "module_ids": [1, 2], "out_sizes": [4, 3], "max_rank": 3}
ATTENTION_SHAPES = {
    "q": ["T", 12],
    "k": ["T", 6],
    "v": ["T", 6],
    "kv_pool": ["B", 2, 1, 4, 6],
    "block_tables": ["S", "M"],
    "sequence_offsets": ["S1"],
    "positions": ["T"],
    "cosine": ["T", 3],
    "sine": ["T", 3],
}
HEADS = {"layer": 0, "num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "scale": 0.5}


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_schema_and_reference_op_have_the_definitions_names(plugin) -> None:
    register_schemas(PLUGINS)
    schema = onnx.defs.get_schema(plugin.name, 1, DOMAIN)
    assert [parameter.name for parameter in schema.inputs] == [tensor.name for tensor in plugin.inputs]
    assert [parameter.name for parameter in schema.outputs] == [tensor.name for tensor in plugin.outputs]
    assert [parameter.type_str for parameter in schema.inputs] == [tensor.type for tensor in plugin.inputs]
    assert set(schema.attributes) == {attribute.name for attribute in plugin.attributes}
    for attribute in plugin.attributes:
        assert schema.attributes[attribute.name].required == (attribute.default is None)
    (op,) = [op for op in reference_ops(PLUGINS) if op.__name__ == plugin.name]
    assert op.op_domain == DOMAIN
    outputs, inputs = ({tensor.name for tensor in part} for part in (plugin.outputs, plugin.inputs))
    assert set(plugin.aliases) <= outputs
    assert set(plugin.aliases.values()) <= inputs


def test_shapes_and_types_are_inferred() -> None:
    assert infer(model_of(LORA, LORA_SHAPES, **MODULES)) == {"y": (TensorProto.FLOAT, ["T", 7])}
    half = {"x": TensorProto.BFLOAT16, "base": TensorProto.BFLOAT16}
    assert infer(model_of(DORA, LORA_SHAPES, half, **MODULES)) == {"y": (TensorProto.BFLOAT16, ["T", 7])}
    assert infer(model_of(PAGED_ATTENTION, ATTENTION_SHAPES, **HEADS)) == {
        "attended": (TensorProto.FLOAT, ["T", 12]),
        "kv_pool_out": (TensorProto.FLOAT, ["B", 2, 1, 4, 6]),
    }


@pytest.mark.parametrize(
    ("plugin", "shapes", "attributes", "complaint"),
    [
        (LORA, {"base": ["T", 8]}, {}, "add up to 7"),
        (LORA, {"ranks": ["slots", 3, NUM_MODULES]}, {}, "layers"),
        (LORA, {"x": ["T"]}, {}, "1 dimensions"),
        (LORA, {}, {"layer": 2}, "layer 2"),
        (LORA, {}, {"module_ids": [1, 1]}, "each module once"),
        (LORA, {}, {"module_ids": [1, NUM_MODULES]}, "within 0"),
        (LORA, {}, {"max_rank": 0}, "max_rank 0"),
        (DORA, {"base": ["T", 8]}, {}, "add up to 7"),
        (LORA, {"sequence_offsets": [4], "adapter_slots": [4]}, {}, "4 sequence_offsets"),
        (PAGED_ATTENTION, {"q": ["T", 13]}, {}, "query"),
        (PAGED_ATTENTION, {"kv_pool": ["B", 2, 2, 4, 6]}, {}, "kv_heads"),
        (PAGED_ATTENTION, {"kv_pool": ["B", 1, 1, 4, 6]}, {}, "is 2"),
        (PAGED_ATTENTION, {"cosine": ["T", 4], "sine": ["T", 4]}, {}, "4 wide"),
        (PAGED_ATTENTION, {}, {"num_heads": 3, "num_kv_heads": 2}, "multiple"),
        (PAGED_ATTENTION, {}, {"sliding_window": -1}, "sliding_window"),
        (PAGED_ATTENTION, {}, {"softcap": -1.0}, "softcap"),
    ],
)
def test_wrong_shapes_are_refused(plugin, shapes, attributes, complaint) -> None:
    base_shapes, base_attributes = (ATTENTION_SHAPES, HEADS) if plugin is PAGED_ATTENTION else (LORA_SHAPES, MODULES)
    with pytest.raises(onnx.shape_inference.InferenceError, match=complaint):
        infer(model_of(plugin, {**base_shapes, **shapes}, **{**base_attributes, **attributes}))


def test_wrong_element_types_are_refused() -> None:
    with pytest.raises(onnx.shape_inference.InferenceError):
        infer(model_of(LORA, LORA_SHAPES, {"ranks": TensorProto.INT64}, **MODULES))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_lora_and_dora_maths(dtype) -> None:
    """Three sequences: adapter 0, the base, and adapter 1, which does not change the second module."""
    out_sizes, in_size = MODULES["out_sizes"], 5
    ranks = np.zeros((2, 2, NUM_MODULES), np.int32)
    pointers = np.zeros((2, 2, NUM_MODULES, 3), np.int64)
    alive, expected_update, expected_factor = [], {}, {}
    for slot, module, rank, part in ((0, 1, 3, 0), (0, 2, 1, 1), (1, 1, 2, 0)):
        a = RNG.standard_normal((rank, in_size)).astype(dtype)
        b = RNG.standard_normal((out_sizes[part], rank)).astype(dtype)
        magnitude = (1 + RNG.random(out_sizes[part])).astype(np.float32)
        ranks[slot, 1, module] = rank
        pointers[slot, 1, module] = [a.ctypes.data, b.ctypes.data, magnitude.ctypes.data if slot == 0 else 0]
        alive += [a, b, magnitude]
        expected_update[slot, part] = b.astype(np.float64) @ a.astype(np.float64)
        expected_factor[slot, part] = magnitude if slot == 0 else np.ones_like(magnitude)
    x, base = RNG.standard_normal((6, in_size)).astype(dtype), RNG.standard_normal((6, 7)).astype(dtype)
    offsets, slots = np.asarray([0, 2, 3, 6], np.int32), np.asarray([0, -1, 1], np.int32)
    inputs = (x, base, offsets, slots, ranks, pointers)
    (y,) = LORA.evaluate(inputs, MODULES)
    (scaled,) = DORA.evaluate(inputs, MODULES)
    expected, expected_scaled = base.astype(np.float64), None
    for token, slot in ((0, 0), (1, 0), (3, 1), (4, 1), (5, 1)):
        for part, columns in ((0, slice(0, 4)), (1, slice(4, 7))):
            if (slot, part) in expected_update:
                expected[token, columns] += expected_update[slot, part] @ x[token].astype(np.float64)
    expected_scaled = expected.copy()
    for token in (0, 1):
        expected_scaled[token] *= np.concatenate([expected_factor[0, 0], expected_factor[0, 1]])
    # x and the weights are exact in float64; the shrink's result and y are rounded to dtype.
    tolerance = {np.float32: 1e-5, np.float16: 1e-2, ml_dtypes.bfloat16: 1e-1}[dtype]
    assert y.dtype == scaled.dtype == dtype
    np.testing.assert_allclose(y.astype(np.float64), expected, atol=tolerance)
    np.testing.assert_allclose(scaled.astype(np.float64), expected_scaled, atol=2 * tolerance)
    assert y[2].tobytes() == scaled[2].tobytes() == base[2].tobytes()
    # Without magnitudes, Dora is Lora.
    assert y[3:].tobytes() == scaled[3:].tobytes()
    for plugin in (LORA, DORA):
        with pytest.raises(ValueError, match="slot 0 has rank 3 in module 1; max_rank 2"):
            plugin.evaluate(inputs, {**MODULES, "max_rank": 2})


def test_dora_rounds_once() -> None:
    """The factor applies to the float32 sum, not to the rounded result of Lora."""
    base, x = np.asarray([[1.0]], np.float16), np.asarray([[1.0]], np.float16)
    a, b = np.asarray([[2.0**-11]], np.float16), np.asarray([[1.0]], np.float16)
    magnitude = np.asarray([1536.0], np.float32)
    ranks, pointers = np.zeros((1, 1, NUM_MODULES), np.int32), np.zeros((1, 1, NUM_MODULES, 3), np.int64)
    ranks[0, 0, 4] = 1
    pointers[0, 0, 4] = [a.ctypes.data, b.ctypes.data, magnitude.ctypes.data]
    tables = (np.asarray([0, 1], np.int32), np.asarray([0], np.int32), ranks, pointers)
    attributes = {"layer": 0, "module_ids": [4], "out_sizes": [1], "max_rank": 1}
    # 1 + 2^-11 is halfway between two float16 numbers and would be rounded to 1. 1536.75 is rounded to 1537.
    (y,) = DORA.evaluate((x, base, *tables), attributes)
    assert y[0, 0] == 1537.0


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("chunks", [[9], [4, 5], [1] * 9])
def test_paged_attention_equals_dense_attention(window: int, chunks: list[int]) -> None:
    heads, kv_heads, head_dim, tokens = 4, 2, 6, 9
    q, k, v = (RNG.standard_normal((tokens, n, head_dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    angles = np.arange(tokens)[:, None] * np.asarray([1.0, 0.1, 0.01])[None]
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def turned(x: np.ndarray) -> np.ndarray:
        pairs = x[..., :3] + 1j * x[..., 3:]
        pairs = pairs * np.exp(1j * angles)[:, None]
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    scores = np.einsum("thd,uhd->htu", turned(q), np.repeat(turned(k), 2, axis=1)) * 0.4
    ages = np.arange(tokens)[:, None] - np.arange(tokens)[None]
    seen = (ages >= 0) & (ages < (window or tokens))
    weights = np.exp(np.where(seen, scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("htu,uhd->thd", weights, np.repeat(v, 2, axis=1)).reshape(tokens, -1)

    attributes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "scale": 0.4}
    pool, outputs, begin = np.full((5, 2, kv_heads, 4, head_dim), np.nan, np.float32), [], 0
    for size in chunks:
        part = slice(begin, begin + size)
        attended, pool = PAGED_ATTENTION.evaluate(
            (
                *(x[part].reshape(size, -1) for x in (q, k, v)),
                pool,
                np.asarray([[3, 0, 4]], np.int32),
                np.asarray([0, size], np.int32),
                np.arange(begin, begin + size, dtype=np.int32),
                cosine[part],
                sine[part],
            ),
            {**attributes, "sliding_window": window, "softcap": 0.0},
        )
        outputs.append(attended)
        begin += size
    np.testing.assert_allclose(np.concatenate(outputs), expected, atol=1e-5)
    assert np.isnan(pool[[1, 2]]).all()  # blocks outside the table stay unchanged


def test_reference_op_refuses_what_the_schema_refuses() -> None:
    evaluator = ReferenceEvaluator(model_of(LORA, LORA_SHAPES, **MODULES), new_ops=reference_ops(PLUGINS))
    arrays = {
        "x": np.zeros((1, 5), np.float32),
        "base": np.zeros((1, 8), np.float32),
        "sequence_offsets": np.asarray([0, 1], np.int32),
        "adapter_slots": np.asarray([-1], np.int32),
        "ranks": np.zeros((1, 2, NUM_MODULES), np.int32),
        "pointers": np.zeros((1, 2, NUM_MODULES, 3), np.int64),
    }
    with pytest.raises(ValueError, match="add up to 7"):
        evaluator.run(None, arrays)
    arrays["base"] = np.zeros((2, 7), np.float32)
    with pytest.raises(ValueError, match="base has 2 where 'tokens' is 1"):
        evaluator.run(None, arrays)
