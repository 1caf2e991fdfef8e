"""Refused PEFT types: each has a reason, and those that PEFT converts to LoRA have the rank of an exact result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from adaptrt import _core
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.adapter.peft_fields import FIELDS
from adaptrt.formats.adapter.recognise import PromptKind
from support.models import ModelSpec, save_model

HIDDEN_SIZE = 32
TARGETS = ["q_proj", "o_proj"]
ATTN_Q, ATTN_DENSE = 1, 4
R = 4

EXACT: dict[str, tuple[dict[str, Any], int]] = {
    "C3A": ({"block_size": 8}, HIDDEN_SIZE),
    "DELORA": ({"r": R}, R),
    "FOURIERFT": ({"n_frequency": 200}, HIDDEN_SIZE),
    "GRALORA": ({"r": R, "gralora_k": 2, "hybrid_r": 1}, 2 * R + 1),
    "MISS": ({"r": R}, R),
    "PSOFT": ({"r": R}, R),
    "RANDLORA": ({"r": R}, HIDDEN_SIZE),
    "TINYLORA": ({"r": R}, R),
    "UNILORA": ({"r": R, "theta_d_length": 64}, R),
    "VBLORA": ({"r": R, "vector_length": 8, "num_vectors": 16}, R),
    "WAVEFT": ({"n_frequency": 200}, HIDDEN_SIZE),
}
"""Config fields and the rank of an exact result, by type."""


def refusal(directory: Path) -> str:
    with pytest.raises(_core.AdapterError) as error:
        convert_adapter(directory, storage_dtype="float32")
    return str(error.value)


def refusal_of_type(directory: Path, peft_type: str) -> str:
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": peft_type, "task_type": "CAUSAL_LM"}))
    return refusal(directory)


def test_every_type_of_the_installed_peft_is_served_or_has_a_reason(tmp_path: Path) -> None:
    unserved = {str(kind.value) for kind in peft.PeftType} - FIELDS.keys() - PromptKind.__members__.keys()
    assert len(unserved) > 30
    for peft_type in unserved:
        text = refusal_of_type(tmp_path, peft_type)
        assert re.search(rf'peft_type = "{peft_type}": not served, because [a-z]', text), text
        assert ("peft.save_as_lora" in text) == (peft_type in EXACT), text


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = ModelSpec(hidden_size=HIDDEN_SIZE, num_hidden_layers=1, num_attention_heads=4, head_dim=8)
    return save_model(spec, tmp_path_factory.mktemp("base") / "model")


@pytest.mark.parametrize("peft_type", EXACT)
def test_peft_makes_a_lora_of_it_that_is_served_and_exact(peft_type: str, base: Path, tmp_path: Path) -> None:
    fields, rank = EXACT[peft_type]
    config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(peft_type)](
        task_type="CAUSAL_LM", target_modules=TARGETS, **fields
    )
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.eval().save_pretrained(tmp_path / "kind")
    assert "peft.save_as_lora(path, model, rank)" in refusal(tmp_path / "kind")

    peft.save_as_lora(tmp_path / "lora", model, rank=rank)
    converted = convert_adapter(tmp_path / "lora", storage_dtype="float32")
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.eye(HIDDEN_SIZE)
    for layer, module_id in ((attention.q_proj, ATTN_Q), (attention.o_proj, ATTN_DENSE)):
        with torch.no_grad():
            expected = (layer(x) - layer.get_base_layer()(x)).T.numpy()
        actual = product(converted.weights, converted.config, module_id)
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def product(weights: np.ndarray, config: np.ndarray, module_id: int) -> np.ndarray:
    """Returns B A of the module in the only layer, [out, in]."""
    (row,) = np.flatnonzero(config[0, :, 0] == module_id)
    rank = int(config[0, row, 2])
    flat = weights[0, row]
    a = flat[: rank * HIDDEN_SIZE].reshape(rank, HIDDEN_SIZE)
    b = flat[rank * HIDDEN_SIZE : 2 * rank * HIDDEN_SIZE].reshape(HIDDEN_SIZE, rank)
    return b @ a
