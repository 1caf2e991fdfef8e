"""TensorRT engine directories with replaced plans, and their answers compared with a native engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx

import adaptrt
from adaptrt import _core
from adaptrt.builder.compile.tensorrt.messages import Built, NetworkTensor, PlanRequest
from adaptrt.builder.compile.tensorrt.network import with_weights_as_inputs
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.engine.tensorrt.package import TENSORRT_RTX, Package
from adaptrt.formats.engine.tensorrt.plan_config import INPUT, OUTPUT, StoredFile
from adaptrt.runtime.engine import load_engine
from adaptrt.runtime.tensorrt.engine import TensorRtEngine
from adaptrt.runtime.tensorrt.program import PROFILES, make_program
from support.engines import make_graph
from support.serving import Answer
from support.stand_in_plan import DTYPES, Profile, StandInContext

MakeContext = Callable[[onnx.ModelProto, Profile, Any], StandInContext]


@dataclasses.dataclass(frozen=True)
class StandInEngine(TensorRtEngine):
    """A loaded engine directory whose plan is the network of `checkpoint`, on `device`."""

    checkpoint: Path = Path()
    device: Any = None
    make_context: MakeContext | None = None
    contexts: list[StandInContext] = dataclasses.field(default_factory=list)
    """One context per profile since the last start()."""

    def start(self, config: adaptrt.ExecutorConfig) -> _core.TensorRtEngine:
        assert self.make_context is not None
        build_config = self.config.build_config
        options = NetworkOptions(
            tokens_per_block=build_config.tokens_per_block,
            max_lora_rank=build_config.lora_config.max_lora_rank,
            dora=build_config.dora_enabled,
        )
        network = with_weights_as_inputs(make_graph(Checkpoint.open(self.checkpoint), options))
        self.contexts.clear()
        for number in range(len(PROFILES)):
            profile = {tensor.name: tensor.profiles[number] for tensor in self.plans.tensors if tensor.profiles}
            self.contexts.append(self.make_context(network, profile, self.device))
        return _core.TensorRtEngine(make_program(self), self.device, *self.contexts)


def stand_in_engine(directory: Path, checkpoint: Path, device: Any, make_context: MakeContext) -> StandInEngine:
    """Loads the engine in `directory`, which was built from `checkpoint`."""
    loaded = load_engine(directory)
    assert isinstance(loaded, TensorRtEngine)
    fields = {field.name: getattr(loaded, field.name) for field in dataclasses.fields(TensorRtEngine)}
    return StandInEngine(**fields, checkpoint=checkpoint, device=device, make_context=make_context)


@contextmanager
def stand_in_compiler(capability: str) -> Iterator[None]:
    """Within a with statement, builds for TensorRT need no TensorRT and write plans that nothing runs."""
    package = Package(TENSORRT_RTX, "0", compute_capabilities=(capability,))
    with (
        mock.patch("adaptrt.builder.build.describe_package", return_value=package),
        mock.patch("adaptrt.builder.compile.tensorrt.compile.run_build", _write_no_plan),
    ):
        yield


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the maximum difference relative to the range of the expected values."""
    return float(np.abs(actual - expected).max() / (expected.max() - expected.min()))


def check_answer(actual: Answer, expected: Answer, tolerance: float) -> int:
    """Checks that logits agree, and tokens up to a choice within the tolerance. Returns the number of tokens."""
    found = difference(actual.context_logits, expected.context_logits)
    assert found <= tolerance, f"logits of the prompt differ by {found}"
    for position, (logits, reference) in enumerate(
        zip(actual.generation_logits, expected.generation_logits, strict=True)
    ):
        found = difference(logits, reference)
        assert found <= tolerance, f"logits of generated token {position} differ by {found}"
        if actual.tokens[position] != expected.tokens[position]:
            second, first = np.sort(reference)[-2:]
            gap = first - second
            assert gap <= 2 * tolerance * (reference.max() - reference.min()), f"token {position} is another by {gap}"
            return position
    return len(expected.tokens)


def _write_no_plan(package: Package, request: PlanRequest, *_: object) -> Built:
    model = onnx.load_model(request.network, load_external_data=False)
    path = Path(request.plan)
    path.write_bytes(b"a stand-in")
    values = [(value, INPUT) for value in model.graph.input] + [(value, OUTPUT) for value in model.graph.output]
    tensors = tuple(
        NetworkTensor(
            name=value.name,
            dtype=DTYPES[value.type.tensor_type.elem_type].name,
            shape=tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim),
            mode=mode,
        )
        for value, mode in values
    )
    stored = StoredFile.of(path)
    return Built(
        num_bytes=stored.num_bytes, checksum=stored.checksum, tensors=tensors, layers="", base_bytes=0, peak_bytes=0
    )
