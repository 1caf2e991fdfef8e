"""Tensors of all experts become the linear layers of each expert, in both layouts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaptrt._core import CheckpointError
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.hf_weights import HfWeights
from adaptrt.formats.checkpoint.stacked_experts import (
    ALTERNATING_EXPERTS,
    CONSECUTIVE_EXPERTS,
    StackedExperts,
    experts_apart,
)
from support.families import RECURRENT, save_family

EXPERTS, OUTPUTS, INPUTS = 3, 4, 6
BLOCK = "model.layers.0.mlp.experts"


def saved(directory: Path, tensors: dict[str, np.ndarray]) -> HfWeights:
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, directory / "model.safetensors")
    return HfWeights(directory)


def layers() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        f"{BLOCK}.{expert}.{name}.weight": random.standard_normal((OUTPUTS, INPUTS), dtype=np.float32)
        for expert in range(EXPERTS)
        for name in ("gate_proj", "up_proj", "down_proj")
    }


def stacked_of(apart: dict[str, np.ndarray], stacked: StackedExperts) -> dict[str, np.ndarray]:
    def of(expert: int, name: str) -> np.ndarray:
        return apart[f"{BLOCK}.{expert}.{name}.weight"]

    down = np.stack([of(expert, "down_proj") for expert in range(EXPERTS)])
    pairs = [(of(expert, "gate_proj"), of(expert, "up_proj")) for expert in range(EXPERTS)]
    if not stacked.alternates:
        both = np.stack([np.concatenate(pair) for pair in pairs])
        return {f"{BLOCK}.gate_up_proj": both, f"{BLOCK}.down_proj": down}
    both = np.stack([np.stack(pair, axis=1).reshape(2 * OUTPUTS, INPUTS) for pair in pairs])
    return {f"{BLOCK}.gate_up_proj": both.transpose(0, 2, 1), f"{BLOCK}.down_proj": down.transpose(0, 2, 1)}


@pytest.mark.parametrize("stacked", [ALTERNATING_EXPERTS, CONSECUTIVE_EXPERTS], ids=["alternating", "consecutive"])
def test_each_expert_gets_its_layers(tmp_path: Path, stacked: StackedExperts) -> None:
    expected = layers()
    weights = experts_apart(saved(tmp_path, stacked_of(expected, stacked)), stacked)
    assert set(weights.names) == set(expected)
    for name, array in expected.items():
        assert weights.spec(name).shape == array.shape
        np.testing.assert_array_equal(np.concatenate(list(weights.rows(name, range(OUTPUTS)))), array)
        np.testing.assert_array_equal(np.concatenate(list(weights.rows(name, range(1, 3)))), array[1:3])


def test_models_with_a_tensor_for_each_expert_stay(tmp_path: Path) -> None:
    weights = saved(tmp_path, layers())
    assert experts_apart(weights, CONSECUTIVE_EXPERTS) is weights
    assert experts_apart(weights, None) is weights


@pytest.mark.parametrize(
    ("stacked", "shape", "expected"),
    [
        (CONSECUTIVE_EXPERTS, (3, 7, 6), r"is \[3, 7, 6\]; expected \[experts, out, in\], out a multiple of 2"),
        (CONSECUTIVE_EXPERTS, (8, 6), r"is \[8, 6\]; expected \[experts, out, in\], out a multiple of 2"),
        (ALTERNATING_EXPERTS, (3, 6, 7), r"is \[3, 6, 7\]; expected \[experts, in, out\], out a multiple of 2"),
    ],
)
def test_other_shapes_are_refused(
    tmp_path: Path, stacked: StackedExperts, shape: tuple[int, ...], expected: str
) -> None:
    weights = saved(tmp_path, {f"{BLOCK}.gate_up_proj": np.zeros(shape, np.float32)})
    with pytest.raises(CheckpointError, match=rf"{BLOCK}\.gate_up_proj.*: {expected}"):
        experts_apart(weights, stacked)


def test_a_published_model_with_stacked_experts(tmp_path: Path) -> None:
    """Qwen publishes stacked experts; transformers saves one tensor for each expert."""
    apart = save_family(RECURRENT["qwen3.5-moe"], tmp_path / "apart")
    tensors = load_file(apart / "model.safetensors")
    names = {name for name in tensors if ".mlp.experts." in name}
    assert names
    stacked = {name: array for name, array in tensors.items() if name not in names}
    for block in {name.split(".experts.")[0] + ".experts" for name in names}:
        count = len({name for name in names if name.startswith(f"{block}.") and name.endswith("down_proj.weight")})
        of = [[tensors[f"{block}.{i}.{layer}_proj.weight"] for layer in ("gate", "up", "down")] for i in range(count)]
        stacked[f"{block}.gate_up_proj"] = np.stack([np.concatenate(layers[:2]) for layers in of])
        stacked[f"{block}.down_proj"] = np.stack([layers[2] for layers in of])
    published = tmp_path / "published"
    published.mkdir()
    shutil.copy(apart / "config.json", published)
    save_file(stacked, published / "model.safetensors")
    for source, made in ((apart, "one"), (published, "two")):
        convert_checkpoint(source, tmp_path / made)
    one, two = (load_file(tmp_path / made / "rank0.safetensors") for made in ("one", "two"))
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name])
