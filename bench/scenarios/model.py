"""The benchmark's model and adapters, created from a seed without downloads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from adaptrt._core import LoraLayout, lora_modules
from adaptrt.common.safetensors_stream import SafetensorsWriter, TensorSpec

SEED = 20
IDS: Final = {info.name: info.id for info in lora_modules()}
"""Module ids by name."""


@dataclass(frozen=True)
class BenchModel:
    """A Llama shape. The default has 491 million parameters and an untied lm_head."""

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 4096
    max_position_embeddings: int = 16384
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    hidden_act_param: float = 0.0
    """Threshold of fatrelu, ProSparse's activation: gates below it are closed. Other activations ignore it. Gates are
    about normally distributed, so 1.2816 leaves a tenth of them open."""
    gate_spread: float = 0.0
    """Standard deviation of the logarithm of the gates' sizes. Above 0, some neurons are open much more often than
    others."""

    def problems(self) -> list[str]:
        """Returns the problems of the sizes."""
        found = []
        if self.num_attention_heads % self.num_key_value_heads != 0:
            found.append(
                f"has {self.num_attention_heads} heads for {self.num_key_value_heads} key-value heads; "
                "expected a multiple"
            )
        if self.head_dim % 2 != 0:
            found.append(f"has head_dim {self.head_dim}; expected an even number")
        return found

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], float | npt.NDArray[np.float32]]]:
        """Yields (name, shape, standard deviation) of every tensor of the Hugging Face checkpoint; 0: values around 1.

        The deviation may be a column, [rows, 1].
        """
        queries, key_values = (
            self.num_attention_heads * self.head_dim,
            self.num_key_value_heads * self.head_dim,
        )
        hidden, inner = self.hidden_size, self.intermediate_size
        yield "model.embed_tokens.weight", (self.vocab_size, hidden), 0.05
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            for name, rows, columns in (
                ("self_attn.q_proj", queries, hidden),
                ("self_attn.k_proj", key_values, hidden),
                ("self_attn.v_proj", key_values, hidden),
                ("self_attn.o_proj", hidden, queries),
                ("mlp.gate_proj", inner, hidden),
                ("mlp.up_proj", inner, hidden),
                ("mlp.down_proj", hidden, inner),
            ):
                yield f"{prefix}.{name}.weight", (rows, columns), self._deviation(layer, name, rows, columns)
            yield f"{prefix}.input_layernorm.weight", (hidden,), 0.0
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,), 0.0
        yield "model.norm.weight", (hidden,), 0.0
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden), 0.05

    def _deviation(self, layer: int, name: str, rows: int, columns: int) -> float | npt.NDArray[np.float32]:
        deviation: float = columns**-0.5
        if name != "mlp.gate_proj" or self.gate_spread == 0:
            return deviation
        sizes = np.random.default_rng((SEED, layer)).standard_normal((rows, 1), np.float32)
        return np.exp(np.float32(self.gate_spread) * sizes) * np.float32(deviation)


def write_model(model: BenchModel, directory: Path) -> None:
    """Writes a Hugging Face Llama directory with random bfloat16 weights."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **{name: value for name, value in model.__dict__.items() if name not in ("hidden_act_param", "gate_spread")},
        **({"hidden_act_param": model.hidden_act_param} if model.hidden_act == "fatrelu" else {}),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generator = np.random.default_rng(SEED)
    specs = [TensorSpec(name, np.dtype(ml_dtypes.bfloat16), shape) for name, shape, _ in model.tensors()]
    with SafetensorsWriter(directory / "model.safetensors", specs) as writer:
        for name, shape, deviation in model.tensors():
            noise = generator.standard_normal(shape, dtype=np.float32)
            values = noise * np.float32(deviation) if np.any(deviation) else 1 + np.float32(0.1) * noise
            writer.write(name, values.astype(ml_dtypes.bfloat16))


def random_adapter(
    layout: LoraLayout,
    rank: int,
    seed: int,
    *,
    vectors: int,
    dtype: npt.DTypeLike,
    modules: Sequence[int],
    lm_head_slices: int = 0,
    rotary_factor: int = 1,
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int32]]:
    """Returns (weights [rows, width] of `dtype`, config [rows, 4]) of an adapter on these modules of every layer.

    vectors: bits of the vectors besides A and B. lm_head_slices: number of rows of lm_head. rotary_factor: positions
    are divided by it.

    Values are about as large as trained ones: A as initialised for training, and B a twentieth of the size at which the
    adapter would double the base model's output.
    """
    generator = np.random.default_rng((SEED, seed))
    places = [(layer, module) for layer in range(layout.num_layers) for module in modules]
    places += [(piece, IDS["lm_head"]) for piece in range(lm_head_slices)]
    sizes = {place: found for place in places if (found := layout.sizes_of(*place)) is not None}
    num_vectors = vectors.bit_count()
    width = max(
        found.experts * (rank * (found.in_size + found.out_size) + num_vectors * found.out_size)
        for found in sizes.values()
    )
    weights = np.zeros((len(sizes) + (rotary_factor > 1), width), dtype)
    shared_a = None
    for row, ((_, module), found) in enumerate(sizes.items()):
        fan_in, out, experts = found.in_size, found.out_size, found.experts
        a = generator.standard_normal(experts * rank * fan_in, dtype=np.float32) * fan_in**-0.5
        if module == IDS["lm_head"]:
            shared_a = a = a if shared_a is None else shared_a  # All rows of lm_head have the same A.
        b = generator.standard_normal(experts * rank * out, dtype=np.float32) * (0.05 * rank**-0.5)
        others = 1.0 + 0.05 * generator.standard_normal(experts * out * num_vectors, dtype=np.float32)
        values = np.concatenate([a, b, others])
        weights[row, : values.size] = values
    table = [(module_id, layer, rank, vectors) for layer, module_id in sizes]
    if rotary_factor > 1:
        table.append((IDS["rotary_scaling"], 0, rotary_factor, 0))
    return weights, np.array(table, np.int32)
