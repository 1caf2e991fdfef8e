"""`adaptrt perplexity` against transformers on the same tokens, and a quantised engine beside its original."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from adaptrt.builder import cli
from support.models import Reference
from support.serving import run_command

MODEL = Path(__file__).resolve().parents[3] / "examples" / "demo" / "model"
TEXT = "The sea was calm and the old ship sailed on. Nobody knew where it had come from, or why it sang at night. " * 3
WINDOW = 40
SIZES = ("--max_batch_size", "4", "--max_num_tokens", "128", "--max_seq_len", "128")
# Both sides sum in float32, in another order.
FLOAT32_TOLERANCE = 1e-4
# int8 weights are off by less than one percent; the model's own perplexity changes by less than that.
INT8_TOLERANCE = 0.02


def reference_perplexity(ids: list[int]) -> tuple[float, int]:
    """Of transformers, and the number of tokens that it predicted."""
    model, total, count = Reference(MODEL), 0.0, 0
    for first in range(0, len(ids) - 1, WINDOW):
        window = ids[first : first + WINDOW]
        if len(window) < 2:
            break
        probabilities = torch.log_softmax(torch.as_tensor(model.logits(window, [])[: len(window) - 1]), dim=-1)
        total -= float(probabilities[range(len(window) - 1), window[1:]].sum())
        count += len(window) - 1
    return math.exp(total / count), count


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo's model in float32, and with int8 weights."""
    directory = tmp_path_factory.mktemp("perplexity")
    checkpoint = directory / "checkpoint"
    run_command("convert-checkpoint", "--model_dir", MODEL, "--output_dir", checkpoint, "--dtype", "float32")
    for name, flags in {"plain": (), "int8": ("--quantization", "w8a16")}.items():
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
        r"the same choice for ([\d.]+)%",
        int8,
    )
    assert compared is not None
    assert float(compared[1]) == pytest.approx(expected, rel=INT8_TOLERANCE)
    assert 0 < float(compared[2]) < INT8_TOLERANCE
    assert 90 < float(compared[3]) <= 100


@pytest.mark.parametrize(
    ("text", "flags", "complaint"),
    [
        ("", [], "its tokens are 1; at least 2 are needed"),
        (None, [], "text.txt: cannot be read"),
        ("two words", ["--window", "1"], "window is 1; it must be at least 2"),
        ("words " * 200, ["--window", "300"], "max_seq_len 128; accepted: window 2 to 127"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    text: str | None, flags: list[str], complaint: str, engines: tuple[Path, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "text.txt"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    command = ["perplexity", "--engine_dir", str(engines[0]), "--text", str(file), *flags]
    assert cli.main(command) == cli.EXIT_USER_ERROR
    assert complaint in capsys.readouterr().err
