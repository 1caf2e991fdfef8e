"""Makes the ONNX graph of a checkpoint, for a file of it and for TensorRT's plans. Only this needs the package onnx."""

from __future__ import annotations

from pathlib import Path

from ...common.progress import Progress
from ...formats.engine.build_config import EXTERNAL, BuildConfig
from ...formats.network.network import Network
from ..compile.tensorrt.compile import PlanOptions, compile_plans
from ..compile.tensorrt.compiled_plans import CompiledPlans
from ..compile.tensorrt.profiles import make_profiles
from ..conversion.checkpoint import Checkpoint
from ..network.onnx_file import dump_onnx, external_bytes
from ..network.onnx_graph import network_options, onnx_graph
from ..network.stored_tensors import stored_tensors
from .options import CompilerOptions


def compile_graph(
    checkpoint: Checkpoint, config: BuildConfig, options: CompilerOptions, directory: Path, progress: Progress
) -> CompiledPlans | None:
    """Writes the ONNX graph if requested, and builds TensorRT's plans from it; None: no plans were requested.

    The graph refers to the bytes of weights in a file.
    """
    with checkpoint.as_file(directory.parent, progress) as reader:
        weights = stored_tensors(reader, checkpoint.config.quantization)
        graph = onnx_graph(checkpoint.network, weights, network_options(config))
        if options.dump_onnx_to is not None:
            with progress.task("Writing ONNX", external_bytes(graph)) as advance:
                dump_onnx(graph, reader.path.parent, options.dump_onnx_to, advance)
        if options.package is None:
            return None
        plan_options = _plan_options(config, checkpoint.network, options)
        return compile_plans(graph, reader, options.package, plan_options, directory, progress)


def _plan_options(config: BuildConfig, network: Network, options: CompilerOptions) -> PlanOptions:
    assert config.tensorrt_config is not None
    return PlanOptions(
        compute_capabilities=config.tensorrt_config.compute_capability,
        profiles=make_profiles(config, network),
        external_weights=config.tensorrt_config.weights == EXTERNAL,
        streams_weights=config.weight_memory is not None,
        timing_cache=options.timing_cache,
        workers=options.workers,
    )
