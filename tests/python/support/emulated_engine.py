"""TensorRT engine directories whose plans and kernels are emulated, and their answers beside a native engine's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import adaptrt_cuda_emulated
import numpy as np

import adaptrt
from adaptrt import _core
from adaptrt.builder.compile.tensorrt.network import with_weights_as_inputs
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.runtime.engine import load_engine
from adaptrt.runtime.tensorrt.engine import TensorRtEngine
from adaptrt.runtime.tensorrt.program import PROFILES, make_program
from support.emulated_plan import EmulatedContext
from support.engines import make_graph
from support.serving import Answer


@dataclasses.dataclass(frozen=True)
class EmulatedEngine(TensorRtEngine):
    """A loaded engine directory whose plan is emulated on `device`."""

    device: adaptrt_cuda_emulated.CudaDevice = dataclasses.field(default_factory=adaptrt_cuda_emulated.CudaDevice)
    contexts: list[EmulatedContext] = dataclasses.field(default_factory=list)
    checkpoint: Path = Path()

    def start(self, config: adaptrt.ExecutorConfig) -> _core.TensorRtEngine:
        build_config = self.config.build_config
        opened = Checkpoint.open(self.checkpoint)
        options = NetworkOptions(
            tokens_per_block=build_config.tokens_per_block,
            max_lora_rank=build_config.lora_config.max_lora_rank,
            dora=build_config.dora_enabled,
        )
        network = with_weights_as_inputs(make_graph(opened, options))
        for number in range(len(PROFILES)):
            profile = {tensor.name: tensor.profiles[number] for tensor in self.plans.tensors if tensor.profiles}
            self.contexts.append(EmulatedContext(network, profile, self.device))
        return _core.TensorRtEngine(make_program(self), self.device, *self.contexts)


def emulated_engine(directory: Path, checkpoint: Path) -> EmulatedEngine:
    """The engine in `directory`, which was built from `checkpoint`."""
    loaded = load_engine(directory)
    assert isinstance(loaded, TensorRtEngine)
    fields = {field.name: getattr(loaded, field.name) for field in dataclasses.fields(TensorRtEngine)}
    return EmulatedEngine(**fields, checkpoint=checkpoint)


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest, in units of the range of what is expected."""
    return float(np.abs(actual - expected).max() / (expected.max() - expected.min()))


def check_answer(actual: Answer, expected: Answer, tolerance: float) -> int:
    """Logits agree, and tokens do up to a choice that the tolerance leaves open; returns the tokens compared."""
    assert difference(actual.context_logits, expected.context_logits) <= tolerance
    for position, (logits, reference) in enumerate(
        zip(actual.generation_logits, expected.generation_logits, strict=True)
    ):
        assert difference(logits, reference) <= tolerance
        if actual.tokens[position] != expected.tokens[position]:
            second, first = np.sort(reference)[-2:]
            assert first - second <= 2 * tolerance * (reference.max() - reference.min())
            return position
    return len(expected.tokens)
