"""Evaluates a checkpoint's ONNX graph with onnx.reference, the reference for compilers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from adaptrt._core import NUM_TABLE_MODULES, lora_modules
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.network.onnx_file import dump_onnx
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.network.adapter_sites import AdaptedModules
from adaptrt.formats.network.network import Network
from adaptrt.plugins import PLUGINS, reference_ops
from support.engines import make_graph


@dataclasses.dataclass(frozen=True)
class SequenceChunk:
    """The next tokens of one sequence."""

    tokens: list[int]
    first_position: int
    prompt_length: int
    blocks: list[int]
    slot: int = -1
    """Slot of the adapter; -1: none."""
    state_slot: int = 0


def step_inputs(chunks: list[SequenceChunk]) -> dict[str, np.ndarray]:
    """Returns the integer inputs of one step, which asks for logits of every token."""
    offsets = np.cumsum([0, *(len(chunk.tokens) for chunk in chunks)])
    tables = np.full((len(chunks), max(len(chunk.blocks) for chunk in chunks)), -1)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.blocks)] = chunk.blocks
    inputs = {
        "input_ids": [token for chunk in chunks for token in chunk.tokens],
        "positions": [chunk.first_position + i for chunk in chunks for i in range(len(chunk.tokens))],
        "sequence_offsets": offsets,
        "prompt_lengths": [chunk.prompt_length for chunk in chunks],
        "block_tables": tables,
        "adapter_slots": [chunk.slot for chunk in chunks],
        "logit_rows": np.arange(offsets[-1]),
    }
    return {name: np.asarray(value, np.int32) for name, value in inputs.items()}


class AdapterTables:
    """Flattened adapters, and the tables of ranks and pointers that plugin nodes read."""

    def __init__(self, adapters: list[tuple[np.ndarray, np.ndarray]], network: Network) -> None:
        modules = lora_modules()
        adapted = AdaptedModules(network)
        self.ranks = np.zeros((max(1, len(adapters)), adapted.num_layers, NUM_TABLE_MODULES), np.int32)
        self.pointers = np.zeros((*self.ranks.shape, 3), np.int64)
        self._alive = []
        for slot, (weights, config) in enumerate(adapters):
            for row, (module, layer, rank, is_dora) in zip(weights[0], config[0], strict=True):
                found = adapted.sizes_of(layer, modules[module].name)
                assert found is not None
                in_size, out_size = found
                sizes = [rank * in_size, out_size * rank, out_size if is_dora else 0]
                self.ranks[slot, layer, module] = rank
                for column, part in enumerate(np.split(row, np.cumsum(sizes))[:3]):
                    array = np.ascontiguousarray(part, np.float32)
                    self._alive.append(array)
                    self.pointers[slot, layer, module, column] = array.ctypes.data if array.size else 0


class NetworkOracle:
    """Evaluates a float32 checkpoint's graph step by step, with its own KV pools."""

    def __init__(self, checkpoint: Path, scratch: Path, options: NetworkOptions, num_blocks: int = 32) -> None:
        opened = Checkpoint.open(checkpoint)
        self.config = opened.config
        self.model = make_graph(opened, options)
        dump_onnx(self.model, checkpoint, scratch / "network.onnx", lambda num_bytes: None)
        self._evaluator = ReferenceEvaluator(onnx.load(scratch / "network.onnx"), new_ops=reference_ops(PLUGINS))
        self._memory = self._initial_memory(num_blocks)

    def _initial_memory(self, num_rows: int) -> dict[str, np.ndarray]:
        """Returns KV pools of zeros, and states of other numbers: the graph must not read them at position 0."""
        shapes = {
            value.name: [size.dim_value for size in value.type.tensor_type.shape.dim][1:]
            for value in self.model.graph.input
        }
        return {
            name: np.full((num_rows, *shape), 0.0 if name.startswith("kv_pool") else 7.0, np.float32)
            for name, shape in shapes.items()
            if name.startswith(("kv_pool.", "convolution_state.", "recurrent_state."))
        }

    def step(self, chunks: list[SequenceChunk], tables: AdapterTables | None = None) -> np.ndarray:
        """Runs a step and returns float32 [tokens, vocab_size]."""
        inputs = step_inputs(chunks)
        if tables is not None:
            inputs |= {"lora_ranks": tables.ranks, "lora_pointers": tables.pointers}
        inputs |= {"state_slots": np.asarray([chunk.state_slot for chunk in chunks], np.int32), **self._memory}
        wanted = {value.name for value in self.model.graph.input}
        outputs = self._evaluator.run(None, {name: inputs[name] for name in wanted})
        named = dict(zip(self._evaluator.output_names, outputs, strict=True))
        self._memory = {name: named[name.replace(".", "_out.")] for name in self._memory}
        return named["logits"]
