"""Values of published quantised tensors, bit for bit, and refusals of tensors and fields."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adaptrt
from adaptrt._core import DType, QuantAlgo, dtype_name
from adaptrt.formats.checkpoint.hf_weights import HfWeights
from adaptrt.formats.checkpoint.quantizer import dequantize_rows
from adaptrt.formats.hugging_face.published.config import read_published_format
from adaptrt.formats.hugging_face.published.formats import PublishedFormat
from adaptrt.formats.hugging_face.published.packed_numbers import unpacked
from support.examples import examples
from support.published import FLOAT8, KEPT, SCHEMES, Layer, Scheme, gptq, in_words, json_bytes, write

SOURCE = "model.layers.0.mlp.down_proj"
NAME = f"{SOURCE}.weight"
# Examples per format; the formats share most of their code.
EXAMPLES = examples(20, 2500)


def format_of(config: dict[str, Any]) -> PublishedFormat:
    problems: list[str] = []
    found = read_published_format(config, problems)
    assert problems == []
    assert found is not None
    return found


def layer_of(scheme: Scheme, rng: np.random.Generator, outputs: int, inputs: int) -> Layer:
    return scheme.quantize(rng.normal(scale=0.1, size=(outputs, inputs)).astype(np.float32), rng)


def save(layer: Layer, directory: Path, shards: int = 1) -> HfWeights:
    tensors = {SOURCE + suffix: tensor for suffix, tensor in layer.tensors.items()}
    return HfWeights(write(directory, {}, tensors, shards))


def sizes(data: st.DataObject, scheme: Scheme) -> tuple[int, int]:
    """Draws [out, in] that the format allows."""
    outputs = scheme.fills_words * data.draw(st.integers(1, 70 // scheme.fills_words), "outputs")
    of_inputs = int(np.lcm(scheme.fills_words, scheme.group_size))
    return outputs, of_inputs * data.draw(st.integers(1, max(1, 200 // of_inputs)), "inputs")


@pytest.mark.parametrize("name", SCHEMES)
@settings(deadline=None, max_examples=EXAMPLES)
@given(data=st.data())
def test_any_rows_have_the_bits_that_the_formula_gives(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scheme = SCHEMES[name]
    layer = layer_of(scheme, np.random.default_rng(data.draw(st.integers(0, 99))), *sizes(data, scheme))
    published = save(layer, tmp_path_factory.mktemp("layer") / "model", data.draw(st.integers(1, 2), "shards"))
    weights = published.with_matrices(format_of(scheme.config).matrices(published))
    assert weights.names == [NAME]
    assert weights.spec(NAME).shape == layer.values.shape
    assert weights.spec(NAME).dtype == (np.float32 if scheme.dtype is None else scheme.dtype)
    assert weights.stored_bytes([NAME]) == sum(tensor.nbytes for tensor in layer.tensors.values())
    first = data.draw(st.integers(0, len(layer.values)), "first")
    rows = range(first, data.draw(st.integers(first, len(layer.values)), "last"))
    step = data.draw(st.none() | st.integers(1, 80), "step")
    pieces = list(weights.rows(NAME, rows, step))
    found = np.concatenate([*pieces, np.empty((0, layer.values.shape[1]), layer.values.dtype)])
    assert found.dtype == layer.values.dtype
    assert found.tobytes() == layer.values[rows.start : rows.stop].tobytes()
    if step is not None:
        assert [len(piece) for piece in pieces] == [min(step, len(rows) - at) for at in range(0, len(rows), step)]


@pytest.mark.parametrize("name", KEPT)
@settings(deadline=None, max_examples=EXAMPLES)
@given(data=st.data())
def test_numbers_and_scales_are_kept_where_a_checkpoint_can_hold_them(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scheme = KEPT[name]
    layer = layer_of(scheme, np.random.default_rng(data.draw(st.integers(0, 99))), *sizes(data, scheme))
    weights = save(layer, tmp_path_factory.mktemp("layer") / "model")
    published = format_of(scheme.config)
    matrix: Any = published.matrices(weights)[NAME]
    assert published.kept is not None
    how = matrix.kept_as()
    state = _state(layer)
    block_size = 1 if state is None else json.loads(layer.tensors[state].tobytes())["blocksize"]
    if how is not None and how.is_float8:
        assert (how.group_size is None) == (name in ("float8-tensor", "float8-channel", "float8-channel-float32"))
    if ".weight" in layer.tensors and layer.tensors[".weight"].dtype in (FLOAT8, np.int8):
        block_size = 2
    if layer.values.shape[1] % block_size != 0:
        assert how is None
        return
    assert how.problems() == []
    if how.quant_algo is QuantAlgo.W4A16:
        assert dtype_name(how.scale_dtype) == ("float32" if state else str(scheme.dtype))
    for other in (how, replace(how, scale_dtype=DType.FLOAT32)):
        pieces = list(matrix.quantized_rows(range(len(layer.values)), 7, other))
        found = np.concatenate([dequantize_rows(piece, other) for piece in pieces])
        if other.act_order:
            found[:, matrix.permutation()] = found.copy()
        # Integers times scales; the format's library rounds the products to the scales' dtype.
        assert found.astype(layer.values.dtype).tobytes() == layer.values.tobytes()


def _state(layer: Layer) -> str | None:
    """Returns the name of the tensor with bitsandbytes' description of a layer."""
    return next((name for name in layer.tensors if "quant_state" in name), None)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("nf4", lambda t: t[".weight.absmax"].fill(np.inf)),
        ("nf4-double-float16", lambda t: t[".weight.nested_absmax"].fill(1e9)),
        ("gptq-4", lambda t: t.update({".scales": np.full_like(t[".scales"], np.inf)})),
        ("gptq-8-no-groups", lambda t: t.update({".scales": np.full_like(t[".scales"], np.nan)})),
        ("fp8-blocks", lambda t: t[".weight_scale_inv"].fill(2.0**119)),
        ("float8-channel", lambda t: t[".weight_scale"].fill(np.inf)),
        ("gptq-4", lambda t: t[".g_idx"].__setitem__(0, 1)),
        ("gptq-8-act-order", lambda t: t[".g_idx"].fill(0)),
        ("llm-int8", lambda t: t[".SCB"].fill(np.inf)),
        ("gptq-4", lambda t: t.update({".qzeros": t[".qzeros"] + 1})),
        ("gptq-8-no-groups", lambda t: t.update({".qzeros": t[".qzeros"] + 1})),
    ],
)
def test_layers_that_a_checkpoint_cannot_hold_are_not_kept(name: str, change: Any, tmp_path: Path) -> None:
    layer = layer_of(KEPT[name], np.random.default_rng(0), 64, 128)
    change(layer.tensors)
    matrix: Any = format_of(KEPT[name].config).matrices(save(layer, tmp_path / "model"))[NAME]
    assert matrix.kept_as() is None


def test_numbers_of_float8_that_are_none_or_overflow_are_refused(tmp_path: Path) -> None:
    layer = layer_of(KEPT["fp8-blocks"], np.random.default_rng(0), 64, 128)
    numbers, scales = layer.tensors[".weight"], layer.tensors[".weight_scale_inv"]
    scales[3, 1] = 200.0
    numbers[55, 40] = 416.0
    matrix: Any = format_of(KEPT["fp8-blocks"].config).matrices(save(layer, tmp_path / "large"))[NAME]
    how = matrix.kept_as()
    assert len(list(matrix.quantized_rows(range(64), 64, how))) == 1
    half = replace(how, value_dtype=DType.FLOAT16)
    assert len(list(matrix.quantized_rows(range(48), 48, half))) == 1
    with pytest.raises(adaptrt.CheckpointError, match=rf"{NAME}.*: holds .*, which overflows float16"):
        list(matrix.quantized_rows(range(64), 64, half))
    numbers.view(np.uint8)[7, 9] = 0xFF
    matrix = format_of(KEPT["fp8-blocks"].config).matrices(save(layer, tmp_path / "nan"))[NAME]
    with pytest.raises(adaptrt.CheckpointError, match=rf"{NAME}.*: holds nan; weights must be finite"):
        list(matrix.quantized_rows(range(64), 64, how))


@settings(deadline=None)
@given(bits=st.sampled_from((2, 3, 4, 8)), data=st.data())
def test_numbers_in_words(bits: int, data: st.DataObject) -> None:
    rows, words = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    count = 32 * words
    numbers = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 2**bits, (rows, count)).astype(np.uint8)
    packed = np.ascontiguousarray(in_words(numbers.T, bits).T)
    assert np.array_equal(unpacked(packed, bits), numbers)
    assert np.array_equal(unpacked(packed.view(np.uint32), bits), numbers)


def test_zero_points_that_libraries_read_differently_are_refused(tmp_path: Path) -> None:
    """The stored 15 is either 16 minus one, or 0 minus one with a borrow from the next number."""
    scheme = gptq(4, 32, symmetric=False, quantizer="auto_gptq:0.7.1")
    layer = layer_of(scheme, np.random.default_rng(0), 64, 128)
    with pytest.raises(adaptrt.CheckpointError, match=r"qzeros': holds 15, .*accepted: checkpoint_format gptq_v2"):
        format_of(scheme.config).matrices(save(layer, tmp_path / "model"))


Change = Callable[[dict[str, Any]], Any]
OFFSET = ".weight.quant_state.bitsandbytes__nf4"


def with_state(**fields: Any) -> Change:
    def change(tensors: dict[str, Any]) -> None:
        state = {**json.loads(tensors[OFFSET].tobytes()), **fields}
        tensors[OFFSET] = json_bytes({name: value for name, value in state.items() if value is not ...})

    return change


def replaced(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda tensors: tensors.update({name: make(tensors[name])})


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("nf4", without(".weight"), "down_proj.weight' is missing"),
        ("nf4", without(".weight.absmax"), "weight.absmax' is missing"),
        ("nf4", without(".weight.quant_map"), "weight.quant_map' is missing"),
        ("nf4", without(OFFSET), r"says bitsandbytes of 4 bits, but no tensor is named \*.weight.quant_state"),
        ("nf4-double", without(".weight.nested_absmax"), "weight.nested_absmax' is missing"),
        ("nf4", replaced(".weight", lambda a: a[:-1]), r"down_proj.weight': is \[4095, 1\]; expected \[4096, 1\]"),
        ("nf4", replaced(".weight", lambda a: a.reshape(1, -1)), r"is \[1, 4096\]; expected \[4096, 1\]"),
        ("nf4", replaced(".weight.absmax", lambda a: a.astype(np.float64)), "is of float64; accepted: float32"),
        ("nf4", replaced(".weight.quant_map", lambda a: a + 1), "quant_map': is not the table of nf4"),
        ("nf4", replaced(OFFSET, lambda a: a[:-3].copy()), "bitsandbytes__nf4': not JSON"),
        ("nf4", replaced(OFFSET, lambda a: np.zeros(5000, np.uint8)), "expected JSON, uint8"),
        ("nf4", with_state(quant_type="fp4"), 'quant_type is "fp4"; accepted: nf4'),
        ("nf4", with_state(blocksize=63), "blocksize is 63; accepted: 32, 64"),
        ("nf4", with_state(blocksize=...), "blocksize is missing"),
        ("nf4", with_state(blocksize=128), r"absmax': is \[128\]; expected \[64\]"),
        ("nf4", with_state(dtype="float8"), 'dtype is "float8"; accepted: float32'),
        ("nf4", with_state(shape=[64, 129]), r"down_proj.weight': is \[4096, 1\]; expected \[4128, 1\]"),
        ("nf4", with_state(shape=[2**31, 2]), "shape is"),
        ("nf4", with_state(shape=[8192]), r"shape is \[8192\]; expected \[out, in\]"),
        ("nf4", with_state(more=1), "more is unknown"),
        ("nf4-double", with_state(nested_blocksize=64), "nested_blocksize must be 256"),
        ("nf4-double", with_state(nested_offset="x"), 'nested_offset is "x"; expected a finite number'),
        ("nf4-double", with_state(nested_dtype="bfloat16"), 'nested_dtype is "bfloat16"'),
        ("llm-int8", replaced(".SCB", lambda a: a[:-1]), "down_proj.weight': is"),
        ("llm-int8", replaced(".SCB", lambda a: a.reshape(1, -1)), r"expected \[out\], with a weight"),
        ("llm-int8", replaced(".weight", lambda a: a.astype(np.uint8)), "is of uint8; accepted: int8"),
        ("llm-int8", without(".weight"), r"expected \[out\], with a weight|is missing"),
        ("llm-int8", replaced(".weight_format", lambda a: a + np.uint8(1)), "weight_format': is .*1.*; accepted: 0"),
        ("gptq-4", without(".qzeros"), "qzeros' is missing"),
        ("gptq-4", without(".scales"), "scales' is missing"),
        ("gptq-4", without(".qweight"), r"no tensor is named \*.qweight"),
        ("gptq-4", replaced(".qweight", lambda a: a[:-1]), r"qzeros': is|scales': is|g_idx': is"),
        ("gptq-4", replaced(".qweight", lambda a: a[:, :-1]), r"qweight': is \[16, 63\]; expected \[in \* 4 / 32"),
        ("gptq-4", replaced(".qweight", lambda a: a.astype(np.int64)), "is of int64; accepted: int32"),
        ("gptq-4", replaced(".qweight", np.ravel), r"qweight': is \[1024\]"),
        ("gptq-3", replaced(".qweight", lambda a: a[:-1]), r"qweight': is \[11, 64\]"),
        ("gptq-4", replaced(".scales", lambda a: a[:-1]), r"scales': is \[3, 64\]; expected \[4, 64\]"),
        ("gptq-4", replaced(".scales", lambda a: a.astype(np.float64)), "is of float64; accepted: float32"),
        ("gptq-4", replaced(".g_idx", lambda a: a + 1), "g_idx': names group 4; there are 4"),
        ("gptq-4", replaced(".g_idx", lambda a: a - 1), "g_idx': names group -1"),
        ("gptq-4", replaced(".g_idx", lambda a: a[:-1]), r"g_idx': is \[127\]"),
        ("awq-gemm", without(".qzeros"), "qzeros' is missing"),
        ("awq-gemm", replaced(".scales", lambda a: a.T), r"scales': is \[64, 4\]; expected \[4, 64\]"),
        ("awq-gemm", replaced(".qweight", np.ravel), "expected a matrix"),
        ("awq-gemv", replaced(".scales", lambda a: a[:, :4]), r"scales': is \[64, 4\]; expected \[64, 32\]"),
        ("fp8-blocks", replaced(".weight_scale_inv", lambda a: a[:-1]), r"is \[3, 4\]; expected \[4, 4\]"),
        ("fp8-blocks", replaced(".weight", lambda a: a.astype(np.float32)), "is of float32; accepted: float8_e4m3fn"),
        ("fp8-blocks", without(".weight"), "expected a weight"),
        ("float8-channel", replaced(".weight_scale", lambda a: a.T), r"is \[1, 64\]; expected \[64, 1\]"),
        ("float8-tensor", replaced(".weight_scale", lambda a: np.tile(a, 2)), r"is \[2\]; expected \[1, 1\]"),
        ("packed-4-float16", without(".weight_shape"), "weight_shape' is missing"),
        ("packed-4-float16", replaced(".weight_shape", lambda a: a - 200), "expected"),
        ("packed-4-float16", replaced(".weight_shape", lambda a: a * 2**40), r"is \[64, 16\]; expected"),
        ("packed-4-groups-of-16", replaced(".weight_shape", lambda a: a - [0, 8]), "; expected a multiple of"),
    ],
)  # fmt: skip
def test_tensors_of_another_kind_are_refused(name: str, change: Change, reason: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    layer = layer_of(scheme, np.random.default_rng(0), 64, 128)
    change(layer.tensors)
    weights = save(Layer({n: np.ascontiguousarray(t) for n, t in layer.tensors.items()}, layer.values), tmp_path / "m")
    with pytest.raises(adaptrt.CheckpointError, match=reason):
        format_of(scheme.config).matrices(weights)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("nf4", {"load_in_8bit": True}, "load_in_4bit and load_in_8bit are both true"),
        ("nf4", {"load_in_4bit": False}, "load_in_4bit and load_in_8bit are both false"),
        ("nf4", {"load_in_4bit": 1}, "load_in_4bit is 1; expected true or false"),
        ("nf4", {"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight is true"),
        ("nf4", {"new_feature": 1}, "quantization_config.new_feature is unknown"),
        ("gptq-4", {"bits": 5}, "bits is 5; accepted: 2, 3, 4, 8"),
        ("gptq-4", {"group_size": 0}, "group_size is 0; accepted: -1"),
        ("gptq-4", {"group_size": -2}, "group_size is -2"),
        ("gptq-4", {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"; accepted: gptq, gptq_v2'),
        ("gptq-4", {"format": "gptq_v2"}, "checkpoint_format and format differ"),
        ("gptq-4", {"pack_dtype": "int64"}, 'pack_dtype is "int64"; accepted: int32'),
        ("gptq-4", {"is_marlin_format": True}, "is_marlin_format is true"),
        ("gptq-4", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic is .*begin with '-:'"),
        ("gptq-4", {"rotation": "hadamard"}, "rotation is unknown"),
        ("awq-gemm", {"bits": 3}, "bits is 3; accepted: 4"),
        ("awq-gemm", {"version": "gemv_fast"}, 'version is "gemv_fast"; accepted: gemm, gemv'),
        ("awq-gemm", {"backend": "llm-awq"}, "backend is llm-awq"),
        ("fp8-blocks", {"fmt": "e5m2"}, 'fmt is "e5m2"; accepted: e4m3'),
        ("fp8-blocks", {"expert_dtype": "fp4"}, 'expert_dtype is "fp4"; accepted: fp8'),
        ("fp8-blocks", {"weight_block_size": [128]}, r"weight_block_size is \[128\]; expected the outputs"),
        ("fp8-blocks", {"weight_block_size": [0, 1]}, r"weight_block_size is \[0, 1\]"),
        ("fp8-blocks", {"quant_method": "nvfp4"}, 'quant_method is "nvfp4"; accepted: compressed-tensors, bits'),
        ("fp8-blocks", {"quant_method": None}, "quant_method is null; accepted"),
        ("fp8-blocks", {"quant_method": ["fp8"]}, "quant_method is"),
        ("float8-block", {"format": "mxfp4-pack-quantized"}, 'format is "mxfp4-pack-quantized"; accepted'),
    ],
)  # fmt: skip
def test_other_fields_are_refused(name: str, fields: dict[str, Any], reason: str) -> None:
    problems: list[str] = []
    assert read_published_format({**SCHEMES[name].config, **fields}, problems) is None
    assert any(re.search(reason, problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"type": "int"}, 'type is "int"; accepted: float'),
        ({"num_bits": 4}, "num_bits is 4; accepted: 8"),
        ({"strategy": "group"}, 'strategy is "group"; accepted: tensor, channel, block'),
        ({"block_structure": [16, 16]}, "block_structure is .*, but strategy is channel"),
        ({"symmetric": False}, "symmetric must be true"),
        ({"dynamic": True}, "dynamic is true; accepted: false"),
    ],
)
def test_other_weights_of_float8_are_refused(weights: dict[str, Any], reason: str) -> None:
    config = copy.deepcopy(SCHEMES["float8-channel"].config)
    config["config_groups"]["group_0"]["weights"].update(weights)
    problems: list[str] = []
    assert read_published_format(config, problems) is None
    assert any(re.search(reason, problem) for problem in problems), problems


def test_harmless_fields_of_other_tools() -> None:
    """AutoRound and older releases of AutoGPTQ write these."""
    older = {"bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": False, "sym": True, "quant_method": "gptq"}
    older |= {"model_name_or_path": None, "model_file_base_name": "model", "true_sequential": True}
    auto_round = {"bits": 4, "group_size": 128, "sym": True, "quant_method": "gptq", "provider": "auto-round"}
    auto_round |= {"act_bits": 16, "static_kv_granularity": "tensor", "static_attention_granularity": "tensor"}
    auto_round |= {"autoround_version": "0.9", "data_type": "int", "nsamples": 512, "seqlen": 2048, "iters": 200}
    for config in (older, auto_round):
        assert format_of(config).describe() == "GPTQ of 4 bits in groups of 128"
    excluded = {**older, "dynamic": {"-:.*gate.*": {}}, "meta": {"quantizer": ["gptqmodel:2.0.0"]}, "backend": None}
    assert format_of(excluded).kept is not None
    assert format_of({**SCHEMES["awq-gemm"].config, "version": "GEMM"}).describe() == "AWQ of 4 bits in groups of 32"
    assert format_of({**SCHEMES["gptq-4"].config, "scales": None}).kept is not None
