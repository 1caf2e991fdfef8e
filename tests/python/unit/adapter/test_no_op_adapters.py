"""Adapters that change nothing are found: untrained ones of PEFT, and those whose weights the engine's type rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from adaptrt.formats.adapter import convert_adapter
from support.adapters import edit_tensors
from support.loading import load
from support.models import ModelSpec, save_model

TARGETS = ["q_proj", "down_proj"]
UNTRAINED: dict[str, Any] = {
    "lora": peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "dora": peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True, task_type="CAUSAL_LM"),
    "ia3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "vera": peft.VeraConfig(r=4, target_modules=["q_proj"], projection_prng_key=1, task_type="CAUSAL_LM"),
    "tokens": peft.TrainableTokensConfig(token_indices=[3, 5], target_modules=["embed_tokens"], task_type="CAUSAL_LM"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(ModelSpec(), tmp_path_factory.mktemp("base") / "model")


def changes_nothing(model: Path, directory: Path, dtype: str = "float32") -> bool:
    return convert_adapter(directory, storage_dtype=dtype, base=model).changes_nothing


@pytest.mark.parametrize("kind", UNTRAINED)
def test_an_untrained_adapter_changes_nothing(model: Path, tmp_path: Path, kind: str) -> None:
    base = load(transformers.AutoModelForCausalLM, model, dtype=torch.float32)
    made = peft.get_peft_model(base, UNTRAINED[kind])
    made.save_pretrained(tmp_path)
    assert changes_nothing(model, tmp_path)
    if kind == "dora":
        edit_tensors(tmp_path, lambda tensors: {name: values.astype(np.float16) for name, values in tensors.items()})
        assert changes_nothing(model, tmp_path)
    # One value of the last module suffices.
    with torch.no_grad():
        parameters = dict(made.named_parameters())
        factors = ("lora_A", "lambda_d")  # of a product whose other factor is zero
        last = [name for name in parameters if parameters[name].requires_grad and not any(f in name for f in factors)]
        parameters[last[-1]].view(-1)[-1] += 0.25
    made.save_pretrained(tmp_path)
    assert not changes_nothing(model, tmp_path)


def test_ranks_without_a_pair_and_rounded_values_change_nothing(model: Path, tmp_path: Path) -> None:
    base = load(transformers.AutoModelForCausalLM, model, dtype=torch.float32)
    made = peft.get_peft_model(base, UNTRAINED["lora"])
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_A" in name:
                parameter[1:] = 0
            elif "lora_B" in name:
                parameter[:, 1:] = 1
    made.save_pretrained(tmp_path)
    assert changes_nothing(model, tmp_path)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter[:, 0] = 1e-9  # float16 has zero
    made.save_pretrained(tmp_path)
    assert (changes_nothing(model, tmp_path), changes_nothing(model, tmp_path, "float16")) == (False, True)
