"""Engines with int8 keys and values, chosen by the checkpoint or by the build: accuracy, memory and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt.builder import cli
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.formats.models.registry import load_config
from adaptrt.runtime.engine import load_engine
from support.models import ModelSpec, Reference, save_model
from support.serving import collect, make_request, run_command

SPEC = ModelSpec(hidden_size=72, head_dim=24, intermediate_size=70, vocab_size=97)
# Keys and values are rounded to 1 / 254 of a head's maximum, and attention averages the errors of the values.
FLOAT32_TOLERANCE = 0.02
# Activations are also rounded to bfloat16; see test_parity.py.
BFLOAT16_TOLERANCE = 0.06
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
    assert not load_config(plain).int8_kv_cache

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


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", FLOAT32_TOLERANCE), ("bfloat16", BFLOAT16_TOLERANCE)])
def test_logits_stay_near_the_models_in_a_fraction_of_the_memory(
    dtype: str, tolerance: float, model: Path, tmp_path: Path
) -> None:
    checkpoint = convert(model, tmp_path / "checkpoint", "--dtype", dtype)
    plain = build(checkpoint, tmp_path / "plain", "--tokens_per_block", "32")
    int8 = build(checkpoint, tmp_path / "int8", "--tokens_per_block", "32", "--int8_kv_cache")
    prompt = np.random.default_rng(3).integers(2, SPEC.vocab_size, 30).tolist()
    answers, block_bytes = [], []
    for directory in (plain, int8):
        engine = load_engine(directory)
        block_bytes.append(engine.start(adaptrt.ExecutorConfig(num_threads=1)).info.kv_block_bytes)
        with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
            answers.append(collect(executor, executor.enqueue_request(make_request(prompt, 6))))
            again = collect(executor, executor.enqueue_request(make_request(prompt, 6)))
            np.testing.assert_array_equal(again.generation_logits, answers[-1].generation_logits)
    expected = Reference(model).logits(prompt, answers[1].tokens).numpy()
    actual = np.concatenate([answers[1].context_logits, answers[1].generation_logits[1:]])
    assert np.abs(actual - expected).max() <= tolerance * (expected.max() - expected.min())
    assert not np.array_equal(answers[0].context_logits, answers[1].context_logits)
    # The expected ratio: one byte and a share of a float32 scale per token and head, against one element of the
    # engine's type.
    element_bytes = {"float32": 4, "bfloat16": 2}[dtype]
    assert block_bytes[1] <= block_bytes[0] * (1 + 4 / SPEC.head_dim) / element_bytes


def test_calibrated_scales_are_refused_by_name(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = convert(model, tmp_path / "checkpoint", "--int8_kv_cache")
    tensors = load_file(checkpoint / "rank0.safetensors")
    name = "transformer.layers.1.attention.kv_cache_scaling_factor"
    tensors[name] = np.full(1, 0.03, np.float32)
    save_file(tensors, checkpoint / "rank0.safetensors")
    command = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
    assert cli.main([*command, *SIZES]) == cli.EXIT_USER_ERROR
    assert f"'{name}' is a calibrated scale" in capsys.readouterr().err


def test_tensorrt_engines_do_not_have_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = convert(model, tmp_path / "plain", "--dtype", "float16")
    asking = convert(model, tmp_path / "asking", "--dtype", "float16", "--int8_kv_cache")
    for checkpoint, flags in ((plain, ["--int8_kv_cache"]), (asking, [])):
        command = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
        target = ["--backend", "tensorrt", "--compute_capability", "8.0"]
        assert cli.main([*command, *SIZES, *target, *flags]) == cli.EXIT_USER_ERROR
        assert "an int8 KV cache needs backend native or cuda" in capsys.readouterr().err
        build(checkpoint, tmp_path / f"native-{checkpoint.name}", *flags)
    assert not (tmp_path / "engine").exists()
