"""Small random encoder-decoder models, their adapters, and references from transformers + PEFT in float32."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

from .loading import find_adapted, load, load_adapter, save_adapted

VOCAB_SIZE = 61
T5_FIELDS = {
    "vocab_size": VOCAB_SIZE, "d_model": 36, "d_kv": 10, "d_ff": 38, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 3, "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BART_FIELDS = {
    "vocab_size": VOCAB_SIZE, "d_model": 36, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 38, "decoder_ffn_dim": 41, "max_position_embeddings": 96,
    "decoder_start_token_id": 2, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class EncoderDecoder:
    """The configuration of a random model, and the linear layers that PEFT can target in it."""

    config_class: type[Any]
    fields: dict[str, Any]
    targets: list[str]
    own_lm_head: bool = False
    """True: lm_head is separate, as in T5 v1.1's files. (In models that transformers 5 makes, it is tied.)"""


MODELS = {
    "t5": EncoderDecoder(transformers.T5Config, T5_FIELDS, ["q", "k", "v", "o", "wi", "wo"]),
    "flan-t5": EncoderDecoder(
        transformers.T5Config,
        {**T5_FIELDS, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        ["q", "k", "v", "o", "wi_0", "wi_1", "wo"],
        own_lm_head=True,
    ),
    "bart": EncoderDecoder(
        transformers.BartConfig,
        {**BART_FIELDS, "scale_embedding": True},
        ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    ),
}


def save_encoder_decoder(kind: EncoderDecoder, directory: Path, seed: int = 0) -> Path:
    """Writes a random model as a Hugging Face directory; norms, biases and tables of positions are random too."""
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForSeq2SeqLM.from_config(kind.config_class(**kind.fields))
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif parameter.dim() == 1 or "final_logits_bias" in name:
                parameter.copy_(0.3 * noise)
            elif "relative_attention_bias" in name or "shared" in name or "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    model.save_pretrained(directory)
    if kind.own_lm_head:
        _give_an_lm_head(directory, generator)
    return directory


def _give_an_lm_head(directory: Path, generator: torch.Generator) -> None:
    tensors = load_file(directory / "model.safetensors")
    shape = tensors["shared.weight"].shape
    tensors["lm_head.weight"] = torch.randn(shape, generator=generator).numpy()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (directory / "config.json").write_text(json.dumps(config))


def _load(model: Path) -> Any:
    return load(transformers.AutoModelForSeq2SeqLM, model, dtype=torch.float32, attn_implementation="eager")


def save_adapter_of(kind: EncoderDecoder, model: Path, directory: Path, seed: int, **lora: Any) -> Path:
    """Writes a PEFT adapter with random A, B and magnitudes; `lora` goes to peft.LoraConfig."""
    generator = torch.Generator().manual_seed(seed)
    base = _load(model)
    lora = {"target_modules": kind.targets, "lora_alpha": 2 * lora.get("r", 8), **lora}
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_2_SEQ_LM", **lora))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_A" in name:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            elif "lora_B" in name:
                parameter.copy_(0.3 * noise / parameter.shape[1] ** 0.5)
            elif "lora_magnitude_vector" in name:
                parameter.mul_(1.0 + 0.2 * noise)
    return save_adapted(adapted, model, directory)


class Seq2SeqReference:
    """transformers + PEFT in float32, the adapter unmerged."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        loaded = None if adapter is None else find_adapted(model, adapter)
        if loaded is None:
            loaded = _load(model)
            if adapter is not None:
                loaded = load_adapter(loaded, adapter)
        self.model = loaded.eval()

    def logits(self, encoder_tokens: Sequence[int], decoder_tokens: Sequence[int]) -> np.ndarray:
        """Returns float32 [decoder tokens, vocab]."""
        with torch.no_grad():
            output = self.model(
                input_ids=torch.tensor([list(encoder_tokens)]), decoder_input_ids=torch.tensor([list(decoder_tokens)])
            )
        return output.logits[0].numpy()

    def encoder_output(self, encoder_tokens: Sequence[int]) -> np.ndarray:
        """Returns float32 [encoder tokens, hidden size]."""
        with torch.no_grad():
            encoder = self.model.get_encoder()
            return encoder(input_ids=torch.tensor([list(encoder_tokens)])).last_hidden_state[0].numpy()


def tokens_of(count: int, seed: int) -> list[int]:
    """Returns random tokens without end tokens."""
    return np.random.default_rng((seed, count)).integers(3, VOCAB_SIZE, count).tolist()
