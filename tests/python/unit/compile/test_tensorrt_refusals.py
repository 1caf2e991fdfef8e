"""Errors for graphs that TensorRT refuses and for processes that die: they name the node and quote the last words."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from adaptrt._core import DType, EngineError
from adaptrt.builder.build import build
from adaptrt.builder.compile.tensorrt import process
from adaptrt.builder.compile.tensorrt.messages import Built, PlanRequest
from adaptrt.builder.compile.tensorrt.process import Children, describe_package, run_build
from adaptrt.formats.engine.tensorrt.package import Package
from adaptrt.plugins import LORA
from adaptrt.plugins.adapter_tables import NUM_MODULES
from support.engines import SMALL, make_checkpoint, make_engine
from support.models import ModelSpec
from support.tensorrt_plans import needs_tensorrt_rtx, tensorrt_config

pytestmark = needs_tensorrt_rtx

Shape = tuple[int, ...]
X = ("x", TensorProto.FLOAT16, ("n", 8))
Y = ("y", TensorProto.FLOAT16, ("n", 8))
ROWS = ((1, 8), (4, 8), (8, 8))


@pytest.fixture(scope="module")
def package() -> Package:
    return describe_package()


def build_nodes(
    package: Package,
    directory: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[tuple[str, int, tuple[int | str, ...]]],
    profile: Mapping[str, tuple[Shape, Shape, Shape]],
    output: tuple[str, int, tuple[int | str, ...]] = Y,
) -> Built:
    """Builds a plan of a small graph."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*output)],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("adaptrt", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    (directory / "network.onnx").write_bytes(model.SerializeToString())
    return run_build(package, request(package, directory, profile), lambda phase, fraction: None, Children())


def request(package: Package, directory: Path, profile: Mapping[str, Any]) -> PlanRequest:
    return PlanRequest(
        package=package.name,
        network=str(directory / "network.onnx"),
        weights=None,
        compute_capability="8.0",
        profiles=(profile,) if profile else (),
        timing_cache=None,
        streams_weights=False,
        plan=str(directory / "plan"),
    )


def lora_node(**attributes: Any) -> onnx.NodeProto:
    inputs = [tensor.name for tensor in LORA.inputs]
    known = {"layer": 0, "module_ids": [1], "out_sizes": [8], "max_rank": 4, **attributes}
    return helper.make_node(
        "Lora", inputs, ["y"], name="layers.0/Lora_0", domain="adaptrt", plugin_version="1",
        plugin_namespace="adaptrt", **known,
    )  # fmt: skip


LORA_INPUTS = [
    ("x", TensorProto.FLOAT16, ("n", 8)),
    ("base", TensorProto.FLOAT16, ("n", 8)),
    ("sequence_offsets", TensorProto.INT32, ("s1",)),
    ("adapter_slots", TensorProto.INT32, ("s",)),
    ("ranks", TensorProto.INT32, ("slots", 2, NUM_MODULES)),
    ("pointers", TensorProto.INT64, ("slots", 2, NUM_MODULES, 3)),
]
LORA_PROFILE = {
    "x": ROWS,
    "base": ROWS,
    "sequence_offsets": ((2,), (3,), (9,)),
    "adapter_slots": ((1,), (2,), (8,)),
    "ranks": ((1, 2, NUM_MODULES),) * 3,
    "pointers": ((1, 2, NUM_MODULES, 3),) * 3,
}


def test_a_node_that_fits_is_built(package: Package, tmp_path: Path) -> None:
    built = build_nodes(package, tmp_path, [lora_node()], LORA_INPUTS, LORA_PROFILE)
    assert built.num_bytes == (tmp_path / "plan").stat().st_size > 0


@pytest.mark.parametrize(
    ("node", "inputs", "profile", "complaints"),
    [
        (
            helper.make_node("Det", ["x"], ["y"], name="layers.0/Det_0"),
            [("x", TensorProto.FLOAT16, (8, 8))],
            {},
            ["node layers.0/Det_0 (Det)", "UNSUPPORTED_NODE"],
        ),
        (
            helper.make_node("Gemm", ["x", "w"], ["y"], name="layers.0/Gemm_0", transB=1),
            [X, ("w", TensorProto.FLOAT16, (8, 9))],
            {"x": ROWS},
            ["node layers.0/Gemm_0 (Gemm)", "last dimension of input0 = 8 and last dimension of input1 = 9"],
        ),
        (
            helper.make_node("Add", ["x", "w"], ["y"], name="layers.0/Add_0"),
            [X, ("w", TensorProto.FLOAT, (8,))],
            {"x": ROWS},
            ["node layers.0/Add_0 (Add)", "must have same input types"],
        ),
        (
            helper.make_node("Add", ["x", "w"], ["y"], name="layers.0/Add_0"),
            [X, ("w", TensorProto.FLOAT16, ("m", 8))],
            {"x": ROWS, "w": ((3, 8), (3, 8), (9, 8))},
            ["node layers.0/Add_0 (Add)", "Broadcast has incompatible dimensions: 3 != 4"],
        ),
        (
            helper.make_node("Relu", ["x"], ["y"], name="layers.0/Relu_0"),
            [X],
            {},
            ["no optimization profile has been defined"],
        ),
        (
            helper.make_node("Unheard", ["x"], ["y"], name="layers.0/Unheard_0", domain="adaptrt"),
            [X],
            {"x": ROWS},
            ["node layers.0/Unheard_0 (Unheard)", "Plugin not found"],
        ),
        (lora_node(out_sizes=[7]), LORA_INPUTS, LORA_PROFILE, ["layers.0/Lora_0", "out_sizes"]),
        (
            lora_node(),
            [(name, TensorProto.FLOAT if name == "base" else kind, shape) for name, kind, shape in LORA_INPUTS],
            LORA_PROFILE,
            ["layers.0/Lora_0 (Lora)", "Failed to find any supported plugin"],
        ),
    ],
)
def test_errors_of_tensorrt_name_the_node_and_the_reason(
    package: Package,
    tmp_path: Path,
    node: onnx.NodeProto,
    inputs: list[tuple[str, int, tuple[int | str, ...]]],
    profile: Mapping[str, tuple[Shape, Shape, Shape]],
    complaints: list[str],
) -> None:
    with pytest.raises(EngineError) as refusal:
        build_nodes(package, tmp_path, [node], inputs, profile)
    assert str(refusal.value).startswith(f"{package.title}, compute capability 8.0: ")
    for complaint in complaints:
        assert complaint in str(refusal.value)
    for misleading in ("\n", "CUDA driver"):
        assert misleading not in str(refusal.value)


def test_a_file_that_is_no_network_is_refused(package: Package, tmp_path: Path) -> None:
    (tmp_path / "network.onnx").write_bytes(b"")
    with pytest.raises(EngineError, match=r"compute capability 8\.0: "):
        run_build(package, request(package, tmp_path, {}), lambda phase, fraction: None, Children())


def test_a_full_disk_is_an_error(package: Package, tmp_path: Path) -> None:
    build_nodes(package, tmp_path, [lora_node()], LORA_INPUTS, LORA_PROFILE)
    to_full_disk = replace(request(package, tmp_path, LORA_PROFILE), plan="/dev/full")
    with pytest.raises(EngineError, match="the plan cannot be written: No space left on device"):
        run_build(package, to_full_disk, lambda phase, fraction: None, Children())


def test_a_process_that_aborts_is_an_error_with_its_last_words(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this link, TensorRT for RTX 1.7 aborts the process at the first plugin.
    monkeypatch.setattr(process, "complete_libraries", lambda name, directory: None)
    with pytest.raises(EngineError) as death:
        build_nodes(package, tmp_path, [lora_node()], LORA_INPUTS, LORA_PROFILE)
    for words in ("was ended by SIGABRT", "Successfully created plugin: Lora", "terminate called without an active"):
        assert words in str(death.value)


def test_a_package_that_cannot_be_imported_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt").mkdir()
    (tmp_path / "tensorrt" / "__init__.py").write_text("raise ImportError('libnvinfer.so.11: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError, match=r"package tensorrt: .*ended with status 1.*libnvinfer\.so\.11: cannot open"):
        describe_package()


def test_a_build_that_fails_leaves_the_engine_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = make_engine(ModelSpec(num_hidden_layers=1), tmp_path, SMALL, DType.FLOAT16)
    before = {path.name: path.read_bytes() for path in report.directory.iterdir()}
    monkeypatch.setattr(process, "complete_libraries", lambda name, directory: None)
    with pytest.raises(EngineError, match="SIGABRT"):
        build(tmp_path / "checkpoint", tensorrt_config("8.0", "8.6"), report.directory, workers=2)
    assert {path.name: path.read_bytes() for path in report.directory.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "engine", "model"]


def test_an_interruption_ends_the_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(ModelSpec(num_hidden_layers=1), tmp_path, DType.FLOAT16)
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__(command, **options)
            started.append(self)
            if len(started) == 3:  # the first process describes the package
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(process.subprocess, "Popen", Popen)
    # A shell starts background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build(checkpoint, tensorrt_config("8.0", "8.6", "8.9"), tmp_path / "engine", workers=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 3  # the third plan was never begun
    assert all(child.returncode is not None for child in started)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]
