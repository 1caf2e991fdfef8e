"""Linear attention against transformers + PEFT in float32: prompts around its chunks, adapters of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.numpy

import adaptrt
from adaptrt._core import AdapterError
from support.adapted_engine import AdaptedEngine
from support.families import LINEAR_TARGETS, RECURRENT
from support.models import save_adapter

FAMILY = RECURRENT["qwen3.5"]
TARGETS = FAMILY.targets
ADAPTERS = {
    "lora": {"target_modules": TARGETS, "r": 5},
    "rslora": {"target_modules": TARGETS, "r": 16, "use_rslora": True},
    "dora": {"target_modules": TARGETS, "r": 4, "use_dora": True},
    "rank pattern": {
        "target_modules": TARGETS,
        "r": 3,
        "rank_pattern": {"in_proj_qkv": 7, "q_proj": 9, "in_proj_a": 1},
        "alpha_pattern": {"out_proj": 3, "q_proj": 4},
    },
    "linear attention of one layer": {"target_modules": LINEAR_TARGETS, "r": 6, "layers_to_transform": [2]},
    "queries and gates": {"target_modules": ["q_proj", "in_proj_z"], "r": 2, "use_dora": True},
    "decay": {"target_modules": ["in_proj_b", "in_proj_a"], "r": 2, "use_dora": True},
}
LENGTHS = [1, 5, 64, 65, 300]
"""A chunk of transformers has 64 tokens."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> AdaptedEngine:
    return AdaptedEngine(FAMILY, ADAPTERS, tmp_path_factory.mktemp("linear_attention"), max_seq_len=320)


def test_every_adapter_in_one_batch(served: AdaptedEngine) -> None:
    served.check_all_in_one_batch([*LENGTHS[::-1], 17, 130])


def test_prompts_of_every_length_have_the_same_bits_in_any_steps(served: AdaptedEngine) -> None:
    served.check_any_steps(LENGTHS)


def test_adapters_of_other_layers_are_refused(served: AdaptedEngine, tmp_path: Path) -> None:
    """A layer with attention has no linear attention."""
    adapter = save_adapter(served.model, tmp_path / "adapter", 0, target_modules=["in_proj_z"], r=2)
    file = adapter / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    renamed = {name.replace("layers.0.", "layers.1."): tensor for name, tensor in tensors.items()}
    safetensors.numpy.save_file(renamed, file)
    with pytest.raises(AdapterError, match=r"layers\.1\.linear_attn\.in_proj_z"):
        adaptrt.LoraConfig.from_peft(1, adapter, served.engine)
