"""A 0.5B Llama with a ReLU for its gates that closes nine in ten, and predictors that know which.

Weights are random, of the benchmark's shape (scenarios/model.py). What makes gates close is a channel of the residual
stream that is the same for every token: embeddings have it, no layer writes to it, and the gates' weights for it are
those that close 90% of the others' sums, layer by layer. The rest of a layer's gates has rank 63, so that a predictor
of rank 128 can compute it: of either sign a half of fc1, and one row of fc1 reads the constant channel. Its weights for
that expect 12% of the gates to be open, which so have all that are. A predictor sees the stream before its norm and a
gate behind it, which changes no sign.

All engines hence compute one function, whether they read everything, what gates leave open, or what predictors expect.
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
"""What every token has in channel 0; the other channels of embeddings have a deviation of 1."""
_BRANCH: Final = 0.2
"""What a layer adds to the stream, beside embeddings, so that all layers see streams of about one size."""
_TEXT: Final = 512


@dataclass(frozen=True)
class Shares:
    """Of the neurons of all layers, in a text of random tokens."""

    open: float
    expected: float
    open_unexpected: float


def write_relu_model(shape: BenchModel, model_dir: Path, predictor_dir: Path) -> Shares:
    """Writes a Hugging Face directory in bfloat16, and PowerInfer's files of predictors beside it."""
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
    """Of a layer whose gates it draws; both are calibrated by the first text that comes through the layer."""

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
        """As PowerInfer's files have them, to be read by the stream before the norm."""
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
    """All but the gates."""
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
    """What the weights that were written do to another text."""
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
    """Where older readers look for it."""
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}, indent=2) + "\n")
