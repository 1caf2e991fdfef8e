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
from adaptrt.formats.models.granite_moe import GRANITE_MOE
from adaptrt.formats.models.qwen3_moe import QWEN3_VL_MOE
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
    weights = experts_apart(saved(tmp_path, stacked_of(expected, stacked)), stacked, INPUTS)
    assert set(weights.names) == set(expected)
    for name, array in expected.items():
        assert weights.spec(name).shape == array.shape
        np.testing.assert_array_equal(np.concatenate(list(weights.rows(name, range(OUTPUTS)))), array)
        np.testing.assert_array_equal(np.concatenate(list(weights.rows(name, range(1, 3)))), array[1:3])


@pytest.mark.parametrize("inputs_first", [False, True])
def test_sizes_tell_the_order_of_axes(tmp_path: Path, inputs_first: bool) -> None:
    """Qwen3-VL's published files and those of transformers 5 differ."""
    random = np.random.default_rng(1)
    both, down = (
        random.standard_normal((EXPERTS, 2 * OUTPUTS, INPUTS)),
        random.standard_normal((EXPERTS, INPUTS, OUTPUTS)),
    )
    order = (0, 2, 1) if inputs_first else (0, 1, 2)
    tensors = {f"{BLOCK}.gate_up_proj": both.transpose(order), f"{BLOCK}.down_proj": down.transpose(order)}
    weights = experts_apart(saved(tmp_path, tensors), QWEN3_VL_MOE.stacked_experts, INPUTS)
    np.testing.assert_array_equal(weights.joined_rows(f"{BLOCK}.1.gate_proj.weight"), both[1, :OUTPUTS])
    np.testing.assert_array_equal(weights.joined_rows(f"{BLOCK}.1.up_proj.weight"), both[1, OUTPUTS:])
    np.testing.assert_array_equal(weights.joined_rows(f"{BLOCK}.2.down_proj.weight"), down[2])


def test_older_names_of_parameters(tmp_path: Path) -> None:
    """Granite's published files have input_linear and output_linear; the shared MLP has such names too."""
    block = "model.layers.0.block_sparse_moe"
    both, down = np.ones((EXPERTS, 2 * OUTPUTS, INPUTS)), np.zeros((EXPERTS, INPUTS, OUTPUTS))
    shared = "model.layers.0.shared_mlp.input_linear.weight"
    tensors = {f"{block}.input_linear.weight": both, f"{block}.output_linear.weight": down, shared: both[0]}
    weights = experts_apart(saved(tmp_path, tensors), GRANITE_MOE.stacked_experts, INPUTS)
    names = {f"{block}.experts.{e}.{n}_proj.weight" for e in range(EXPERTS) for n in ("gate", "up", "down")}
    assert set(weights.names) == {shared, *names}
    assert weights.where(f"{block}.experts.0.up_proj.weight").endswith(f"tensor '{block}.input_linear.weight'")


def test_models_with_a_tensor_for_each_expert_stay(tmp_path: Path) -> None:
    weights = saved(tmp_path, layers())
    assert experts_apart(weights, CONSECUTIVE_EXPERTS, INPUTS) is weights
    assert experts_apart(weights, None, INPUTS) is weights


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
        experts_apart(weights, stacked, INPUTS)


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
