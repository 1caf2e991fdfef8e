"""Builds one plan with TensorRT, in a child process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import onnx
import xxhash

from ....common.process_memory import peak_memory
from ....common.safetensors_stream import SafetensorsReader
from ....formats.engine.tensorrt.capability import tensorrt_name
from ....formats.engine.tensorrt.plan_config import INPUT, OUTPUT
from ....plugins.tensorrt import register_plugins
from ....plugins.tensorrt.element_types import numpy_name
from .log import Log, Phases, Send, make_logger, make_progress_monitor
from .messages import Built, NetworkTensor, PlanRequest
from .network import operators, stored_weights
from .refusal import PlanRefusedError, Refusal
from .timing_cache import read_timing_cache, write_timing_cache


def build_plan(trt: Any, request: PlanRequest, send: Send) -> Built:
    """Builds and writes a plan. `trt` is the TensorRT module. Raises PlanRefusedError."""
    base_bytes = peak_memory()
    model = onnx.load_model(request.network, load_external_data=False)
    weights = None if request.weights is None else SafetensorsReader(Path(request.weights))
    log = Log(send)
    # TensorRT reads each weight once, when it builds the weight's layer.
    phases = Phases(send, weights.release if weights is not None else lambda: None)
    builder = trt.Builder(make_logger(trt, log))
    refusal = Refusal(log, register_plugins(trt, builder.get_plugin_registry()), operators(model))
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, builder.logger)
    # The parser and the arrays of the weights must outlive the build.
    arrays = _parse(parser, model, weights, refusal)
    config = builder.create_builder_config()
    config.progress_monitor = make_progress_monitor(trt, phases)
    if not configure(trt, config, request.compute_capability, streams_weights=request.streams_weights):
        raise refusal.error(f"TensorRT does not accept compute capability {request.compute_capability}")
    _add_profiles(builder, config, request, refusal)
    cache = None
    if request.timing_cache is not None:
        cache = read_timing_cache(config, Path(request.timing_cache), refusal)
    tensors = tuple(_tensors(network))
    num_bytes, checksum = _write_plan(trt, builder, network, config, Path(request.plan), refusal)
    if cache is not None and request.timing_cache is not None:
        write_timing_cache(cache, Path(request.timing_cache))
    del arrays
    return Built(
        num_bytes=num_bytes,
        checksum=checksum,
        tensors=tensors,
        layers=log.layers,
        base_bytes=base_bytes,
        peak_bytes=peak_memory(),
    )


def configure(trt: Any, config: Any, compute_capability: str | None, *, streams_weights: bool) -> bool:
    """Sets the options that all plans share, and the target GPU. Returns False if TensorRT does not accept that GPU."""
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if streams_weights:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    elif hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        # Memory that TensorRT for RTX allocated during a run would prevent CUDA graph capture.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if compute_capability is None:
        return True
    config.num_compute_capabilities = 1
    return bool(config.set_compute_capability(getattr(trt.ComputeCapability, tensorrt_name(compute_capability)), 0))


def _parse(parser: Any, model: onnx.ModelProto, weights: SafetensorsReader | None, refusal: Refusal) -> list[Any]:
    """Parses the graph into TensorRT's network. Returns the weights' arrays, which the network refers to."""
    if not parser.load_model_proto(model.SerializeToString()):
        raise refusal.parser_error(parser)
    arrays = []
    for tensor in stored_weights(model):
        assert weights is not None
        array = weights.array(tensor.name)
        if not parser.load_initializer(tensor.name, array.ctypes.data, array.nbytes):
            raise refusal.error(f"TensorRT does not accept weight {tensor.name}")
        arrays.append(array)
    if not parser.parse_model_proto():
        raise refusal.parser_error(parser)
    return arrays


def _add_profiles(builder: Any, config: Any, request: PlanRequest, refusal: Refusal) -> None:
    for number, shapes in enumerate(request.profiles):
        profile = builder.create_optimization_profile()
        for name, (smallest, usual, largest) in shapes.items():
            profile.set_shape(name, smallest, usual, largest)
        if config.add_optimization_profile(profile) != number:
            raise refusal.error(f"TensorRT does not accept optimization profile {number}")


def _tensors(network: Any) -> list[NetworkTensor]:
    found = [(network.get_input(index), INPUT) for index in range(network.num_inputs)]
    found += [(network.get_output(index), OUTPUT) for index in range(network.num_outputs)]
    return [
        NetworkTensor(name=tensor.name, dtype=numpy_name(tensor.dtype), shape=tuple(tensor.shape), mode=mode)
        for tensor, mode in found
    ]


def _write_plan(trt: Any, builder: Any, network: Any, config: Any, path: Path, refusal: Refusal) -> tuple[int, str]:
    """Builds the plan and writes it while it is serialised. Returns its size and checksum."""
    try:
        with path.open("wb") as file:
            writer = _make_writer(trt, file)
            built = builder.build_serialized_network_to_stream(network, config, writer)
            if writer.failure is not None:
                raise writer.failure
    except OSError as reason:
        raise PlanRefusedError([f"the plan cannot be written: {reason.strerror}"]) from None
    if not built:
        raise refusal.error("TensorRT cannot build a plan of the network")
    return path.stat().st_size, writer.digest.hexdigest()


def _make_writer(trt: Any, file: BinaryIO) -> Any:
    """A trt.IStreamWriter that also keeps a digest of the written bytes and the error that stopped it."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.digest = xxhash.xxh3_128()
            self.failure: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                file.write(data)
            except OSError as reason:
                self.failure = reason
                return 0
            self.digest.update(data)
            return len(data)

    return Writer()
