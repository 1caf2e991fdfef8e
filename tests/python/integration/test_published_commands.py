"""Models published with quantised weights: the commands' output about them, and the flags that name them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from adaptrt._core import QuantAlgo
from adaptrt.builder import cli
from adaptrt.builder.model_cache.first_use import engine_for
from adaptrt.builder.model_cache.options import EngineOptions
from adaptrt.builder.model_cache.store import EngineCache
from adaptrt.common.progress import LineProgress
from adaptrt.formats.checkpoint.quantization import QuantConfig
from support.models import save_model
from support.published import SCHEMES, publish
from support.published_models import SPEC, WHOLE_SPEC, assert_same_weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(SPEC, tmp_path_factory.mktemp("published") / "model")


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(WHOLE_SPEC, tmp_path_factory.mktemp("whole") / "model")


@pytest.mark.parametrize(
    ("name", "what", "said"),
    [
        (
            "nf4-double",
            "kept",
            r"14 matrices of bitsandbytes of 4 bits, 1\d\d\.\d KiB, as W4A16 of NF4 in groups of 64, 1\d\d\.\d KiB",
        ),
        (
            "gptq-2",
            "kept",
            r"14 matrices of GPTQ of 2 bits in groups of 64, .* as W4A16 of 2 bits in groups of 64, \d\d",
        ),
        (
            "float8-channel-float32",
            "kept",
            r"14 matrices of compressed-tensors of FP8 with a scale for each channel, 2\d\d\.\d KiB, as W8A16 of E4M3, "
            r"2\d\d\.\d KiB; activations are not rounded to 8 bits",
        ),
        (
            "llm-int8",
            "kept",
            r"14 matrices of LLM.int8\(\) of bitsandbytes, 2\d\d\.\d KiB, as W8A16 of LLM_INT8, 2\d\d\.\d KiB; "
            "activations are not rounded to 8 bits",
        ),
        (
            "gptq-4-act-order",
            "kept",
            r"14 matrices of GPTQ of 4 bits in groups of 32, .* as W4A16 in groups of 32, reordered, 1\d\d\.\d KiB",
        ),
        ("gptq-8", "kept", r"14 matrices of GPTQ of 8 bits .* as W8A16 in groups of 32 with zero points, \d"),
        (
            "gptq-4-uneven",
            "dequantised",
            "14 matrices of GPTQ of 4 bits in groups of 32, .*, become 1.1 MiB of float32",
        ),
    ],
)
def test_the_commands_say_what_became_of_them(
    name: str,
    what: str,
    said: str,
    whole_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published = publish(whole_model, tmp_path, SCHEMES[name])
    monkeypatch.setenv("COLUMNS", "400")
    where = ["--model_dir", str(published), "--output_dir"]
    assert cli.main(["convert-checkpoint", *where, str(tmp_path / "checkpoint")]) == 0
    assert_said(capsys, f"{what}: {said}")
    sizes = ["--max_batch_size", "2", "--max_num_tokens", "64", "--max_seq_len", "32"]
    assert cli.main(["build", *where, str(tmp_path / "engine"), *sizes]) == 0
    assert_said(capsys, f"{what} +{said}")
    lines = tmp_path / "lines.txt"
    options = EngineOptions(max_batch_size=2, max_num_tokens=64, max_seq_len=32)
    with lines.open("w") as stream:
        engine_for(published, options, LineProgress(stream), cache=EngineCache(tmp_path / "cache"))
    assert re.search(f"{what}: {said}", lines.read_text())
    how = QuantConfig(quant_algo=QuantAlgo.W8A16)
    again = EngineOptions(max_batch_size=2, max_num_tokens=64, max_seq_len=32, quantization=how)
    engine_for(published, again, cache=EngineCache(tmp_path / "cache"))


def assert_said(capsys: pytest.CaptureFixture[str], text: str) -> None:
    printed = capsys.readouterr().out
    assert re.search(text, printed), printed


def flags(model: Path, place: Path, *more: str) -> list[str]:
    return ["convert-checkpoint", "--model_dir", str(model), "--output_dir", str(place / "checkpoint"), *more]


def test_flags_of_published_models(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = publish(model, tmp_path, SCHEMES["gptq-4-uneven"])
    precision = ["--use_weight_only", "--weight_only_precision", "int4_gptq"]
    assert cli.main(flags(published, tmp_path, *precision, "--per_group", "--group_size", "32")) == 0
    assert_same_weights(tmp_path / "checkpoint", tmp_path / "values", np.float32)
    assert cli.main(flags(model, tmp_path, *precision, "--quant_ckpt_path", str(published))) == 0
    assert_same_weights(tmp_path / "checkpoint", tmp_path / "values", np.float32)
    capsys.readouterr()
    other = save_model(dataclasses.replace(SPEC, num_hidden_layers=3), tmp_path / "other")
    what = "the model is GPTQ of 4 bits in groups of 32"
    for wrong, reason in (
        (flags(published, tmp_path, *precision, "--per_group"), f"group_size 128: {what}"),
        (flags(model, tmp_path, *precision), "weight_only_precision int4_gptq: the model is not quantised"),
        (flags(published, tmp_path, *precision[:2], "int4_awq"), f"int4_awq: {what}"),
        (flags(published, tmp_path, *precision[:2], "int8_gptq"), f"int8_gptq: {what}"),
        (flags(published, tmp_path, *precision, "--has_zero_point"), "has_zero_point needs weight_only_precision int4"),
        (flags(published, tmp_path, *precision[1:]), "weight_only_precision needs use_weight_only"),
        (flags(model, tmp_path, "--quant_ckpt_path", "x"), "quant_ckpt_path needs weight_only_precision int8_gptq"),
        (
            flags(model, tmp_path, *precision, "--quant_ckpt_path", str(published / "model.safetensors")),
            "model.safetensors: expected the directory of the published model",
        ),
        (
            flags(other, tmp_path, *precision, "--quant_ckpt_path", str(published)),
            "is not the same model as model_dir .*: num_hidden_layers differ",
        ),
    ):
        assert cli.main(wrong) == 2
        error = capsys.readouterr().err
        assert re.search(reason, error), error
