"""Converts the ReLU model with PowerInfer's converters, with predictors and dense."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

SPARSE, DENSE = "relu.powerinfer.gguf", "relu-dense.gguf"


def convert(home: Path, model_dir: Path, predictor_dir: Path, output: Path) -> None:
    """Writes output/SPARSE and output/DENSE in float16, PowerInfer's only plain 16-bit type.

    Existing files are kept. Raises CalledProcessError if a converter fails.
    """
    source = output / "source"
    _write_source(model_dir, source)
    for script, predictors, name in (
        ("convert.py", [predictor_dir], SPARSE),
        ("convert-dense.py", [], DENSE),
    ):
        if not (output / name).exists():
            made = output / f"{name}.part"
            _run(home, script, "--outtype", "f16", "--vocabtype", "bpe", "--outfile", made, source, *predictors)
            made.rename(output / name)


def _write_source(model_dir: Path, source: Path) -> None:
    """Writes the model with its tokenizer in GPT-2's two files, the format that these converters read."""
    source.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        if not (source / name).exists():
            os.link(model_dir / name, source / name)
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    vocabulary = dict(tokenizer["model"]["vocab"])
    vocabulary.update({token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    in_order = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    (source / "vocab.json").write_text(json.dumps(in_order))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    (source / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")


def _run(home: Path, script: str, *arguments: object) -> None:
    command = [home / "venv-powerinfer" / "bin" / "python", home / "powerinfer" / script, *arguments]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
