"""Models whose weights are the values of quantised weights."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from adaptrt._core import QuantAlgo
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.checkpoint.quantizer import dequantize_rows, quantize_rows

LINEARS = re.compile(r".*_proj\.weight|.*\.experts\.\d+\.w[123]\.weight|lm_head\.weight")


def dequantized_model(model: Path, directory: Path, config: QuantConfig) -> Path:
    """Copies the model and replaces each linear weight by the values of its quantised form."""
    weights = load_file(model / "model.safetensors")
    for name, rows in weights.items():
        if LINEARS.fullmatch(name):
            how = QuantConfig(quant_algo=QuantAlgo.W8A16) if name == "lm_head.weight" else config
            rows = rows.astype(np.float32)
            weights[name] = np.ascontiguousarray(dequantize_rows(quantize_rows(rows, how), how))
    directory.mkdir()
    for file in model.iterdir():
        if file.name != "model.safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory
