"""PEFT adapters of virtual tokens, and a model that is served with them and with other adapters."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from safetensors.numpy import load_file

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import FAMILIES, LLAMA, save_family
from support.loading import load_adapter
from support.models import ModelSpec, load_model, save_adapter, save_model
from support.serving import Answer, collect, make_request

VOCABULARY = 61
BLOCK = 8
CONFIG = BuildConfig(
    max_batch_size=16,
    max_num_tokens=256,
    max_seq_len=160,
    max_beam_width=3,
    tokens_per_block=BLOCK,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
LENGTHS = {"tuned": 5, "other": 5, "long": 19, "encoded": 7}
"""Number of virtual tokens per adapter; `encoded` is P-tuning."""


def save_virtual_tokens(model: Path, directory: Path, count: int, seed: int, *, encoded: bool = False) -> Path:
    """Saves random virtual tokens of prompt tuning, or the output of P-tuning's encoder."""
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
    """Returns float32 [virtual tokens, hidden_size] from the file."""
    return load_file(directory / "adapter_model.safetensors")["prompt_embeddings"]


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCABULARY, count).tolist()


class Served:
    """A random model, its engine, a LoRA, a DoRA, and adapters of virtual tokens."""

    def __init__(self, name: str, directory: Path) -> None:
        if name == "llama":
            self.model, targets = save_model(ModelSpec(), directory / "model"), LLAMA
        else:
            self.model, targets = save_family(FAMILIES[name], directory / "model"), FAMILIES[name].targets
        convert_checkpoint(self.model, directory / "checkpoint")
        build(directory / "checkpoint", CONFIG, directory / "engine")
        self.engine = directory / "engine"
        settings = {"r": 8, "target_modules": targets, "fan_in_fan_out": name == "gpt2"}
        self.adapters = {
            "lora": save_adapter(self.model, directory / "lora", 1, 3.0, **settings),
            "dora": save_adapter(self.model, directory / "dora", 2, 3.0, use_dora=True, **settings),
        }
        for seed, (kind, length) in enumerate(LENGTHS.items()):
            self.adapters[kind] = save_virtual_tokens(
                self.model, directory / kind, length, seed, encoded=kind == "encoded"
            )

    def executor(self, **fields: Any) -> adaptrt.Executor:
        made = adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(**fields))
        for kind, directory in self.adapters.items():
            made.add_adapter(kind, directory)
        return made

    def answers(self, cases: list[tuple[str | None, list[int]]], num_tokens: int = 8, **fields: Any) -> list[Answer]:
        """Returns the answers to all (kind, prompt), run at once: none begins before the last is queued."""
        all_queued = threading.Event()
        first = make_request([2], 1, logits_post_processor=lambda *_: all_queued.wait(60))
        with self.executor(**fields) as executor:
            executor.enqueue_request(first)
            ids = [executor.enqueue_request(make_request(prompt, num_tokens), adapter=kind) for kind, prompt in cases]
            all_queued.set()
            answers = [without_nan(collect(executor, request_id)) for request_id in ids]
            stats = executor.get_latest_iteration_stats()
            self.num_paused = max(step.inflight_batching_stats.num_paused_requests for step in stats)
            return answers

    def expected(self, kind: str | None, tokens: list[int]) -> np.ndarray:
        """Returns PEFT's logits, including those of virtual tokens."""
        model = load_model(self.model, attn_implementation="eager", experts_implementation="eager")
        if kind is not None:
            model = load_adapter(model, self.adapters[kind])
        with torch.no_grad():
            return model.eval()(torch.tensor([tokens])).logits[0].float().numpy()


def without_nan(answer: Answer) -> Answer:
    """Replaces the NaN log probs of virtual tokens by None, so that answers can be compared."""
    prompt = answer.log_probs.prompt
    if prompt is not None:
        answer.log_probs.prompt = [None if math.isnan(value) else value for value in prompt]  # type: ignore[misc]
    return answer
