"""Conversion holds only a few pieces of tensors in memory, for models of any size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from adaptrt.common.safetensors_stream import SafetensorsWriter, TensorSpec

HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS = 1024, 4096, 32000, 8
# Pieces of 4 MiB, their float32 copies and masks, for two workers, plus room for the allocator.
ALLOWED_GROWTH = 100 << 20
# The tensor that a worker reads from a pickled file stays mapped: at most the embedding.
ALLOWED_GROWTH_PICKLED = ALLOWED_GROWTH + 2 * (2 * VOCABULARY * HIDDEN)

CONVERT = """
import sys
from pathlib import Path
from adaptrt import _core
from adaptrt.builder.conversion.convert import convert_checkpoint

if sys.argv[3] == "pickled":
    import torch

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


def pickle_model(model_dir: Path) -> None:
    """The same model in two pickled shards."""
    state = load_file(model_dir / "model.safetensors")
    names = list(state)
    halves = {"a.bin": names[: len(names) // 2], "b.bin": names[len(names) // 2 :]}
    for file, half in halves.items():
        torch.save({name: state[name] for name in half}, model_dir / file)
    weight_map = {name: file for file, half in halves.items() for name in half}
    (model_dir / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model_dir / "model.safetensors").unlink()


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickled"])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the high-water mark is read from /proc")
def test_memory_does_not_grow_with_the_model(large_model: Path, tmp_path: Path, pickled: bool) -> None:
    assert (large_model / "model.safetensors").stat().st_size > ALLOWED_GROWTH_PICKLED * 1.5
    if pickled:
        pickle_model(large_model)
    command = [sys.executable, "-c", CONVERT, str(large_model), str(tmp_path / "out"), "pickled" if pickled else ""]
    growth = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(growth >> 20)
    assert growth < (ALLOWED_GROWTH_PICKLED if pickled else ALLOWED_GROWTH)
