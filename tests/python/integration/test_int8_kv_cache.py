"""Engines whose keys and values are int8: asked for by the checkpoint or by the build, and what comes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaptrt.builder import cli
from adaptrt.builder.checkpoint.config import CheckpointConfig
from adaptrt.builder.engine_config import EngineConfig
from adaptrt.runtime.engine import load_engine
from support.models import ModelSpec, save_model
from support.serving import run_command

SPEC = ModelSpec(hidden_size=72, head_dim=24, intermediate_size=70, vocab_size=97)
SIZES = ("--max_batch_size", "4", "--max_num_tokens", "64", "--max_seq_len", "64", "--tokens_per_block", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(SPEC, tmp_path_factory.mktemp("int8-kv") / "model")


def convert(model: Path, directory: Path, *flags: str) -> Path:
    run_command("convert-checkpoint", "--model_dir", model, "--output_dir", directory, *flags)
    return directory


def build(checkpoint: Path, directory: Path, *flags: str) -> Path:
    run_command("build", "--checkpoint_dir", checkpoint, "--output_dir", directory, *SIZES, *flags)
    return directory


def test_checkpoints_ask_for_it_as_builds_do(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asking = convert(model, tmp_path / "asking", "--int8_kv_cache", "--use_weight_only")
    assert "int8 KV cache" in capsys.readouterr().out
    plain = convert(model, tmp_path / "plain")
    quantization = json.loads((asking / "config.json").read_text())["quantization"]
    assert (quantization["quant_algo"], quantization["kv_cache_quant_algo"]) == ("W8A16", "INT8")
    assert not CheckpointConfig.load(plain).int8_kv_cache

    of_checkpoint = build(asking, tmp_path / "of-checkpoint")
    of_build = build(plain, tmp_path / "of-build", "--int8_kv_cache", "--quantization", "w8a16")
    assert re.findall(r"KV cache +(.*?) *\n", capsys.readouterr().out) == ["int8, 4 tokens a block"] * 2
    assert (of_checkpoint / "rank0.engine").read_bytes() == (of_build / "rank0.engine").read_bytes()
    for engine in (of_checkpoint, of_build):
        assert EngineConfig.load(engine).pretrained_config.int8_kv_cache
        assert load_engine(engine).program.int8_kv_cache
    assert not load_engine(build(plain, tmp_path / "engine")).program.int8_kv_cache

    run_command("inspect", of_build)
    assert "int8, 4 tokens a block" in capsys.readouterr().out
    run_command("inspect", asking)
    assert "int8 KV cache" in capsys.readouterr().out


def test_calibrated_scales_are_refused_by_name(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = convert(model, tmp_path / "checkpoint", "--int8_kv_cache")
    tensors = load_file(checkpoint / "rank0.safetensors")
    name = "transformer.layers.1.attention.kv_cache_scaling_factor"
    tensors[name] = np.full(1, 0.03, np.float32)
    save_file(tensors, checkpoint / "rank0.safetensors")
    command = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
    assert cli.main([*command, *SIZES]) == cli.EXIT_USER_ERROR
    assert f"'{name}' is a calibrated scale" in capsys.readouterr().err


def test_only_native_engines_have_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = convert(model, tmp_path / "plain", "--dtype", "float16")
    asking = convert(model, tmp_path / "asking", "--dtype", "float16", "--int8_kv_cache")
    for checkpoint, flags in ((plain, ["--int8_kv_cache"]), (asking, [])):
        command = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
        target = ["--backend", "tensorrt", "--compute_capability", "8.0"]
        assert cli.main([*command, *SIZES, *target, *flags]) == cli.EXIT_USER_ERROR
        assert "an int8 KV cache needs backend native" in capsys.readouterr().err
        build(checkpoint, tmp_path / f"native-{checkpoint.name}", *flags)
    assert not (tmp_path / "engine").exists()
