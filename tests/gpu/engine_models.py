"""Models without files for the engine's timings: shapes of published models, random weights, random adapters."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from machine import Machine

from adaptrt import LoraConfig, _core
from adaptrt.builder.compile.native import compile_network
from adaptrt.builder.engine.carried_adapters import with_adapters
from adaptrt.formats.engine.bind import bind_program
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.formats.hugging_face.hf_config import HfConfig
from adaptrt.formats.network.adapter_sites import AdaptedModules

Array = np.ndarray[Any, np.dtype[Any]]

BACKEND = "cuda"
"""Backend whose programs the engine runs."""
# Standard deviation of weights. Norms follow every layer, so activations stay finite.
_DEVIATION = 0.02
_MODULES = ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate")
_IDS = {info.name: info.id for info in _core.lora_modules()}


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each product of a layer: qkv, o, gate and up, down."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return (hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden)

    @property
    def adapted(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each linear layer that adapters change, in one layer."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        qkv = ((hidden, queries), (hidden, keys), (hidden, keys))
        return (*qkv, (queries, hidden), (hidden, inner), (hidden, inner), (inner, hidden))

    @property
    def key_value_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return 2 * 2 * self.num_key_value_heads * self.head_dim

    @property
    def product_bytes(self) -> int:
        """Bytes of the weights that a step reads, logits included."""
        of_layer = sum(inputs * outputs for inputs, outputs in self.linears)
        return 2 * (self.num_hidden_layers * of_layer + self.hidden_size * self.vocab_size)

    def adapter_bytes(self, rank: int) -> int:
        """Bytes of an adapter of all seven linear layers."""
        return 2 * rank * self.num_hidden_layers * sum(inputs + outputs for inputs, outputs in self.adapted)

    def config(self) -> dict[str, Any]:
        """Returns the fields of its config.json."""
        sizes = {name: value for name, value in vars(self).items() if name != "name"}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **sizes,
        }


LLAMA_8B = Shape("8B", 32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_1B = Shape("1B", 16, 2048, 8192, 32, 8, 64, 128256, tie_word_embeddings=True)
TINY = Shape("tiny", 2, 64, 80, 2, 1, 64, 104)
TINY_TIED = Shape("tiny tied", 1, 64, 80, 2, 2, 64, 104, tie_word_embeddings=True)


class Weights:
    """Random weights of a shape on the host, which its programs share. The device keeps its own random generator."""

    def __init__(self, machine: Machine, shape: Shape) -> None:
        self._machine = machine
        self._generator = torch.Generator(machine.device)
        self._arrays: dict[tuple[str, int], Array] = {}
        self.shape = shape
        with tempfile.TemporaryDirectory(prefix="adaptrt-") as name:
            (Path(name) / "config.json").write_text(json.dumps(shape.config()))
            self._network = HfConfig.read(Path(name)).network
        self.modules = AdaptedModules(self._network)

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """Yields the weights of norms: ones. Matrices are not read with this function, but made at their final size."""
        yield np.ones(len(rows), ml_dtypes.bfloat16)

    def program(self, *, max_rank: int = 0, **sizes: Any) -> _core.Program:
        """Compiles the model. The program's matrices are arrays that all programs of these weights share.

        max_rank: of adapters; 0: without LoRA. sizes: fields of BuildConfig.
        """
        config = BuildConfig(backend=BACKEND, **sizes)
        if max_rank:
            config = replace(
                config,
                plugin_config=PluginConfig(lora_plugin="auto"),
                lora_config=LoraBuildConfig(max_lora_rank=max_rank, lora_target_modules=_MODULES),
            )
        config = with_adapters(config.with_defaults(self._network.config), self._network)
        compiled = compile_network(self._network, self, config)  # type: ignore[arg-type]
        tensors: dict[str, Array] = {}
        for tensor in compiled.tensors:
            if tensor.dtype == np.float32:
                tensors[tensor.name] = np.concatenate([piece.reshape(-1) for piece in tensor.pieces()])
            else:
                tensors[tensor.name] = self._matrix(tensor.name, tensor.size)
        return bind_program(compiled.program, tensors, self.shape.name)

    def _matrix(self, name: str, size: int) -> Array:
        if (name, size) not in self._arrays:
            self._arrays[name, size] = random_values(self._machine, self._generator, (size,), _DEVIATION)
        return self._arrays[name, size]


def start_engine(
    machine: Machine,
    program: _core.Program,
    *,
    cuda_graphs: bool = True,
    look_ahead: bool = True,
    device: Any = None,
    weight_memory: int = 0,
) -> _core.Engine:
    """Makes the CUDA engine of a program, which copies its weights, on `device` or on a new CudaDevice."""
    device = machine.kernels.CudaDevice() if device is None else device
    engine: _core.Engine = machine.kernels.CudaEngine(
        program, device, cuda_graphs=cuda_graphs, look_ahead=look_ahead, weight_memory=weight_memory
    )
    return engine


def random_values(machine: Machine, generator: torch.Generator, shape: tuple[int, ...], deviation: float) -> Array:
    """Returns normally distributed bfloat16 values on the host."""
    values = torch.empty(shape, dtype=torch.bfloat16, device=machine.device)
    values.normal_(0.0, deviation, generator=generator)
    array: Array = values.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return array


class RandomAdapter:
    """An adapter of all linear layers with random bfloat16 values."""

    def __init__(self, machine: Machine, layout: _core.LoraLayout, rank: int) -> None:
        places = [(layer, _IDS[name]) for layer in range(layout.num_layers) for name in _MODULES]
        sizes = [layout.sizes_of(*place) for place in places]
        used = [rank * (found.in_size + found.out_size) for found in sizes if found is not None]
        assert len(used) == len(places)
        self.weights = random_values(machine, torch.Generator(machine.device), (len(places), max(used)), 0.01)
        for row, size in zip(self.weights, used, strict=True):
            row[size:] = 0
        self.config = np.array([(module, layer, rank, 0) for layer, module in places], np.int32)

    def named(self, task_id: int) -> LoraConfig:
        """Returns the adapter under an id. All of them share the values on the host, and have their own pages on the
        device."""
        return LoraConfig(task_id, self.weights, self.config)
