"""Latent attention against transformers + PEFT in float32: adapters of every kind on every linear layer."""

from __future__ import annotations

from pathlib import Path

import pytest

import adaptrt
from adaptrt._core import AdapterError
from support.adapted_engine import AdaptedEngine
from support.families import LATENT
from support.models import save_adapter

FAMILY = LATENT["deepseek-v3"]
TARGETS = FAMILY.targets
ADAPTERS = {
    "lora": {"target_modules": TARGETS, "r": 5},
    "dora": {"target_modules": TARGETS, "r": 4, "use_dora": True},
    "rank pattern": {
        "target_modules": TARGETS,
        "r": 3,
        "use_rslora": True,
        "rank_pattern": {"kv_b_proj": 7, "q_a_proj": 1},
        "alpha_pattern": {"kv_b_proj": 3, "o_proj": 4},
    },
    "keys and values": {"target_modules": ["kv_b_proj"], "r": 6, "layers_to_transform": [1]},
    # Its factors of keys are in a row of q_b_proj, which the adapter does not have.
    "factors of keys and values": {"target_modules": ["kv_b_proj"], "r": 2, "use_dora": True},
    "biases": {"target_modules": ["kv_b_proj", "q_b_proj", "kv_a_proj_with_mqa"], "r": 2, "lora_bias": True},
    "compressed rows": {"target_modules": ["kv_a_proj_with_mqa", "q_a_proj"], "r": 2},
}
LENGTHS = [1, 5, 64, 65, 200]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> AdaptedEngine:
    return AdaptedEngine(FAMILY, ADAPTERS, tmp_path_factory.mktemp("latent_attention"), max_seq_len=256)


def test_every_adapter_in_one_batch(served: AdaptedEngine) -> None:
    served.check_all_in_one_batch([*LENGTHS[::-1], 17, 90])


def test_prompts_of_every_length_have_the_same_bits_in_any_steps(served: AdaptedEngine) -> None:
    served.check_any_steps(LENGTHS)


def test_an_adapter_that_begins_within_a_prompt_must_leave_keys_and_values(
    served: AdaptedEngine, tmp_path: Path
) -> None:
    """Tokens before the invocation have the base's keys and values; compressed rows may change."""
    settings = {"r": 2, "alora_invocation_tokens": [5, 6]}
    adapter = save_adapter(served.model, tmp_path / "kv", 0, target_modules=["kv_b_proj"], **settings)
    with pytest.raises(AdapterError, match=r"kv_b_proj': aLoRA changes keys and values from its invocation on"):
        adaptrt.LoraConfig.from_peft(1, adapter, served.engine)
    other = save_adapter(served.model, tmp_path / "q", 0, target_modules=["kv_a_proj_with_mqa"], **settings)
    adaptrt.LoraConfig.from_peft(1, other, served.engine, active_from=3)
