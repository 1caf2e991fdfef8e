"""Loaded TensorRT engines: layers that adapters act on, base weights of adapters, and errors."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import adaptrt
from adaptrt._core import AdapterError, ConfigError, DType, EngineError, LoraLayout, lora_modules
from adaptrt.builder.build import build
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.engine.build_config import LoraBuildConfig, PluginConfig, TensorRtBuildConfig
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.formats.engine.tensorrt.plan_config import TensorRtPlans
from adaptrt.runtime.adapter_store import AdapterStore
from adaptrt.runtime.engine import load_engine
from adaptrt.runtime.tensorrt import packages
from adaptrt.runtime.tensorrt.engine import TensorRtEngine
from adaptrt.runtime.tensorrt.program import make_program
from support.engines import SMALL, make_checkpoint
from support.models import ModelSpec, save_adapter

pytest.importorskip("tensorrt_rtx", reason="pip install adaptrt[tensorrt-rtx]")

SPEC = ModelSpec(family="qwen3")
DORA = PluginConfig(lora_plugin="auto", dora_plugin="enable")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a checkpoint, its model, a DoRA adapter, and three engines: weights outside, weights inside, native."""
    directory = tmp_path_factory.mktemp("tensorrt-engines")
    checkpoint = make_checkpoint(SPEC, directory, DType.FLOAT16)
    adapter = save_adapter(directory / "model", directory / "poet", 5, r=3, use_dora=True)
    config = replace(SMALL, plugin_config=DORA, lora_config=LoraBuildConfig(lora_dir=(adapter,), max_lora_rank=5))
    for weights in ("external", "constants"):
        # An engine with weights inside cannot carry adapters with raw magnitudes.
        carried = config.lora_config if weights == "external" else LoraBuildConfig(max_lora_rank=5)
        build(checkpoint, replace(config, **on_gpu(weights), lora_config=carried), directory / weights)
    build(checkpoint, config, directory / "native")
    return directory


def on_gpu(weights: str) -> dict[str, Any]:
    return {
        "backend": "tensorrt",
        "tensorrt_config": TensorRtBuildConfig(compute_capability=("8.0",), weights=weights),
    }


@pytest.fixture
def engine_copy(root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(root / "external", tmp_path / "engine")


def change_plans(directory: Path, change: Callable[[TensorRtPlans], TensorRtPlans]) -> None:
    config = EngineConfig.load(directory)
    assert config.tensorrt is not None
    replace(config, tensorrt=change(config.tensorrt)).save(directory)


def sites_of(layout: LoraLayout) -> list[Any]:
    """Returns the sites of decoder layers."""
    of_vocabulary = {info.id for info in lora_modules() if info.is_of_vocabulary}
    return [
        (site.layer, site.in_size, [(part.module, part.out_size) for part in site.parts])
        for site in layout.sites
        if site.parts[0].module not in of_vocabulary
    ]


def test_adapters_act_where_they_act_in_the_native_engine(root: Path) -> None:
    """Except lm_head and the embedding."""
    ours, native = load_engine(root / "external").lora, load_engine(root / "native").lora
    assert sites_of(ours) == sites_of(native)
    assert len(ours.sites) == len(sites_of(ours))
    for name in ("dtype", "num_layers", "max_rank", "dora_enabled"):
        assert getattr(ours, name) == getattr(native, name), name
    of_vocabulary = {info.id for info in lora_modules() if info.is_of_vocabulary}
    assert ours.target_modules == [module for module in native.target_modules if module not in of_vocabulary]


def test_the_base_weights_are_the_native_engines(root: Path) -> None:
    """Both are in float16: the same rows, and so the same normalised magnitudes."""
    adapter = root / "poet"
    converted = [
        convert_adapter(adapter, storage_dtype="float16", base=load_engine(root / name).base_weights())
        for name in ("external", "native")
    ]
    np.testing.assert_array_equal(converted[0].weights.view(np.uint16), converted[1].weights.view(np.uint16))
    from_peft = adaptrt.LoraConfig.from_peft(7, adapter, load_engine(root / "external"))
    np.testing.assert_array_equal(np.asarray(from_peft.weights).view(np.uint16), converted[1].weights.view(np.uint16))


def test_raw_magnitudes_are_refused_where_no_weights_are_given_back(root: Path) -> None:
    engine = load_engine(root / "constants")
    assert engine.base_weights() is None
    with pytest.raises(AdapterError, match="not marked as normalised"):
        adaptrt.LoraConfig.from_peft(7, root / "poet", engine)
    adaptrt.LoraConfig.from_peft(7, root / "poet", engine, magnitudes_normalized=True)


def test_raw_magnitudes_are_refused_by_a_build_that_could_not_serve_them(root: Path, tmp_path: Path) -> None:
    lora = LoraBuildConfig(lora_dir=(root / "poet",), max_lora_rank=5)
    config = replace(SMALL, plugin_config=DORA, lora_config=lora, **on_gpu("constants"))
    with pytest.raises(AdapterError, match=r"poet.*not marked as normalised"):
        build(root / "checkpoint", config, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_the_session_learns_the_plans_limits(root: Path) -> None:
    engine = load_engine(root / "external")
    assert isinstance(engine, TensorRtEngine)
    program = make_program(engine)
    model = program.model
    assert model.validate() == []
    assert (model.max_batch_size, model.max_num_tokens, model.max_seq_len) == (8, 64, 96)
    assert (model.prefill.max_tokens, model.prefill.max_sequences) == (64, 8)
    assert (model.decode.max_tokens, model.decode.max_sequences, model.decode.max_logit_rows) == (8, 8, 8)
    assert (model.tokens_per_block, model.has_prompt_lengths, model.num_adapter_slots) == (4, False, 8)
    weights = [tensor.name for tensor in engine.plans.tensors if tensor.name.startswith(("transformer.", "lm_head."))]
    assert sorted(weight.name for weight in program.weights) == sorted(weights)
    assert make_program(load_engine(root / "constants")).weights == []


def test_a_prompt_is_reusable_as_far_as_its_angles_do_not_depend_on_its_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    spec = ModelSpec(num_hidden_layers=1, max_position_embeddings=32, extra=(("rope_parameters", rope),))
    config = replace(
        SMALL, backend="tensorrt", max_seq_len=60, tensorrt_config=TensorRtBuildConfig(compute_capability=("8.0",))
    )
    build(make_checkpoint(spec, tmp_path, DType.BFLOAT16), config, tmp_path / "engine")
    engine = load_engine(tmp_path / "engine")
    assert isinstance(engine, TensorRtEngine)
    model = make_program(engine).model
    assert (model.max_reusable_prompt_len, model.max_seq_len, model.has_prompt_lengths) == (32, 60, True)
    assert (model.num_adapter_slots, list(model.lora.sites)) == (0, [])
    assert model.validate() == []


def test_carried_adapters_are_read_as_on_the_cpu(root: Path) -> None:
    ours, native = (AdapterStore(load_engine(root / name)) for name in ("external", "native"))
    assert ours.names == native.names == ("poet",)
    np.testing.assert_array_equal(
        np.asarray(ours.load("poet").weights).view(np.uint16), np.asarray(native.load("poet").weights).view(np.uint16)
    )


def test_plans_of_other_plugins_are_refused(engine_copy: Path) -> None:
    change_plans(engine_copy, lambda plans: replace(plans, plugin_version="0"))
    with pytest.raises(EngineError, match=r"version 0 of the plugins; this release has version 1\. Build"):
        load_engine(engine_copy)


def test_damaged_weights_are_refused(engine_copy: Path) -> None:
    path = engine_copy / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(EngineError, match=r"weights\.safetensors: does not have its checksum"):
        load_engine(engine_copy)
    path.unlink()
    with pytest.raises(EngineError, match=r"weights\.safetensors: is missing"):
        load_engine(engine_copy)


def test_other_profiles_are_refused(engine_copy: Path) -> None:
    engine = load_engine(engine_copy)
    assert isinstance(engine, TensorRtEngine)
    other = replace(engine, plans=replace(engine.plans, profiles=("decode", "prefill")))
    with pytest.raises(EngineError, match="has the profiles decode, prefill; expected prefill, decode"):
        make_program(other)


def test_a_missing_input_is_refused(engine_copy: Path) -> None:
    engine = load_engine(engine_copy)
    assert isinstance(engine, TensorRtEngine)
    rows = tuple(row for row in engine.plans.tensors if row.name != "input_ids")
    with pytest.raises(EngineError, match="no input input_ids"):
        make_program(replace(engine, plans=replace(engine.plans, tensors=rows)))


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = packages.importlib.util.find_spec
    monkeypatch.setattr(
        packages.importlib.util, "find_spec", lambda name, *rest: None if name == module else find_spec(name, *rest)
    )


def test_an_install_without_cuda_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without("adaptrt._cuda", monkeypatch)
    with pytest.raises(ConfigError, match=r"external: .*: adaptrt\._cuda is missing.*adaptrt\[cuda\].*nvcc"):
        adaptrt.Executor(root / "external")


def test_cuda_kernels_of_another_version_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(packages.importlib, "import_module", lambda name: SimpleNamespace(__version__="0.0.9"))
    with pytest.raises(
        ConfigError, match=rf"adaptrt-cuda is version 0\.0\.9, and adaptrt is {re.escape(adaptrt.__version__)}"
    ):
        adaptrt.Executor(root / "external")


def test_a_cuda_module_that_cannot_be_loaded_says_why(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(packages.importlib, "import_module", fail)
    with pytest.raises(ConfigError, match=r"_cuda is installed, but cannot be loaded: .*undefined symbol"):
        adaptrt.Executor(root / "external")


def test_a_machine_without_a_driver_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own error is raised."""

    def no_device(index: int) -> Any:
        raise ConfigError(f"there is no NVIDIA driver for GPU {index}")

    engine = load_engine(root / "external")
    monkeypatch.setattr("adaptrt.runtime.tensorrt.engine.import_cuda", lambda _: SimpleNamespace(CudaDevice=no_device))
    with pytest.raises(ConfigError, match="there is no NVIDIA driver for GPU 0"):
        engine.start(adaptrt.ExecutorConfig())
    with pytest.raises(ConfigError, match="for GPU 3"):
        engine.with_device(3).start(adaptrt.ExecutorConfig())


def test_kernels_of_the_cpu_are_refused(root: Path) -> None:
    engine = load_engine(root / "external")
    with pytest.raises(
        ConfigError, match="external: kernels is 'portable'; expected '': a TensorRT engine runs on a GPU"
    ):
        adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(kernels="portable"))


def test_the_package_that_compiled_the_plans_must_be_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(root / "external")
    assert isinstance(engine, TensorRtEngine)
    plans = engine.plans
    assert packages.import_tensorrt(plans, "engine").__version__ == plans.package_version
    with pytest.raises(ConfigError, match=r"compiled by TensorRT for RTX 9\.9, and .* pip install tensorrt-rtx==9\.9"):
        packages.import_tensorrt(replace(plans, package_version="9.9"), "engine")
    with pytest.raises(ConfigError, match="package 'os'; accepted: tensorrt, tensorrt_rtx"):
        packages.import_tensorrt(replace(plans, package="os"), "engine")
    without("tensorrt_rtx", monkeypatch)
    with pytest.raises(ConfigError, match=r"not installed: pip install tensorrt-rtx=="):
        packages.import_tensorrt(plans, "engine")


def test_weight_memory_needs_an_engine_that_was_built_for_it(root: Path) -> None:
    engine = load_engine(root / "external")
    assert isinstance(engine, TensorRtEngine)
    assert engine.with_weight_memory(None) is engine.with_weight_memory(0) is engine
    with pytest.raises(ConfigError, match=r"^weight_memory is 5; accepted: None and 0, .* was built without weight_me"):
        engine.with_weight_memory(5)
    built_for_it = replace(engine.config.build_config, weight_memory=9)
    streaming = replace(engine, config=replace(engine.config, build_config=built_for_it))
    assert [streaming.with_weight_memory(size).weight_memory for size in (None, 0, 5)] == [0, 0, 5]
    assert streaming.with_weight_memory(5).with_weight_memory(0).weight_memory == 0
