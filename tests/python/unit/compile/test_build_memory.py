"""Builds stream the weights and loading maps them: peak memory against the engine's size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from adaptrt._core import DType
from adaptrt.builder.network.checkpoint_tensors import hf_tensor_shapes, plan_rank
from adaptrt.common.safetensors_stream import SafetensorsWriter, TensorSpec
from adaptrt.formats.checkpoint.config import CheckpointConfig
from adaptrt.formats.models.registry import declare

CONFIG = CheckpointConfig(
    architecture="LlamaForCausalLM",
    dtype=DType.BFLOAT16,
    vocab_size=32000,
    max_position_embeddings=1024,
    hidden_size=1024,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_size=64,
    intermediate_size=2816,
    norm_epsilon=1e-5,
    rotary_base=1e4,
)
# The limit is 1.3 times the engine. The measurement starts after the imports, so it also holds for engines that are
# small compared with them.
MAX_RATIO = 1.3
# Buffers for pieces of weights in both layouts, and memory that the allocator keeps.
ALLOWED_BUILD_GROWTH = 64 << 20
# In addition, pieces of the model's weights before the cast.
ALLOWED_CASTING_GROWTH = 96 << 20
# The quantiser's float32 buffers and the float64 buffers of its error statistics.
ALLOWED_QUANTIZING_GROWTH = 160 << 20

MEASURE = """
import sys
from pathlib import Path
from {module} import {function}

def high_water_mark():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

before = high_water_mark()
{call}
print(high_water_mark() - before)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves about 200 MB of weights, all equal to 1."""
    directory = tmp_path_factory.mktemp("large")
    (directory / "config.json").write_text(CONFIG.to_json())
    specs = [TensorSpec(tensor.name, np.dtype("bfloat16"), tensor.shape) for tensor in plan_rank(declare(CONFIG), 0)]
    with SafetensorsWriter(directory / "rank0.safetensors", specs) as writer:
        for spec in specs:
            writer.write(spec.name, np.full(spec.shape, 0x3F80, np.uint16).view(np.uint8))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a Hugging Face model of the same sizes in float32, which takes twice the bytes."""
    directory = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "num_attention_heads": CONFIG.num_attention_heads,
        "num_hidden_layers": CONFIG.num_hidden_layers,
        "num_key_value_heads": CONFIG.num_key_value_heads,
        "rms_norm_eps": CONFIG.norm_epsilon,
        "vocab_size": CONFIG.vocab_size,
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes = hf_tensor_shapes(declare(CONFIG))
    specs = [TensorSpec(name, np.dtype(np.float32), shape) for name, shape in shapes.items()]
    with SafetensorsWriter(directory / "model.safetensors", specs) as writer:
        for spec in specs:
            writer.write(spec.name, np.ones(spec.shape, np.float32).view(np.uint8))
    return directory


def growth(module: str, function: str, call: str, *arguments: Path) -> int:
    """Returns the bytes by which a call raises the peak memory of its own process."""
    script = MEASURE.format(module=module, function=function, call=call)
    process = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return int(process.stdout)


@pytest.mark.parametrize(
    ("quantization", "allowed"),
    [("None", ALLOWED_CASTING_GROWTH), ("QuantConfig(quant_algo=QuantAlgo.W8A16)", ALLOWED_QUANTIZING_GROWTH)],
)
def test_peak_memory_of_one_pass(model: Path, tmp_path: Path, quantization: str, allowed: int) -> None:
    building = growth(
        "adaptrt.builder.build",
        "build, BuildConfig, Checkpoint, QuantConfig; from adaptrt._core import DType, QuantAlgo",
        f"build(Checkpoint.of_model(Path(sys.argv[1]), DType.BFLOAT16), BuildConfig(), Path(sys.argv[2]), "
        f"quantization={quantization})",
        model,
        tmp_path / "engine",
    )
    assert (model / "model.safetensors").stat().st_size > 380 << 20
    assert building < allowed


def test_peak_memory_of_build_and_load(checkpoint: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    building = growth(
        "adaptrt.builder.build",
        "build, BuildConfig",
        "build(Path(sys.argv[1]), BuildConfig(), Path(sys.argv[2]))",
        checkpoint,
        engine,
    )
    engine_bytes = (engine / "rank0.engine").stat().st_size
    assert engine_bytes > 190 << 20
    assert building < ALLOWED_BUILD_GROWTH
    loading = growth("adaptrt.runtime.engine", "load_engine", "engine = load_engine(sys.argv[1])", engine)
    # Loading reads every page to check it, so the mapping itself counts.
    assert engine_bytes <= loading < MAX_RATIO * engine_bytes
    config = json.loads((engine / "config.json").read_text())
    assert config["build_config"]["max_seq_len"] == CONFIG.max_position_embeddings
