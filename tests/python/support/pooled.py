"""Models whose requests return rows instead of tokens, and references from transformers + PEFT in float32."""

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
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import adaptrt
from adaptrt import PoolingType

from .loading import load, load_adapter, save_adapted


def randomise(model: Any, seed: int) -> Any:
    """Sets all parameters to random values, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_((1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0) + 0.2 * noise)
            elif "embed" in name or "lm_head" in name or "wte" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    return model


def save_random(model: Any, directory: Path, seed: int = 0) -> Path:
    """Saves a random model of a class with its own tensor names and architecture."""
    randomise(model, seed).save_pretrained(directory)
    return directory


@dataclasses.dataclass(frozen=True)
class Dense:
    """A random Dense module of sentence-transformers; it has a bias if `activation` is Tanh."""

    inputs: int
    outputs: int
    activation: str = "linear.Identity"
    """End of the name of a class in torch.nn.modules."""

    def save(self, directory: Path) -> None:
        """Writes its two files."""
        directory.mkdir()
        torch.manual_seed(self.outputs)
        linear = torch.nn.Linear(self.inputs, self.outputs, bias=self.activation == "activation.Tanh")
        fields = {"in_features": self.inputs, "out_features": self.outputs, "bias": linear.bias is not None}
        fields["activation_function"] = f"torch.nn.modules.{self.activation}"
        (directory / "config.json").write_text(json.dumps(fields))
        tensors = {f"linear.{name}": tensor.detach() for name, tensor in linear.named_parameters()}
        save_file(tensors, directory / "model.safetensors")


def apply_dense(directory: Path, rows: np.ndarray, dense: Sequence[Dense]) -> np.ndarray:
    """Applies the Dense modules of a model to pooled hidden states."""
    for number, layer in enumerate(dense, 2):
        tensors = load_file(directory / f"{number}_Dense" / "model.safetensors")
        rows = rows @ tensors["linear.weight"].numpy().T
        if layer.activation == "activation.Tanh":
            rows = np.tanh(rows + tensors["linear.bias"].numpy())
    return rows


def save_sentence_transformer(directory: Path, mode: str, *, normalize: bool, dense: Sequence[Dense] = ()) -> None:
    """Writes the files of sentence-transformers next to a model. mode: end of a pooling_mode_... field."""
    prefix = "sentence_transformers.models"
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{prefix}.Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{prefix}.Pooling"})
    for number, layer in enumerate(dense, 2):
        place = f"{number}_Dense"
        modules.append({"idx": number, "name": f"{number}", "path": place, "type": f"{prefix}.Dense"})
        layer.save(directory / place)
    if normalize:
        number = len(modules)
        modules.append(
            {"idx": number, "name": f"{number}", "path": f"{number}_Normalize", "type": f"{prefix}.Normalize"}
        )
    (directory / "modules.json").write_text(json.dumps(modules))
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pooling = {f"pooling_mode_{name}": name == mode for name in modes}
    (directory / "1_Pooling").mkdir(exist_ok=True)
    content = {"word_embedding_dimension": 36, **pooling, "include_prompt": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(content))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))


def save_word_tokenizer(directory: Path, vocab_size: int, *, end: bool = True) -> None:
    """Saves a tokenizer with one token per word, t0 to t60, and </s> after every text if `end` (Qwen3-Embedding)."""
    vocabulary = {"</s>": 1, "t0": 0, **{f"t{number}": number for number in range(2, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    if end:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))


def save_pooled_adapter(
    base: Any, directory: Path, seed: int, task_type: str | None, kept_for: Path | None = None, **lora: Any
) -> Path:
    """Saves a PEFT adapter for `base` with random A, B, magnitudes and modules_to_save.

    kept_for: directory of `base`, if load_bare() loaded it and the model with the adapter is a reference later.
    """
    generator = torch.Generator().manual_seed(seed)
    lora = {"target_modules": "all-linear", "lora_alpha": 2 * lora.get("r", 8), **lora}
    model = peft.get_peft_model(base, peft.LoraConfig(task_type=task_type, **lora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_A" in name:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            elif "lora_B" in name:
                parameter.copy_(0.2 * noise / parameter.shape[1] ** 0.5)
            elif "lora_magnitude_vector" in name:
                parameter.mul_(1.0 + 0.2 * noise)
            elif name.endswith(".bias") and parameter.requires_grad and "modules_to_save" not in name:
                parameter.copy_(0.2 * noise)
            elif "modules_to_save" in name:
                parameter.copy_(noise / max(1.0, parameter.shape[-1] ** 0.5))
    if kept_for is not None:
        return save_adapted(model, kept_for, directory)
    model.save_pretrained(directory)
    return directory


def hidden_states(model: Any, prompt: list[int]) -> np.ndarray:
    """Returns float32 [tokens, hidden_size] after the final norm."""
    with torch.no_grad():
        output = model(torch.tensor([prompt]), output_hidden_states=True)
    states = output.last_hidden_state if "last_hidden_state" in output else output.hidden_states[-1]
    return states[0].float().numpy()


def load_bare(directory: Path, adapter: Path | None = None) -> Any:
    """Loads the model without a head, with an adapter that was trained without a head or for a causal model."""
    causal = (
        adapter is not None and json.loads((adapter / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    )
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    model = load(kind, directory, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        model = load_adapter(model, adapter)
    return model.eval()


def pooled(states: np.ndarray, pooling_type: PoolingType, *, normalize: bool = False) -> np.ndarray:
    """Pools hidden states as sentence-transformers does."""
    rows = {
        PoolingType.LAST: lambda: states[-1],
        PoolingType.CLS: lambda: states[0],
        PoolingType.MEAN: lambda: states.mean(axis=0, dtype=np.float64),
        PoolingType.ALL: lambda: states,
    }[pooling_type]()
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True) if normalize else rows


def run_pooled(
    executor: adaptrt.Executor,
    prompt: list[int],
    params: adaptrt.PoolingParams,
    adapter: str | None = None,
    **fields: Any,
) -> np.ndarray:
    """Runs one request and returns its rows."""
    request_id = executor.enqueue_request(adaptrt.Request(prompt, 0, pooling_params=params, **fields), adapter=adapter)
    return rows_of(executor, request_id)


def rows_of(executor: adaptrt.Executor, request_id: int) -> np.ndarray:
    """Waits for a request and returns its rows."""
    (response,) = executor.await_responses(request_id, 60.0)
    assert not response.has_error(), response.error_msg
    assert response.result.is_final
    assert response.result.finish_reasons == [adaptrt.FinishReason.LENGTH]
    return np.asarray(response.result.pooled_output)
