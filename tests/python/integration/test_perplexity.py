"""Perplexities against transformers on the same tokens: `adaptrt perplexity`, and `adaptrt build --quality_text`."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from adaptrt.builder import cli
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.runtime.text_quality import read_tokens
from support.models import Reference
from support.serving import run_command

MODEL = Path(__file__).resolve().parents[3] / "examples" / "demo" / "model"
TEXT = "The sea was calm and the old ship sailed on. Nobody knew where it had come from, or why it sang at night. " * 3
WINDOW = 40
SIZES = ("--max_batch_size", "4", "--max_num_tokens", "128", "--max_seq_len", "128")
# Both sides sum in float32, in different orders.
FLOAT32_TOLERANCE = 1e-4
# int8 weights have errors below one percent, and the model's own perplexity changes by less.
INT8_TOLERANCE = 0.02


def reference_perplexity(ids: list[int], size: int = WINDOW, adapter: Path | None = None) -> tuple[float, int]:
    """Returns transformers' perplexity and the number of tokens that it predicted."""
    model, total, count = Reference(MODEL, adapter), 0.0, 0
    for first in range(0, len(ids) - 1, size):
        window = ids[first : first + size]
        if len(window) < 2:
            break
        probabilities = torch.log_softmax(torch.as_tensor(model.logits(window, [])[: len(window) - 1]), dim=-1)
        total -= float(probabilities[range(len(window) - 1), window[1:]].sum())
        count += len(window) - 1
    return math.exp(total / count), count


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns an engine of the demo's model in float32 and one with int8 weights."""
    directory = tmp_path_factory.mktemp("perplexity")
    checkpoint = directory / "checkpoint"
    run_command("convert-checkpoint", "--model_dir", MODEL, "--output_dir", checkpoint, "--dtype", "float32")
    for name, flags in {"plain": ("--lora_plugin", "auto"), "int8": ("--quantization", "w8a16")}.items():
        run_command("build", "--checkpoint_dir", checkpoint, "--output_dir", directory / name, *SIZES, *flags)
    return directory / "plain", directory / "int8"


def test_perplexity_is_that_of_transformers_and_int8_weights_keep_it(
    engines: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    capsys.readouterr()
    run_command("perplexity", "--engine_dir", *engines, "--text", text, "--window", WINDOW)
    plain, int8 = capsys.readouterr().out.splitlines()
    expected, count = reference_perplexity(Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids)
    found = re.fullmatch(rf"{engines[0]}\s+perplexity ([\d.]+) over {count} tokens", plain)
    assert found is not None
    assert float(found[1]) == pytest.approx(expected, rel=FLOAT32_TOLERANCE)
    compared = re.fullmatch(
        rf"{engines[1]}\s+perplexity ([\d.]+) over {count} tokens, divergence ([\d.]+) nats a token, "
        r"the same choice for ([\d.]+)%, log probs change by ([\d.]+) on average and ([\d.]+) at most",
        int8,
    )
    assert compared is not None
    assert float(compared[1]) == pytest.approx(expected, rel=INT8_TOLERANCE)
    assert 0 < float(compared[2]) < INT8_TOLERANCE
    assert 90 < float(compared[3]) <= 100
    assert 0 < float(compared[4]) < float(compared[5])


def test_adapters_in_int8_are_compared_with_exact_ones(
    engines: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    adapter = MODEL.parent / "adapters" / "poet"
    capsys.readouterr()
    run_command(
        "perplexity", "--engine_dir", engines[0], "--text", text, "--window", WINDOW, "--lora_dir", adapter,
        "--lora_storage", "int8",
    )  # fmt: skip
    exact, int8 = capsys.readouterr().out.splitlines()
    expected, count = reference_perplexity(
        Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids, adapter=adapter
    )
    found = re.fullmatch(rf"{engines[0]}\s+perplexity ([\d.]+) over {count} tokens", exact)
    assert found is not None
    assert float(found[1]) == pytest.approx(expected, rel=FLOAT32_TOLERANCE)
    changed = re.fullmatch(
        rf"{engines[0]}, int8\s+perplexity ([\d.]+) .*, log probs change by ([\d.]+) on average and ([\d.]+) at most",
        int8,
    )
    assert changed is not None
    assert float(changed[1]) == pytest.approx(expected, rel=INT8_TOLERANCE)
    assert 0 < float(changed[2]) < float(changed[3]) < 1


@pytest.mark.parametrize(
    ("text", "flags", "complaint"),
    [
        ("", [], "number of tokens is 1; at least 2 are needed"),
        (None, [], "text.txt: cannot be read"),
        ("two words", ["--window", "1"], "window is 1; it must be at least 2"),
        ("words " * 200, ["--window", "300"], "max_seq_len 128; accepted: window 2 to 127"),
        ("two words", ["--lora_storage", "int8"], "lora_storage needs lora_dir"),
        ("two words", ["--lora_dir", str(MODEL)], "adapter"),
    ],
)
def test_texts_that_cannot_be_measured_are_refused(
    text: str | None, flags: list[str], complaint: str, engines: tuple[Path, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "text.txt"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    command = ["perplexity", "--engine_dir", str(engines[0]), "--text", str(file), *flags]
    assert cli.main(command) == cli.EXIT_USER_ERROR
    assert complaint in capsys.readouterr().err


def build_measured(engines: tuple[Path, Path], directory: Path, *flags: object, sizes: tuple[str, ...] = SIZES) -> Path:
    """Builds an engine of the fixture's checkpoint and measures it on TEXT during the build."""
    text = directory / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    run_command(
        "build", "--checkpoint_dir", engines[0].parent / "checkpoint", "--output_dir", directory / "engine", *sizes,
        "--quality_text", text, *flags,
    )  # fmt: skip
    assert sorted(entry.name for entry in directory.iterdir()) == ["engine", "text.txt"]
    return directory / "engine"


def test_a_build_measures_its_engine_beside_one_that_is_not_quantised(
    engines: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = build_measured(
        engines, tmp_path, "--quantization", "w8a16", "--quality_tokens", 50, "--lora_plugin", "auto"
    )
    printed = capsys.readouterr().out
    quality = EngineConfig.load(engine).quality
    assert quality is not None
    assert (quality.text, quality.tokens, quality.window) == ("text.txt", 50, 50)
    expected, _ = reference_perplexity(Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids[:50], 50)
    assert quality.reference is not None
    assert quality.reference.engine == "float32"
    assert quality.reference.perplexity == pytest.approx(expected, rel=FLOAT32_TOLERANCE)
    assert quality.perplexity == pytest.approx(expected, rel=INT8_TOLERANCE)
    assert quality.perplexity != quality.reference.perplexity
    assert 0 < quality.reference.divergence < INT8_TOLERANCE
    assert 0.9 < quality.reference.same_choices <= 1
    assert f"{quality.perplexity:.4f}" in printed
    assert f"{quality.reference.perplexity:.4f}" in printed
    assert "the first 50 tokens of text.txt, in windows of 50" in printed
    assert "relative error of quantised weights" in printed
    run_command("inspect", engine)
    assert (
        f"perplexity {quality.perplexity:.4f}, {quality.reference.perplexity:.4f} of float32" in capsys.readouterr().out
    )


def test_an_engine_that_is_not_quantised_is_measured_alone(engines: tuple[Path, Path], tmp_path: Path) -> None:
    # Each window is as long as the longest prompt and takes several steps.
    sizes = ("--max_num_tokens", "16", "--max_seq_len", "41", "--max_batch_size", "2", "--tokens_per_block", "8")
    quality = EngineConfig.load(build_measured(engines, tmp_path, sizes=sizes)).quality
    assert quality is not None
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids
    expected, _ = reference_perplexity(ids, 40)
    assert (quality.tokens, quality.window, quality.reference) == (len(ids), 40, None)
    assert quality.perplexity == pytest.approx(expected, rel=FLOAT32_TOLERANCE)


def test_an_engine_without_the_adapters_is_what_it_is_compared_with(engines: tuple[Path, Path], tmp_path: Path) -> None:
    flags = ("--int8_kv_cache", "--lora_plugin", "auto", "--lora_dir", MODEL.parent / "adapters" / "poet")
    quality = EngineConfig.load(build_measured(engines, tmp_path, *flags)).quality
    assert quality is not None
    assert quality.reference is not None
    assert quality.reference.engine == "float32"


@pytest.mark.parametrize(
    ("text", "flags", "complaint"),
    [
        ("", [], "number of tokens is 1; at least 2 are needed"),
        (None, [], "text.txt: cannot be read: No such file"),
        (b"\xff", [], "text.txt: cannot be read: 'utf-8' codec"),
        ("two words", ["--quality_tokens", "1"], "quality_tokens is 1; it must be at least 2"),
        ("two words", ["--max_seq_len", "2"], "max_input_len 2 and max_seq_len 2 allow 1"),
        ("two words", ["--backend", "tensorrt"], "quality_text needs backend native"),
        ("two words", ["--checkpoint_dir", "nowhere"], "nowhere/tokenizer.json: there is no tokenizer"),
    ],
)
def test_a_build_refuses_unmeasurable_texts_before_it_begins(
    text: str | bytes | None, flags: list[str], complaint: str, engines: tuple[Path, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "text.txt"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    command = ["build", "--checkpoint_dir", str(engines[0].parent / "checkpoint"), "--quality_text", str(file)]
    assert cli.main([*command, "--output_dir", str(tmp_path / "engine"), *flags]) == cli.EXIT_USER_ERROR
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "engine").exists()


def test_a_limit_of_tokens_without_a_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["build", "--checkpoint_dir", "c", "--output_dir", str(tmp_path / "engine"), "--quality_tokens", "9"]
    assert cli.main(command) == cli.EXIT_USER_ERROR
    assert "quality_tokens needs quality_text" in capsys.readouterr().err


def test_only_the_first_tokens_of_a_long_text_are_read(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    # Long words of few tokens: the first read of the file must not hold all the tokens that are asked for.
    text.write_text(TEXT * 40, encoding="utf-8")
    tokenizer = MODEL / "tokenizer.json"
    everything = read_tokens(text, tokenizer)
    assert len(everything) > 2000
    for limit in (2, 3, 57, 1000, len(everything), len(everything) + 1):
        assert read_tokens(text, tokenizer, limit) == everything[:limit]
