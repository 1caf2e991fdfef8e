"""Adapters of every supported kind, written by PEFT, and adapters in MLX-LM's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save

from support.adapters import CONFIG, TENSORS
from support.loading import load

NOT_FOR_GPT2 = ("loha", "lokr", "lokr-in-factors", "biases-without-tensors")
"""PEFT does not support the first three on Conv1D. GPT-2 has biases, which the last one would train."""


def configs(targets: list[str], is_transposed: bool) -> dict[str, Any]:
    """Returns PEFT's configurations by kind, for every target. With rank patterns, some modules differ."""
    common = {"task_type": "CAUSAL_LM", "target_modules": targets}
    conv1d = {"fan_in_fan_out": True} if is_transposed else {}
    kinds = {
        "lora": peft.LoraConfig(r=5, **conv1d, **common),
        "biases-without-tensors": peft.LoraConfig(r=3, bias="lora_only", **conv1d, **common),
        "dora": peft.LoraConfig(r=4, use_dora=True, **conv1d, **common),
        "adalora": peft.AdaLoraConfig(init_r=6, target_r=4, lora_alpha=9, total_step=10, **conv1d, **common),
        "vera": peft.VeraConfig(r=7, projection_prng_key=11, **conv1d, **common),
        "vera-from-its-seed": peft.VeraConfig(r=9, projection_prng_key=12, save_projection=False, **conv1d, **common),
        "loha": peft.LoHaConfig(r=4, alpha=6, rank_pattern={targets[0]: 2}, **common),
        "lokr": peft.LoKrConfig(r=40, alpha=30, decompose_factor=3, **common),
        "lokr-in-factors": peft.LoKrConfig(r=2, alpha=3, decompose_both=True, alpha_pattern={targets[0]: 5}, **common),
    }
    if "down_proj" in targets:
        kinds["ia3"] = peft.IA3Config(
            target_modules=[target for target in targets if target not in ("q_proj", "up_proj")],
            feedforward_modules=["down_proj"],
            task_type="CAUSAL_LM",
        )
        kinds["ia3-twice-on-up"] = peft.IA3Config(
            target_modules=["up_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        )
    return {kind: config for kind, config in kinds.items() if not is_transposed or kind not in NOT_FOR_GPT2}


def save_kind(model_directory: Path, directory: Path, config: Any, seed: int, extra_tokens: int = 0) -> Path:
    """Writes an adapter with random tensors. AdaLoRA's first module is pruned completely, its second in part.

    extra_tokens: number of tokens that are added to the embeddings before; below 0: removed.
    """
    generator = torch.Generator().manual_seed(seed)
    base = load(transformers.AutoModelForCausalLM, model_directory, dtype=torch.float32)
    if extra_tokens:
        base.resize_token_embeddings(base.config.vocab_size + extra_tokens, mean_resizing=False)
    if extra_tokens > 0:
        with torch.no_grad():
            for layer in (base.get_input_embeddings(), base.get_output_embeddings()):
                rows = layer.weight[-extra_tokens:]
                rows.copy_(torch.randn(rows.shape, generator=generator))
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                if "magnitude" in name:
                    parameter.mul_(1.0 + 0.2 * noise)
                elif "ia3" in name:
                    parameter.copy_(1.0 + 0.3 * noise)
                else:
                    parameter.copy_(0.4 * noise if "lora_E" in name or "lambda" in name else 0.15 * noise)
    if isinstance(config, peft.AdaLoraConfig):
        names = [name for name, _ in model.named_parameters() if ".lora_E." in name]
        kept = ([False] * 6, [True, False, True, True, False, True])
        model.peft_config["default"].rank_pattern = {
            name.removeprefix("base_model.model."): flags for name, flags in zip(names, kept, strict=False)
        }
    model.save_pretrained(directory)
    return directory


def save_with_initial(model_directory: Path, directory: Path, init: str, seed: int, **fields: Any) -> tuple[Path, Path]:
    """Returns (adapter, initial adapter) of an initialisation that takes A and B from the base's weights."""
    generator = torch.Generator().manual_seed(seed)
    base = load(transformers.AutoModelForCausalLM, model_directory, dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=init, **fields)
    model = peft.get_peft_model(base, config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(directory / "initial")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.peft_config["default"].init_lora_weights = init
    model.save_pretrained(directory / "adapter")
    return directory / "adapter", directory / "initial"


def as_mlx(peft_directory: Path, directory: Path, num_layers: int, keys: Sequence[str] | None = None) -> Path:
    """Writes the same adapter in MLX-LM's format."""
    config = json.loads((peft_directory / CONFIG).read_text())
    names = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
    tensors = {}
    for name, tensor in load_file(peft_directory / TENSORS).items():
        path = name.removeprefix("base_model.model.").replace("transformer.", "model.")
        for suffix, last in names.items():
            if path.endswith(f".{suffix}"):
                tensors[f"{path.removesuffix(suffix)}{last}"] = np.ascontiguousarray(tensor.T)
    directory.mkdir()
    content = save(tensors)
    length = int.from_bytes(content[:8], "little")
    header = {"__metadata__": None, **json.loads(content[8 : 8 + length])}  # like MLX
    text = json.dumps(header, separators=(",", ":")).encode()
    (directory / "adapters.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    parameters = {"rank": config["r"], "dropout": 0.1, "scale": config["lora_alpha"] / config["r"]}
    fields = {
        "fine_tune_type": "dora" if config["use_dora"] else "lora",
        "num_layers": num_layers,
        "lora_parameters": parameters if keys is None else {**parameters, "keys": list(keys)},
        "model": "somewhere",
        "learning_rate": 1e-5,
        "batch_size": 4,
    }
    (directory / CONFIG).write_text(json.dumps(fields))
    return directory
