"""config.json of TensorRT engines: written configs are read back, and invalid ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptrt._core import DType, EngineError
from adaptrt.builder import cli
from adaptrt.builder.engine.directory import is_engine_directory
from adaptrt.formats.checkpoint.config import CheckpointConfig
from adaptrt.formats.engine.build_config import BuildConfig, TensorRtBuildConfig
from adaptrt.formats.engine.engine_config import EngineConfig, _checksum
from adaptrt.formats.engine.tensorrt.plan_config import PlanFile, StoredFile, TensorRow, TensorRtPlans

MODEL = CheckpointConfig(
    architecture="LlamaForCausalLM", dtype=DType.BFLOAT16, vocab_size=61, max_position_embeddings=64,
    hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_size=4,
    intermediate_size=12, norm_epsilon=1e-5, rotary_base=1e4,
)  # fmt: skip
POOL = (-1, 2, 1, 32, 4)
TENSORS = (
    TensorRow(
        name="input_ids", dtype="int32", shape=(-1,), mode="input", alias=None,
        profiles=(((1,), (8,), (16,)), ((1,), (2,), (2,))),
    ),
    TensorRow(
        name="kv_pool.0", dtype="bfloat16", shape=POOL, mode="input", alias=None,
        profiles=(((1, *POOL[1:]), (4, *POOL[1:]), (1 << 40, *POOL[1:])),) * 2,
    ),
    TensorRow(name="transformer.ln_f.weight", dtype="bfloat16", shape=(8,), mode="input", alias=None, profiles=()),
    TensorRow(name="kv_pool_out.0", dtype="bfloat16", shape=POOL, mode="output", alias="kv_pool.0", profiles=()),
    TensorRow(name="logits", dtype="float32", shape=(-1, 61), mode="output", alias=None, profiles=()),
)  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Makes a directory with weights and two plans, which no TensorRT could load."""
    stored = []
    for name in ("rank0.sm80.plan", "rank0.sm120.plan", "weights.safetensors"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
        stored.append(StoredFile.of(tmp_path / name))
    plans = TensorRtPlans(
        package="tensorrt_rtx",
        package_version="1.7.1.116",
        plugin_version="1",
        files=(PlanFile("8.0", stored[0]), PlanFile("12.0", stored[1])),
        weights=stored[2],
        profiles=("prefill", "decode"),
        tensors=TENSORS,
    )
    config = BuildConfig(
        backend="tensorrt",
        max_batch_size=2,
        max_num_tokens=16,
        tensorrt_config=TensorRtBuildConfig(compute_capability=("8.0", "12.0"), weights="external"),
    )
    EngineConfig.of_this_release(MODEL, config.with_defaults(MODEL), plans).save(tmp_path)
    return tmp_path


def change(engine: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edits config.json and updates its checksum."""
    path = engine / "config.json"
    content = json.loads(path.read_text())
    edit(content)
    del content["checksum"]
    path.write_text(json.dumps({**content, "checksum": _checksum(content)}))


def test_a_written_config_is_read_back(engine: Path) -> None:
    config = EngineConfig.load(engine)
    assert config.tensorrt is not None
    assert config.tensorrt.tensors == TENSORS
    assert config.engine_checksums == ()
    assert config.build_config.tensorrt_config == TensorRtBuildConfig(
        compute_capability=("8.0", "12.0"), weights="external"
    )
    config.tensorrt.check_files(engine)
    assert config.tensorrt.num_bytes == sum(path.stat().st_size for path in engine.iterdir() if path.suffix != ".json")
    content = json.loads((engine / "config.json").read_text())
    assert json.loads(json.dumps(config.to_dict())) == content
    assert content["format_version"] == 2
    assert is_engine_directory(engine)


def test_the_plan_for_a_gpu(engine: Path) -> None:
    plans = EngineConfig.load(engine).tensorrt
    assert plans.plan_for("12.0").stored.file == "rank0.sm120.plan"
    with pytest.raises(EngineError, match=r"no plan for compute capability 9\.0, only for 8\.0, 12\.0"):
        plans.plan_for("9.0")


def test_native_engines_are_as_they_were() -> None:
    content = EngineConfig.of_this_release(MODEL, BuildConfig().with_defaults(MODEL), ("0" * 32,)).to_dict()
    assert content["format_version"] == 1
    assert list(content) == [
        "producer", "version", "format_version", "pretrained_config", "build_config", "engine_checksum",
        "adapter_checksums", "checksum",
    ]  # fmt: skip
    assert "tensorrt_config" not in content["build_config"]


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda c: c["tensorrt"]["plans"][0].update(file="../other/rank0.sm80.plan"), r"plans\[0\]\.file must be"),
        (lambda c: c["tensorrt"]["weights"].update(file=".."), r"weights\.file must be the name"),
        (lambda c: c["tensorrt"]["plans"].clear(), "plans must be one for each compute capability"),
        (lambda c: c["tensorrt"]["plans"][1].update(compute_capability="8.0"), "plans must be one for each"),
        (lambda c: c["tensorrt"]["plans"][1].update(file="rank0.sm80.plan"), "plans name a file twice"),
        (lambda c: c["tensorrt"].update(plans=[3]), "plans is .*expected a list of objects"),
        (lambda c: c["tensorrt"]["plans"][0].update(num_bytes=-1), "num_bytes"),
        (lambda c: c["tensorrt"]["plans"][0].pop("checksum"), "checksum is missing"),
        (lambda c: c["tensorrt"]["tensors"][3].update(alias="logits"), "kv_pool_out.0 is written over logits"),
        (lambda c: c["tensorrt"]["tensors"][3].update(alias="input_ids"), "written over input_ids"),
        (lambda c: c["tensorrt"]["tensors"][0].update(mode="inout"), r"tensors\[0\]\.mode"),
        (lambda c: c["tensorrt"]["tensors"][0].update(name="logits"), "tensors use a name twice"),
        (lambda c: c["tensorrt"]["tensors"][0]["profiles"].pop(), r"tensors\[0\]\.profiles must be 2"),
        (lambda c: c["tensorrt"]["tensors"][0].update(profiles=3), r"tensors\[0\]\.profiles must be a list"),
        (lambda c: c["tensorrt"]["tensors"][0]["profiles"][0].pop(), "smallest, usual and largest"),
        (lambda c: c["tensorrt"]["tensors"][0]["profiles"][0].__setitem__(0, [9]), "smallest, usual and largest"),
        (lambda c: c["tensorrt"]["tensors"][0]["profiles"][0].__setitem__(0, ["1"]), "smallest, usual and largest"),
        (lambda c: c["tensorrt"]["tensors"][1]["profiles"][0][0].__setitem__(1, 1), "smallest, usual and largest"),
        (lambda c: c["tensorrt"]["tensors"][0].update(shape=[-2]), r"tensors\[0\]\.shape"),
        (lambda c: c["tensorrt"]["tensors"][0].update(extra=1), r"tensors\[0\]\.extra is unknown"),
        (lambda c: c["tensorrt"].pop("package"), "tensorrt.package is missing"),
        (lambda c: c.pop("tensorrt"), "tensorrt is missing"),
        (
            lambda c: c["build_config"].update(backend="native"),
            "backend is native, which does not match format_version",
        ),
        (lambda c: c["build_config"]["tensorrt_config"].update(weights="inline"), "weights"),
        (lambda c: c.update(format_version=1), "engine_checksum is missing"),
        (lambda c: c.update(format_version=3), "engine_checksum is missing"),
        (lambda c: c.update(format_version=4), "format_version 4, this release reads 1, 2 and 3"),
        (lambda c: c.update(format_version=True), "format_version true"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(engine: Path, edit: Callable[[Any], object], complaint: str) -> None:
    change(engine, edit)
    with pytest.raises(EngineError, match=complaint):
        EngineConfig.load(engine)


def test_every_file_that_is_not_what_was_written_is_named(engine: Path) -> None:
    plans = EngineConfig.load(engine).tensorrt
    damaged = bytearray((engine / "rank0.sm80.plan").read_bytes())
    damaged[5000] ^= 1
    (engine / "rank0.sm80.plan").write_bytes(damaged)
    (engine / "rank0.sm120.plan").write_bytes(b"short")
    (engine / "weights.safetensors").rename(engine.parent / "elsewhere")
    (engine / "weights.safetensors").symlink_to(engine.parent / "elsewhere")
    with pytest.raises(EngineError) as refusal:
        plans.check_files(engine)
    for complaint in (
        "rank0.sm80.plan: does not have its checksum",
        "rank0.sm120.plan: has 5 bytes; config.json was written for 16000",
        "weights.safetensors: is missing, or not a file",
    ):
        assert complaint in str(refusal.value)
    (engine / "weights.safetensors").unlink()
    (engine.parent / "elsewhere").unlink()


def test_other_files_keep_a_directory_from_being_replaced(engine: Path) -> None:
    (engine / "rank0.sm80.plan.bak").touch()
    assert not is_engine_directory(engine)


def test_inspect_describes_it(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(engine), "--tensors"]) == 0
    text = capsys.readouterr().out
    for line in (
        f"{engine}: TensorRT engine",
        "every checksum holds",
        "compiled by   tensorrt_rtx 1.7.1.116, version 1 of the plugins",
        "plan 12.0     rank0.sm120.plan, 15.6 KiB",
        "weights       weights.safetensors, ",
        "LoRA          none",
        "  input_ids  input int32 [-1], prefill [16], decode [2]",
        "  kv_pool_out.0  output bfloat16 [-1, 2, 1, 32, 4], written over kv_pool.0",
    ):
        assert line in text
    (engine / "rank0.sm80.plan").unlink()
    assert cli.main(["inspect", str(engine)]) == 2
    assert "rank0.sm80.plan: is missing" in capsys.readouterr().err
