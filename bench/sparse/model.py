"""A 0.5B Llama with ReLU gates of which about 90% are closed, and predictors of the open ones.

Weights are random, with the benchmark's shape (scenarios/model.py). One channel of the residual stream is the same for
every token: embeddings set it, and no layer changes it. The gates' weights for this channel are chosen, layer by layer,
so that 90% of the gates close. The rest of a layer's gate matrix has rank 63, so that a predictor of rank 128 can
compute it: each half of fc1 computes one sign, and one more row of fc1 reads the constant channel. The predictor's
weight for that channel makes it expect 12% of the gates to be open, which includes all that are. A predictor reads the
stream before the norm, a gate after it; the norm changes no sign.

So all engines compute the same function, if they read everything, only the open gates' weights, or those that
predictors expect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import transformers

from scenarios.model import SEED, BenchModel

OPEN, EXPECTED_OPEN = 0.10, 0.12
RANK: Final = 128
_CONSTANT: Final = 4.0
"""Value of channel 0 of every token; the other channels of embeddings have a deviation of 1."""
_BRANCH: Final = 0.2
"""Size of a layer's output relative to the embeddings. It is small, so that the stream has similar sizes in all
layers."""
_TEXT: Final = 512


@dataclass(frozen=True)
class Shares:
    """Shares of the neurons of all layers, for a text of random tokens."""

    open: float
    expected: float
    open_unexpected: float


def write_relu_model(shape: BenchModel, model_dir: Path, predictor_dir: Path) -> Shares:
    """Writes a Hugging Face directory in bfloat16, and predictors in PowerInfer's format."""
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        **vars(shape), hidden_act="relu", rms_norm_eps=1e-5, rope_theta=10000.0, bos_token_id=0, eos_token_id=1
    )
    model = transformers.LlamaForCausalLM(config)
    model.requires_grad_(requires_grad=False)
    _draw(model)
    predictors = [_Predictor(layer) for layer in model.model.layers]
    with torch.no_grad():
        model(torch.randint(100, 20000, (1, _TEXT)))
    model.to(torch.bfloat16).save_pretrained(model_dir)
    _state_rope(model_dir / "config.json")
    predictor_dir.mkdir()
    for number, predictor in enumerate(predictors):
        torch.save(predictor.tensors(), predictor_dir / f"model_{number}.pt")
    return shares_of(model.float(), predictors)


class _Predictor:
    """Draws the gates of a layer and their predictor. Both are calibrated by the first text that passes through the
    layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._norm = layer.post_attention_layernorm.weight
        self.gate = layer.mlp.gate_proj
        rows, inputs = self.gate.weight.shape
        self._directions = torch.randn(RANK // 2 - 1, inputs) / inputs**0.5
        self._directions[:, 0] = 0.0
        self._mixes = torch.randn(rows, RANK // 2 - 1) / (RANK // 2 - 1) ** 0.5
        self._least = 0.0
        self._hook = self.gate.register_forward_pre_hook(self._calibrate)

    def _calibrate(self, _: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        self._hook.remove()
        behind_norm = inputs[0].flatten(0, -2)
        sums = behind_norm @ self._directions.T @ self._mixes.T
        levels = (sums / behind_norm[:, :1]).flatten()
        closing = levels.kthvalue(int(levels.numel() * (1 - OPEN))).values
        self._least = levels.kthvalue(int(levels.numel() * (1 - EXPECTED_OPEN))).values
        self.gate.weight.copy_(self._mixes @ self._directions)
        self.gate.weight[:, 0] = -closing

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors in PowerInfer's format. They read the stream before the norm."""
        constant = torch.zeros(2, self._directions.shape[1])
        constant[0, 0] = self._norm[0]
        read = self._directions * self._norm
        written = torch.zeros(len(self._mixes), 2)
        written[:, 0] = -self._least
        return {
            "fc1.weight": torch.cat([read, -read, constant]).to(torch.bfloat16),
            "fc2.weight": torch.cat([self._mixes, -self._mixes, written], dim=1).to(torch.bfloat16),
        }


def _draw(model: transformers.LlamaForCausalLM) -> None:
    """Draws all weights except the gates."""
    for name, tensor in _matrices(model):
        tensor.normal_(std=tensor.shape[1] ** -0.5)
        tensor[:, 0] = 0.0
        if name in ("o_proj", "down_proj"):
            tensor *= _BRANCH
            tensor[0] = 0.0
    for name, tensor in model.named_parameters():
        if name.endswith("norm.weight"):
            tensor.normal_(mean=1.0, std=0.1)
    embedding = model.model.embed_tokens.weight
    embedding.normal_()
    embedding[:, 0] = _CONSTANT


def _matrices(model: transformers.LlamaForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in block.named_children():
                if isinstance(linear, torch.nn.Linear):
                    yield name, linear.weight
    yield "lm_head", model.lm_head.weight


def shares_of(model: transformers.LlamaForCausalLM, predictors: list[_Predictor]) -> Shares:
    """Measures the shares with the written weights and a different text."""
    counts = torch.zeros(3)
    streams: dict[int, torch.Tensor] = {}

    def count(number: int, gates: torch.Tensor) -> None:
        tensors = {name: tensor.float() for name, tensor in predictors[number].tensors().items()}
        inner = (streams[number] @ tensors["fc1.weight"].T).relu()
        is_expected = inner @ tensors["fc2.weight"].T >= 0
        is_open = gates > 0
        counts.add_(torch.tensor([found.float().mean() for found in (is_open, is_expected, is_open & ~is_expected)]))

    for number, layer in enumerate(model.model.layers):
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, inputs, number=number: streams.__setitem__(number, inputs[0])
        )
        layer.mlp.gate_proj.register_forward_hook(lambda _, __, output, number=number: count(number, output))
    with torch.no_grad():
        model(torch.randint(100, 20000, (1, _TEXT)))
    return Shares(*(counts / len(predictors)).tolist())


def _state_rope(config: Path) -> None:
    """Adds the fields for older readers."""
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}, indent=2) + "\n")
