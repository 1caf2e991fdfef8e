"""Conversion holds a few pieces of tensors in memory, whatever the model's size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from adaptrt.builder.safetensors_stream import SafetensorsWriter, TensorSpec

HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS = 1024, 4096, 32000, 8
# Pieces of 4 MiB, their float32 copies and masks, for each of two workers, and room for the allocator.
ALLOWED_GROWTH = 120 << 20

CONVERT = """
import sys
from pathlib import Path
from adaptrt import _core
from adaptrt.builder.checkpoint.convert import convert_checkpoint

def high_water_mark():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

before = high_water_mark()
convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), dtype=_core.DType.FLOAT16, tp_size=2, workers=2)
print(high_water_mark() - before)
"""


@pytest.fixture
def large_model(tmp_path: Path) -> Path:
    """A bfloat16 Llama of 400 MB; all of its weights are 1."""
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{prefix}mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes[f"{prefix}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
    directory = tmp_path / "hf"
    directory.mkdir()
    specs = [TensorSpec(name, np.dtype("bfloat16"), shape) for name, shape in shapes.items()]
    one = np.ones(1, np.dtype("bfloat16")).tobytes()
    with SafetensorsWriter(directory / "model.safetensors", specs) as writer:
        for spec in specs:
            writer.write(spec.name, one * (spec.num_bytes // 2))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 128,
        "num_attention_heads": 8,
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the high-water mark is read from /proc")
def test_memory_does_not_grow_with_the_model(large_model: Path, tmp_path: Path) -> None:
    size = (large_model / "model.safetensors").stat().st_size
    assert size > ALLOWED_GROWTH * 3
    command = [sys.executable, "-c", CONVERT, str(large_model), str(tmp_path / "out")]
    growth = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert growth < ALLOWED_GROWTH
