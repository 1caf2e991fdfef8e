"""`build --model_dir` builds in one pass the same engine, byte for byte, as a conversion and a build."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from adaptrt._core import CheckpointError, DType, QuantAlgo, dtype_from_name
from adaptrt.builder.build import build
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.compile import pack
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import BuildConfig, PluginConfig
from adaptrt.formats.engine.engine_config import EngineConfig
from support.families import FAMILIES, Family, save_family
from support.models import ModelSpec, save_adapter, save_model
from support.tensorrt_plans import needs_tensorrt_rtx, tensorrt_config
from support.tokenizers import byte_level, save_tokenizer

W8A8 = QuantConfig(quant_algo=QuantAlgo.W8A8)
W8A16 = QuantConfig(quant_algo=QuantAlgo.W8A16)
W4A16 = QuantConfig(quant_algo=QuantAlgo.W4A16)
GROUPED = QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=32, has_zero_point=True)


@dataclass(frozen=True)
class How:
    """How a model is converted and built."""

    dtype: DType | None = None
    quantization: QuantConfig | None = None
    compressed: bool = False


PLAIN = {"stated": How(), "float16": How(DType.FLOAT16), "compressed": How(DType.BFLOAT16, compressed=True)}
QUANTIZED = {
    "w8a8 of float32": How(quantization=W8A8),
    "w8a16 of bfloat16": How(DType.BFLOAT16, W8A16),
    "w4a16 of float16": How(DType.FLOAT16, W4A16),
    "w4a16 in groups of bfloat16": How(DType.BFLOAT16, GROUPED),
}
HOWS = PLAIN | QUANTIZED
# Sizes for which heads, parts and panels of 64 outputs end in different places, and a tied embedding.
LARGER = {
    "llama": ModelSpec(
        vocab_size=200, hidden_size=90, num_attention_heads=5, head_dim=22, intermediate_size=150,
        tie_word_embeddings=True,
    ),
    "qwen2": ModelSpec(
        "qwen2", vocab_size=131, hidden_size=70, num_attention_heads=7, head_dim=10, intermediate_size=90
    ),
}  # fmt: skip
LARGER_FIELDS = {
    "gpt-neox": {"hidden_size": 120, "num_attention_heads": 6, "intermediate_size": 130},
    "gpt2": {"n_embd": 90, "n_head": 5, "n_inner": 140},
    "phi3": {"hidden_size": 100, "num_attention_heads": 10, "num_key_value_heads": 5, "intermediate_size": 94},
}


def config_of(how: How) -> BuildConfig:
    plugins = PluginConfig(lora_plugin="auto", dora_plugin="enable")
    return BuildConfig(max_batch_size=8, max_num_tokens=64, max_seq_len=96, compress_weights=how.compressed,
                       plugin_config=plugins)  # fmt: skip


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def check(model: Path, how: How, directory: Path) -> None:
    """Both ways write the same files and report the same quantisation errors."""
    config = config_of(how)
    at_once = build(Checkpoint.of_model(model, how.dtype), config, directory / "one", quantization=how.quantization)
    converted = convert_checkpoint(model, directory / "checkpoint", dtype=how.dtype, quantization=how.quantization)
    build(directory / "checkpoint", config, directory / "two")
    expected = files(directory / "two")
    assert set(expected) >= {"rank0.engine", "config.json"}
    assert files(directory / "one") == expected
    relative = {error.name: error.relative for error in at_once.quantization_errors}
    assert relative == pytest.approx({error.name: error.relative for error in converted.quantization_errors})
    assert ("lm_head.weight" in relative) == (how.quantization is not None)
    assert all(0 < error < 0.2 for error in relative.values())
    shutil.rmtree(directory)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    model = save_family(FAMILIES[name], tmp_path / "model")
    for how in HOWS.values():
        check(model, how, tmp_path / "made")


@pytest.mark.parametrize("name", LARGER | LARGER_FIELDS)
def test_pieces_that_end_within_parts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in LARGER:
        model = save_model(LARGER[name], tmp_path / "model")
    else:
        family = FAMILIES[name]
        larger = Family(family.config_class, family.targets, {**family.fields, **LARGER_FIELDS[name]})
        model = save_family(larger, tmp_path / "model")
    monkeypatch.setattr(pack, "_PIECE_BYTES", 1)
    for how in HOWS.values():
        check(model, how, tmp_path / "made")


def test_a_checkpoint_is_quantised_as_it_is_packed(model: Path, tmp_path: Path) -> None:
    tied = save_model(LARGER["llama"], tmp_path / "tied")
    for source in (model, tied):
        for how in QUANTIZED.values():
            convert_checkpoint(source, tmp_path / "checkpoint", dtype=how.dtype)
            build(tmp_path / "checkpoint", config_of(how), tmp_path / "later", quantization=how.quantization)
            build(
                Checkpoint.of_model(source, how.dtype), config_of(how), tmp_path / "one", quantization=how.quantization
            )
            assert files(tmp_path / "one") == files(tmp_path / "later")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(ModelSpec(vocab_size=300, intermediate_size=38), tmp_path_factory.mktemp("model") / "model")
    save_tokenizer(byte_level(), directory)
    return directory


def run(*arguments: object) -> int:
    return command_line([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("converting", "building"),
    [
        (["--dtype", "bfloat16"], ["--lora_plugin", "auto", "--int8_kv_cache"]),
        (["--dtype", "float16"], ["--quantization", "w4a16", "--group_size", "32"]),
        ([], ["--lora_plugin", "auto", "--lora_dir", "ADAPTER"]),
    ],
)
def test_the_commands(model: Path, tmp_path: Path, converting: list[str], building: list[str]) -> None:
    adapter = save_adapter(model, tmp_path / "adapter", 0, r=2)
    flags = [adapter if flag == "ADAPTER" else flag for flag in building] + ["--max_seq_len", 64]
    assert run("convert-checkpoint", "--model_dir", model, "--output_dir", tmp_path / "checkpoint", *converting) == 0
    assert run("build", "--checkpoint_dir", tmp_path / "checkpoint", "--output_dir", tmp_path / "two", *flags) == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run("build", "--model_dir", model, "--output_dir", tmp_path / "one", *converting, *flags) == 0
    # The command made only the engine, and the tokenizer is in it.
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "one"])
    one, two = ({path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*")
                 if path.is_file()} for name in ("one", "two"))  # fmt: skip
    assert one == two
    assert Path("tokenizer.json") in one
    dtype = dtype_from_name(converting[-1] if converting else "float32")
    assert EngineConfig.load(tmp_path / "one").pretrained_config.dtype is dtype


def test_a_network_is_dumped_without_a_checkpoint(model: Path, tmp_path: Path) -> None:
    flags = ["--max_seq_len", 64, "--quantization", "w8a16", "--dump_onnx"]
    assert run("convert-checkpoint", "--model_dir", model, "--output_dir", tmp_path / "checkpoint") == 0
    for source, directory, name in (("checkpoint", tmp_path / "checkpoint", "two"), ("model", model, "one")):
        (tmp_path / name).mkdir()
        arguments = [f"--{source}_dir", directory, "--output_dir", tmp_path / name / "engine"]
        assert run("build", *arguments, *flags, tmp_path / name / "network.onnx") == 0
    for file in ("network.onnx", "network.onnx.data"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["engine", "network.onnx", "network.onnx.data"]


@needs_tensorrt_rtx
@pytest.mark.parametrize("weights", ["constants", "external"])
def test_plans_of_tensorrt(model: Path, tmp_path: Path, weights: str) -> None:
    config = tensorrt_config("8.0", weights=weights, max_batch_size=8, max_num_tokens=64, max_seq_len=96)
    convert_checkpoint(model, tmp_path / "checkpoint", dtype=DType.BFLOAT16)
    later = build(tmp_path / "checkpoint", config, tmp_path / "two")
    at_once = build(Checkpoint.of_model(model, DType.BFLOAT16), config, tmp_path / "one")
    assert at_once.checkpoint == later.checkpoint
    assert sorted(files(tmp_path / "one")) == sorted(files(tmp_path / "two"))
    if weights == "external":
        file = "weights.safetensors"
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "one", "two"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "one of the arguments --checkpoint_dir --model_dir is required"),
        (["--checkpoint_dir", "a", "--model_dir", "b"], "--model_dir: not allowed with argument --checkpoint_dir"),
        (["--checkpoint_dir", "a", "--dtype", "float16"], "dtype float16 needs model_dir: a checkpoint has the dtype"),
        (["--model_dir", "nowhere"], "nowhere: is not a directory"),
    ],
)  # fmt: skip
def test_incompatible_flags_are_refused(
    flags: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = run("build", *flags, "--output_dir", tmp_path / "engine")
    except SystemExit as end:  # raised by the argument parser
        status = end.code
    assert status == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "engine").exists()


def test_models_and_checkpoints_are_not_taken_for_each_other(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert_checkpoint(model, tmp_path / "checkpoint")
    for flag, directory, expected in (
        ("--checkpoint_dir", model, "is a Hugging Face model; build it with --model_dir"),
        ("--model_dir", tmp_path / "checkpoint", "was made by AdaptRT; expected the directory of a Hugging Face model"),
    ):
        assert run("build", flag, directory, "--output_dir", tmp_path / "engine") == 2
        assert f"{directory}: {expected}" in capsys.readouterr().err


def test_a_model_whose_weights_cannot_be_had_leaves_the_engine(model: Path, tmp_path: Path) -> None:
    build(Checkpoint.of_model(model), config_of(How()), tmp_path / "engine")
    before = files(tmp_path / "engine")
    damaged = Path(shutil.copytree(model, tmp_path / "damaged"))
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-4:] = b"\xff\xff\xff\x7f"
    (damaged / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor '.*': holds nan; weights must be finite"):
        build(Checkpoint.of_model(damaged), config_of(How()), tmp_path / "engine")
    assert files(tmp_path / "engine") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "engine"]
