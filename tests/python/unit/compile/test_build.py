"""`adaptrt build` and BuildConfig: flags, defaults, refusals, and the contents of the engine directory."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from adaptrt._core import AdapterError, CheckpointError, ConfigError, DType, EngineError, QuantAlgo
from adaptrt.builder import cli
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.formats.engine.engine_file import EngineFile
from adaptrt.formats.engine.engine_quality import EngineQuality
from adaptrt.runtime.engine import load_engine
from support.engines import SMALL, make_checkpoint, make_engine
from support.models import ALL_MODULES, ATTENTION_MODULES, ModelSpec, save_adapter, save_model

SPEC = ModelSpec(num_hidden_layers=1)
LORA = PluginConfig(lora_plugin="auto")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a float16 checkpoint, its model, and adapters."""
    directory = tmp_path_factory.mktemp("build")
    make_checkpoint(SPEC, directory, DType.FLOAT16)
    model = directory / "model"
    save_adapter(model, directory / "attention", 0, r=8, target_modules=ATTENTION_MODULES)
    save_adapter(model, directory / "mlp", 1, r=2, target_modules=["down_proj"])
    save_adapter(model, directory / "dora", 2, r=2, use_dora=True, target_modules=ALL_MODULES)
    return directory


def test_the_commands_of_tensorrt_llms_lora_guide(root: Path, tmp_path: Path, capsys) -> None:
    model, adapter = str(root / "model"), str(root / "attention")
    convert = ["convert_checkpoint", "--model_dir", model, "--output_dir", str(tmp_path / "ckpt"), "--dtype", "float16"]
    assert cli.main(convert) == 0
    compile_it = f"""build --checkpoint_dir {tmp_path / "ckpt"} --output_dir {tmp_path / "engine"}
        --remove_input_padding enable --gpt_attention_plugin float16 --context_fmha enable --paged_kv_cache enable
        --gemm_plugin float16 --lora_plugin float16 --max_batch_size 128 --max_input_len 512 --max_seq_len 562
        --lora_dir {adapter} --max_lora_rank 8 --lora_target_modules attn_q attn_k attn_v"""
    assert cli.main(compile_it.split()) == 0
    engine = load_engine(tmp_path / "engine")
    assert engine.program.max_batch_size == 128
    assert (engine.program.max_input_len, engine.program.max_seq_len) == (512, 562)
    assert engine.program.lora.target_modules == [1, 2, 3]
    assert list(engine.adapters) == ["attention"]
    summary = capsys.readouterr().out
    for line in ("LlamaForCausalLM, 1 layers, float16", "12 ops", "rank 8 on attn_q, attn_k"):
        assert line in summary


def test_the_engine_directory_is_tensorrt_llms(root: Path, tmp_path: Path) -> None:
    (root / "checkpoint" / "tokenizer.json").write_text("{}")
    try:
        config = replace(
            SMALL, plugin_config=LORA, lora_config=LoraBuildConfig(lora_dir=(root / "attention", root / "mlp"))
        )
        build(root / "checkpoint", config, tmp_path / "engine")
    finally:
        (root / "checkpoint" / "tokenizer.json").unlink()
    names = {path.relative_to(tmp_path / "engine").as_posix() for path in (tmp_path / "engine").rglob("*")}
    adapters = {f"lora/{i}/adapter_{name}" for i in (0, 1) for name in ("config.json", "model.safetensors")}
    expected = {"config.json", "rank0.engine", "tokenizer.json", "lora", "lora/0", "lora/1", *adapters}
    assert names - {"generation_config.json"} == expected
    content = json.loads((tmp_path / "engine" / "config.json").read_text())
    build_config = content["build_config"]
    assert content["pretrained_config"]["architecture"] == "LlamaForCausalLM"
    assert build_config["plugin_config"]["lora_plugin"] == build_config["plugin_config"]["gemm_plugin"] == "float16"
    assert build_config["lora_config"] == {
        "lora_dir": ["lora/0", "lora/1"],
        "adapter_names": ["attention", "mlp"],
        "lora_ckpt_source": "hf",
        "max_lora_rank": 64,
        "lora_target_modules": ["attn_q", "attn_k", "attn_v", "mlp_4h_to_h"],
    }


def test_defaults_come_from_the_model(root: Path, tmp_path: Path) -> None:
    report = build(root / "checkpoint", BuildConfig(), tmp_path / "engine")
    config = report.config
    assert (config.max_seq_len, config.max_input_len) == (1024, 1024)
    assert (config.max_batch_size, config.max_num_tokens, config.tokens_per_block) == (2048, 8192, 32)
    assert config.plugin_config.gpt_attention_plugin == "float16"
    assert not config.lora_enabled
    assert report.compiled.program.lora is None
    assert load_engine(tmp_path / "engine").program.lora.target_modules == []


def test_all_modules_are_enabled_when_no_adapter_says_otherwise(root: Path, tmp_path: Path) -> None:
    report = build(root / "checkpoint", replace(SMALL, plugin_config=LORA), tmp_path / "engine")
    modules = report.config.lora_config.lora_target_modules
    assert len(modules) == 9
    assert modules[-2:] == ("lm_head", "embedding")
    assert len(report.compiled.program.lora.sites) == 6


def with_lora(**fields) -> BuildConfig:
    return replace(SMALL, plugin_config=LORA, lora_config=LoraBuildConfig(**fields))


@pytest.mark.parametrize(
    ("config", "complaints"),
    [
        (
            BuildConfig(max_beam_width=2049, kv_cache_type="continuous", logits_dtype="float16", backend="rocm"),
            [
                "max_beam_width 2049 is above max_batch_size 2048",
                "always paged",
                "computed in float32",
                "backend is rocm; accepted: native, cuda, tensorrt",
            ],
        ),
        (
            BuildConfig(
                plugin_config=PluginConfig(
                    remove_input_padding="disable", context_fmha="disable", paged_kv_cache="disable"
                )
            ),
            ["remove_input_padding disable", "context_fmha disable", "paged_kv_cache disable"],
        ),
        (
            BuildConfig(plugin_config=PluginConfig(gpt_attention_plugin="bfloat16", gemm_plugin="int3")),
            ["gpt_attention_plugin bfloat16", "the checkpoint is float16", "accepted: auto, float16", "int3"],
        ),
        (BuildConfig(plugin_config=PluginConfig(gpt_attention_plugin="disable")), ["every engine has it"]),
        (BuildConfig(plugin_config=PluginConfig(lora_plugin="float32")), ["lora_plugin float32"]),
        (BuildConfig(plugin_config=PluginConfig(dora_plugin="enable")), ["dora_plugin enable needs lora_plugin auto"]),
        (BuildConfig(plugin_config=PluginConfig(dora_plugin="on")), ["dora_plugin is on"]),
        (BuildConfig(lora_config=LoraBuildConfig(lora_target_modules=("attn_q",))), ["lora_target_modules needs"]),
        (
            BuildConfig(max_batch_size=0, max_num_tokens=1 << 31),
            ["max_batch_size is 0", "max_num_tokens is 2147483648"],
        ),
        (BuildConfig(max_input_len=100, max_seq_len=99), ["max_input_len 100 is above max_seq_len 99"]),
        (BuildConfig(max_seq_len=1025), ["max_position_embeddings 1024"]),
        (with_lora(max_lora_rank=0), ["max_lora_rank is 0"]),
        (with_lora(lora_ckpt_source="nemo"), ["lora_ckpt_source nemo"]),
        (with_lora(lora_target_modules=("attn_q", "q_proj")), ["names 'q_proj'", "accepted: attn_qkv, attn_q"]),
        (with_lora(lora_target_modules=("moe_latent_fc1",)), ["moe_latent_fc1, which no supported network has"]),
        (with_lora(lora_target_modules=("attn_q", "attn_q")), ["twice"]),
        (with_lora(lora_target_modules=("moe_gate",)), ["moe_gate, which LlamaForCausalLM does not have"]),
    ],
)
def test_invalid_builds_are_refused_with_the_reason(
    root: Path, tmp_path: Path, config: BuildConfig, complaints: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        build(root / "checkpoint", config, tmp_path / "engine")
    for complaint in complaints:
        assert complaint in str(refusal.value)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("adapter", "fields", "complaint"),
    [
        ("attention", {"max_lora_rank": 7}, "rank 8 is above max_lora_rank 7"),
        (
            "mlp",
            {"lora_target_modules": ("attn_q",)},
            "changes mlp_4h_to_h, which lora_target_modules does not include",
        ),
        ("dora", {}, "which need an engine with dora_plugin enable"),
        ("model", {}, "adapter_config.json"),
    ],
)
def test_adapters_that_could_not_be_served_are_refused(
    root: Path, tmp_path: Path, adapter: str, fields: dict, complaint: str
) -> None:
    with pytest.raises(AdapterError, match=complaint):
        build(root / "checkpoint", with_lora(lora_dir=(root / adapter,), **fields), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_every_adapter_that_cannot_be_served_is_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    directories = (tmp_path / "absent", root / "attention", tmp_path / "loop")
    with pytest.raises(AdapterError, match=r"absent: is not a directory.*; .*loop: is not a directory"):
        build(root / "checkpoint", with_lora(lora_dir=directories), tmp_path / "engine")


def test_a_loop_of_links_is_no_output_directory(root: Path, tmp_path: Path) -> None:
    (tmp_path / "engine").symlink_to(tmp_path / "engine")
    with pytest.raises(EngineError, match="engine: exists and is not a directory"):
        build(root / "checkpoint", BuildConfig(), tmp_path / "engine")


def test_an_adapter_of_another_model_is_refused(root: Path, tmp_path: Path) -> None:
    save_model(replace(SPEC, hidden_size=24), tmp_path / "other")
    save_adapter(tmp_path / "other", tmp_path / "adapter", 0, r=2)
    with pytest.raises(AdapterError, match="q_proj"):
        build(root / "checkpoint", with_lora(lora_dir=(tmp_path / "adapter",)), tmp_path / "engine")


def test_two_adapters_of_one_name_are_refused(root: Path, tmp_path: Path) -> None:
    config = with_lora(lora_dir=(root / "mlp", root / "mlp"))
    with pytest.raises(ConfigError, match="mlp occurs twice"):
        build(root / "checkpoint", config, tmp_path / "engine")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("mlp:0.5", "'mlp:0.5', which is a weighted sum"), ("engine", "'engine', which servers give to the base model")],
)
def test_names_that_mean_something_else_are_refused(root: Path, tmp_path: Path, name: str, complaint: str) -> None:
    directory = shutil.copytree(root / "mlp", tmp_path / "adapters" / name)
    with pytest.raises(ConfigError, match=complaint):
        build(root / "checkpoint", with_lora(lora_dir=(directory,)), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_raw_dora_adapters_travel_since_the_engine_normalises_them(root: Path, tmp_path: Path) -> None:
    config = replace(with_lora(lora_dir=(root / "dora",)), plugin_config=replace(LORA, dora_plugin="enable"))
    build(root / "checkpoint", config, tmp_path / "engine")
    assert list(load_engine(tmp_path / "engine").adapters) == ["dora"]


def test_an_engine_is_replaced_and_anything_else_left_alone(root: Path, tmp_path: Path) -> None:
    first = build(root / "checkpoint", SMALL, tmp_path / "engine")
    build(root / "checkpoint", replace(SMALL, max_batch_size=3), tmp_path / "engine")
    assert load_engine(first.directory).program.max_batch_size == 3
    (tmp_path / "engine" / "notes.txt").write_text("mine")
    for directory in (tmp_path / "engine", root / "checkpoint", root / "model"):
        before = sorted(path.name for path in directory.iterdir())
        with pytest.raises(EngineError, match="neither empty nor an engine"):
            build(root / "checkpoint", SMALL, directory)
        assert sorted(path.name for path in directory.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]


def test_a_checkpoint_of_several_ranks_becomes_a_file_a_rank(tmp_path: Path) -> None:
    save_model(ModelSpec(num_key_value_heads=3, intermediate_size=39), tmp_path / "model")
    convert_checkpoint(tmp_path / "model", tmp_path / "checkpoint", tp_size=3)
    engine = build(tmp_path / "checkpoint", SMALL, tmp_path / "engine", workers=2).directory
    config = EngineConfig.load(engine)
    files = [EngineFile(engine / f"rank{rank}.engine", config.engine_checksums[rank]) for rank in range(3)]
    assert [(file.program.rank, file.program.num_ranks) for file in files] == [(0, 3), (1, 3), (2, 3)]
    # All ranks have equal bytes of each split tensor, and the same page offsets.
    assert len({file.num_bytes for file in files}) == 1
    again = build(tmp_path / "checkpoint", SMALL, tmp_path / "again").directory
    for rank in range(3):
        name = f"rank{rank}.engine"
        assert (engine / name).read_bytes() == (again / name).read_bytes()


def test_a_stage_of_a_pipeline_has_its_layers(tmp_path: Path) -> None:
    save_model(ModelSpec(), tmp_path / "model")
    convert_checkpoint(tmp_path / "model", tmp_path / "checkpoint", pp_size=2)
    build(tmp_path / "checkpoint", SMALL, tmp_path / "engine")
    checksums = json.loads((tmp_path / "engine" / "config.json").read_text())["engine_checksums"]
    first, last = (EngineFile(tmp_path / "engine" / f"rank{rank}.engine", checksums[rank]) for rank in range(2))
    assert first.program.num_layers == last.program.num_layers == ModelSpec().num_hidden_layers // 2
    assert "transformer.vocab_embedding.weight" in first.tensors
    assert "transformer.vocab_embedding.weight" not in last.tensors
    assert first.program.logits is None
    assert not first.program.head
    assert last.program.logits is not None


def test_a_checkpoint_of_an_unknown_architecture_is_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "checkpoint", tmp_path / "checkpoint")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps({**config, "architecture": "BloomForCausalLM"}))
    with pytest.raises(CheckpointError, match='"BloomForCausalLM"; accepted: LlamaForCausalLM, '):
        build(tmp_path / "checkpoint", BuildConfig(), tmp_path / "engine")


def test_a_checkpoint_whose_tensors_are_not_its_configs_is_refused(root: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(SPEC, tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"dtype": "float16", "attn_bias": True}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refusal:
        build(checkpoint, SMALL, tmp_path / "engine")
    assert "qkv.bias' is missing" in str(refusal.value)
    assert "is float32" in str(refusal.value)


def test_dump_onnx_writes_a_file_that_the_checker_accepts(root: Path, tmp_path: Path) -> None:
    arguments = ["--checkpoint_dir", root / "checkpoint", "--output_dir", tmp_path / "engine"]
    arguments += ["--max_seq_len", 64, "--dump_onnx", tmp_path / "network.onnx"]
    assert cli.main(["build", *map(str, arguments)]) == 0
    onnx.checker.check_model(str(tmp_path / "network.onnx"), full_check=True)
    assert (tmp_path / "network.onnx.data").stat().st_size > 0


@pytest.mark.parametrize("name", ["directory", "loop", "absent/network.onnx"])
def test_a_network_that_cannot_be_written_leaves_nothing(root: Path, tmp_path: Path, capsys, name: str) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(tmp_path.rglob("*"))
    arguments = ["--checkpoint_dir", root / "checkpoint", "--output_dir", tmp_path / "engine", "--dump_onnx"]
    assert cli.main(["build", *map(str, [*arguments, tmp_path / name])]) == 2
    error = capsys.readouterr().err
    assert f"error: {tmp_path / name}: " in error
    assert "Packing" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_line_reports_all_mistakes_in_one_line(root: Path, tmp_path: Path, capsys) -> None:
    arguments = ["--checkpoint_dir", str(root / "checkpoint"), "--output_dir", str(tmp_path / "engine")]
    arguments += ["--remove_input_padding", "disable", "--gemm-plugin", "float32"]
    assert cli.main(["build", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    for part in ("remove_input_padding disable", "gemm_plugin float32"):
        assert part in captured.err
    with pytest.raises(SystemExit) as ended:
        cli.main(["build", *arguments, "--workers", "0"])
    assert ended.value.code == 2
    assert "argument --workers: it is 0; expected an integer from 1 to" in capsys.readouterr().err


def test_a_build_that_fails_leaves_nothing_behind(root: Path, tmp_path: Path) -> None:
    class Failing:
        def problems(self, config: BuildConfig) -> list[str]:
            return []

        def measure(self, engine: Path, reference: Path | None) -> EngineQuality:
            assert (engine / "rank0.engine").is_file()
            assert reference is not None
            assert (reference / "rank0.engine").is_file()
            raise EngineError("at the end")

    report = make_engine(SPEC, tmp_path)
    before = (report.directory / "rank0.engine").read_bytes()
    weights = QuantConfig(quant_algo=QuantAlgo.W8A16)
    with pytest.raises(EngineError, match="at the end"):
        build(tmp_path / "checkpoint", SMALL, report.directory, quantization=weights, quality=Failing())
    assert (report.directory / "rank0.engine").read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
