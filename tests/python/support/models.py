"""Small random Hugging Face models and PEFT adapters, and references from transformers + PEFT in float32."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from .loading import find_adapted, load, load_adapter, save_adapted

CONFIG_CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3.5": transformers.Qwen3_5TextConfig,
}
ATTENTION_MODULES = ["q_proj", "k_proj", "v_proj"]
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
ALL_MODULES = [*ATTENTION_MODULES, "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Sizes of a random model. The defaults are odd on purpose."""

    family: str = "llama"
    vocab_size: int = 61
    hidden_size: int = 36
    num_hidden_layers: int = 2
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    head_dim: int = 12
    intermediate_size: int = 37
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = False
    extra: tuple[tuple[str, Any], ...] = ()

    def config(self) -> Any:
        """Returns the transformers configuration of this model."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("family", "extra")}
        return CONFIG_CLASSES[self.family](
            **fields,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=None,
            attn_implementation="eager",
            **dict(self.extra),
        )


def save_model(spec: ModelSpec, directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a random model of `spec` as a Hugging Face directory; norms and biases are random too."""
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(spec.config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    model.to(dtype).save_pretrained(directory)
    return directory


def load_model(directory: Path, **settings: Any) -> Any:
    """Loads a model in float32, with its vision tower if it has one."""
    sees = "vision_config" in json.loads((directory / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    return load(kind, directory, dtype=torch.float32, **settings)


def save_adapter(model_directory: Path, directory: Path, seed: int, strength: float = 1.0, **lora: Any) -> Path:
    """Writes a PEFT adapter with random A, B, magnitudes, trained biases and tokens; `lora` goes to peft.LoraConfig."""
    generator = torch.Generator().manual_seed(seed)
    base = load_model(model_directory, **EAGER)
    lora = {"target_modules": ALL_MODULES, "lora_alpha": 2 * lora.get("r", 8), **lora}
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_A" in name:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            elif "lora_B" in name:
                width = parameter.shape[1] if parameter.dim() > 1 else 1  # B's bias has one dimension
                parameter.copy_(0.2 * strength * noise / width**0.5)
            elif "lora_magnitude_vector" in name:
                parameter.mul_(1.0 + 0.2 * noise)
            elif "lora_embedding" in name:
                parameter.copy_(0.3 * strength * noise)
            elif "trainable_tokens_delta" in name or (name.endswith(".bias") and parameter.requires_grad):
                parameter.add_(0.2 * noise)
    return save_adapted(model, model_directory, directory)


@dataclasses.dataclass(frozen=True)
class Beam:
    """A sequence that transformers' beam search returned."""

    tokens: list[int]
    """Generated tokens, including the end token."""
    score: float
    """Sum of its tokens' log probs after all processors, before the length penalty."""


def _angles_depend_on_length(config: Any) -> bool:
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_layer_type = (fields for fields in rope.values() if isinstance(fields, dict))
    return any(fields.get("rope_type") in ("dynamic", "longrope") for fields in (rope, *by_layer_type))


class Reference:
    """transformers + PEFT in float32, with an unmerged adapter."""

    def __init__(self, model_directory: Path, adapter_directory: Path | None = None, extra_tokens: int = 0) -> None:
        """extra_tokens: number of tokens added to the embeddings before the adapter was trained; below 0: removed."""
        model = None
        if adapter_directory is not None and not extra_tokens:
            model = find_adapted(model_directory, adapter_directory)
        if model is None:
            model = load_model(model_directory, **EAGER)
            if extra_tokens:
                model.resize_token_embeddings(model.config.vocab_size + extra_tokens, mean_resizing=False)
            if adapter_directory is not None:
                model = load_adapter(model, adapter_directory)
        self._model = model.eval()

    def logits(self, prompt: list[int], generated: Sequence[int] = ()) -> torch.Tensor:
        """Returns the logits after each token of the prompt and after all but the last generated token: float32
        [tokens, vocab].

        With dynamic RoPE scaling the angles depend on the length, so this computes the prompt at once and the other
        tokens one by one, as transformers generates. One pass over all tokens gives the same in other models.
        """
        with torch.no_grad():
            if not _angles_depend_on_length(self._model.config):
                return self._model(torch.tensor([[*prompt, *generated[:-1]]]), use_cache=False).logits[0].float()
            rows, cache = [], transformers.DynamicCache(config=self._model.config)
            for tokens in (prompt, *([token] for token in generated[:-1])):
                output = self._model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                rows.append(output.logits[0].float())
        return torch.cat(rows)

    def search(
        self,
        prompt: list[int],
        num_beams: int,
        end_ids: Sequence[int] = (),
        length_penalty: float = 1.0,
        **settings: Any,
    ) -> list[Beam]:
        """Returns the beams of generate(num_beams=...), best first. settings: further arguments."""
        self._model.generation_config = transformers.GenerationConfig(
            eos_token_id=list(end_ids) or None, pad_token_id=0, do_sample=False
        )
        with torch.no_grad():
            found = self._model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                num_beams=num_beams,
                num_return_sequences=num_beams,
                length_penalty=length_penalty,
                return_dict_in_generate=True,
                output_scores=True,
                **settings,
            )
        lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
        return [
            Beam(tokens[len(prompt) : len(prompt) + length].tolist(), float(score) * length**length_penalty)
            for tokens, length, score in zip(found.sequences, lengths, found.sequences_scores, strict=True)
        ]
