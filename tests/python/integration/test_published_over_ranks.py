"""Models published with quantised weights, split over ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.quantizer import dequantize_rows
from support.models import save_model
from support.published import KEPT, SCHEMES, publish
from support.published_models import SPEC, WHOLE_SPEC


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(SPEC, tmp_path_factory.mktemp("published") / "model")


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(WHOLE_SPEC, tmp_path_factory.mktemp("whole") / "model")


def test_dequantised_ones_can_be_cut_over_ranks(model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, SCHEMES["gptq-4-uneven"])
    convert_checkpoint(published, tmp_path / "cut", tp_size=2)
    convert_checkpoint(tmp_path / "values", tmp_path / "expected", tp_size=2)
    for rank in range(2):
        found, expected = (load_file(tmp_path / name / f"rank{rank}.safetensors") for name in ("cut", "expected"))
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    "name",
    [
        *("nf4-double", "gptq-3", "gptq-4-asymmetric", "gptq-8-no-groups", "awq-gemm-no-groups"),
        *("gptq-8-groups", "packed-8-groups", "packed-8-asymmetric"),
        *("fp8-blocks", "float8-channel-float32", "llm-int8"),
    ],
)
def test_kept_ones_are_cut_over_ranks_between_groups(name: str, whole_model: Path, tmp_path: Path) -> None:
    published = publish(whole_model, tmp_path, KEPT[name], exact=True)
    converted = convert_checkpoint(published, tmp_path / "cut", tp_size=2, pp_size=2)
    convert_checkpoint(tmp_path / "values", tmp_path / "expected", tp_size=2, pp_size=2)
    assert converted.dequantization is None
    assert converted.config.quantization is not None
    opened = Checkpoint.open(tmp_path / "cut")
    for rank in range(4):
        values = load_file(tmp_path / "expected" / f"rank{rank}.safetensors")
        for layer in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"):
            weight = f"transformer.layers.0.{layer}.weight"
            wanted = values[weight]
            pieces = opened.ranks[rank].quantized_rows(weight, range(len(wanted)))
            found = np.concatenate([dequantize_rows(piece, converted.config.quantization) for piece in pieces])
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("name", ["gptq-4-act-order", "gptq-8-act-order"])
def test_reordered_inputs_are_not_cut(name: str, whole_model: Path, tmp_path: Path) -> None:
    """Layers that ranks split by outputs stay quantised; layers that they split by inputs are dequantised."""
    published = publish(whole_model, tmp_path, KEPT[name], exact=True)
    converted = convert_checkpoint(published, tmp_path / "cut", tp_size=2)
    convert_checkpoint(tmp_path / "values", tmp_path / "expected", tp_size=2)
    how = converted.config.quantization
    assert how is not None
    by_inputs = [f"transformer.layers.{i}.{name}" for i in range(2) for name in ("attention.dense", "mlp.proj")]
    assert sorted(how.exclude_modules) == sorted([*by_inputs, "lm_head"])
    assert converted.dequantization is not None
    assert converted.dequantization.num_matrices == 4
    opened = Checkpoint.open(tmp_path / "cut")
    for rank in range(2):
        values = load_file(tmp_path / "expected" / f"rank{rank}.safetensors")
        for layer, parts in (("attention.qkv", 3), ("mlp.fc", 1), ("mlp.gate", 1)):
            weight = f"transformer.layers.0.{layer}.weight"
            tensors = opened.ranks[rank]
            orders = tensors.permutations(weight)
            assert orders.shape == (parts, values[weight].shape[1])
            pieces = tensors.quantized_rows(weight, range(len(values[weight])))
            found = np.concatenate([dequantize_rows(piece, how) for piece in pieces])
            sizes = [64, 32, 32] if parts == 3 else [len(found)]
            for order, row, value in zip(np.repeat(orders, sizes, axis=0), found, values[weight], strict=True):
                assert np.array_equal(row, value[order])


def test_groups_that_a_rank_would_cut_are_dequantised(model: Path, tmp_path: Path) -> None:
    """With groups of 32, two ranks get 32 of 64 inputs and 48 of 96 inputs."""
    converted = convert_checkpoint(publish(model, tmp_path, KEPT["gptq-4"]), tmp_path / "cut", tp_size=2)
    assert converted.config.quantization is not None
    downs = tuple(f"transformer.layers.{layer}.mlp.proj" for layer in range(2))
    assert converted.config.quantization.exclude_modules == (*downs, "lm_head")
    assert converted.dequantization is not None
    assert converted.dequantization.num_matrices == 2
    Checkpoint.open(tmp_path / "cut")
