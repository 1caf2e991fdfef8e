"""PEFT adapters that are virtual tokens before a prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import torch
from safetensors.numpy import load_file

from support.models import load_model


def save_virtual_tokens(model: Path, directory: Path, count: int, seed: int, *, encoded: bool = False) -> Path:
    """Random ones of prompt tuning, or what P-tuning's encoder makes of random ones."""
    torch.manual_seed(seed)
    common = {"task_type": "CAUSAL_LM", "num_virtual_tokens": count}
    config = (
        peft.PromptEncoderConfig(**common, encoder_hidden_size=20)
        if encoded
        else peft.PromptTuningConfig(**common, prompt_tuning_init="RANDOM")
    )
    made = peft.get_peft_model(load_model(model), config)
    with torch.no_grad():
        for parameter in made.prompt_encoder.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    made.save_pretrained(directory)
    return directory


def virtual_tokens_of(directory: Path) -> np.ndarray:
    """float32 [virtual tokens, hidden_size] of the file."""
    return load_file(directory / "adapter_model.safetensors")["prompt_embeddings"]
