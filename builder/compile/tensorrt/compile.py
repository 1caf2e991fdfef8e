"""Compiles a network with TensorRT: one plan for each compute capability, several in parallel."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx

from ....common.progress import Advance, Progress
from ....common.safetensors_stream import SafetensorsReader, SafetensorsWriter
from ....formats.engine.tensorrt.package import Package
from ....formats.engine.tensorrt.plan_config import PlanFile, Shapes, StoredFile, TensorRow, TensorRtPlans
from ....plugins.definition import VERSION
from .compiled_plans import WEIGHTS_FILE, CompiledPlans, plan_file
from .messages import Built, PlanRequest
from .network import aliases, stored_weights, with_weights_as_inputs
from .process import Children, run_build
from .profiles import Profile

# Alignment of tensors, equal to that of CUDA's own allocations.
_WEIGHTS_ALIGNMENT: Final = 256


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options for building plans."""

    compute_capabilities: tuple[str, ...]
    """Names of the target compute capabilities."""
    profiles: tuple[Profile, ...]
    external_weights: bool
    """True: the weights are inputs of the network, in a file next to the plans. False: they are constants in each plan.
    """
    streams_weights: bool
    """See PlanRequest."""
    timing_cache: Path | None
    workers: int
    """Number of plans that are built at a time."""


def compile_plans(
    model: onnx.ModelProto,
    reader: SafetensorsReader,
    package: Package,
    options: PlanOptions,
    directory: Path,
    progress: Progress,
) -> CompiledPlans:
    """Writes the plans, and the weights file if there is one, into a directory.

    Raises EngineError that names the node that TensorRT rejects, or says how the child process ended. The other plans'
    builds are cancelled.
    """
    names = [tensor.name for tensor in stored_weights(model)]
    weights = None
    if options.external_weights:
        with progress.task("Writing weights", sum(reader.specs[name].num_bytes for name in names)) as advance:
            weights = _write_weights(reader, names, directory / WEIGHTS_FILE, advance)
        model = with_weights_as_inputs(model)
    with tempfile.TemporaryDirectory(prefix="adaptrt-") as scratch:
        network = Path(scratch) / "network.onnx"
        network.write_bytes(model.SerializeToString())
        requests = [
            PlanRequest(
                package=package.name,
                network=str(network),
                weights=None if options.external_weights else str(reader.path.absolute()),
                compute_capability=capability if package.compute_capabilities else None,
                profiles=tuple(_dynamic_shapes(model, profile) for profile in options.profiles),
                timing_cache=None if options.timing_cache is None else str(options.timing_cache.absolute()),
                streams_weights=options.streams_weights,
                plan=str((directory / plan_file(capability)).absolute()),
            )
            for capability in options.compute_capabilities
        ]
        built = _build_all(package, requests, options, progress)
    files = tuple(
        PlanFile(capability, StoredFile(plan_file(capability), plan.num_bytes, plan.checksum))
        for capability, plan in zip(options.compute_capabilities, built, strict=True)
    )
    plans = TensorRtPlans(
        package=package.name,
        package_version=package.version,
        plugin_version=VERSION,
        files=files,
        weights=weights,
        profiles=tuple(profile.name for profile in options.profiles),
        tensors=_tensor_table(model, built[0], options.profiles),
    )
    return CompiledPlans(plans, len(model.graph.node), tuple(built))


def _write_weights(reader: SafetensorsReader, names: Sequence[str], path: Path, advance: Advance) -> StoredFile:
    with SafetensorsWriter(path, [reader.specs[name] for name in names], alignment=_WEIGHTS_ALIGNMENT) as writer:
        for name in names:
            for piece in reader.rows(name):
                writer.write(name, piece)
                advance(piece.nbytes)
    return StoredFile.of(path)


def _dynamic_shapes(model: onnx.ModelProto, profile: Profile) -> dict[str, Shapes]:
    shapes = {tensor.name: profile.shapes(tensor) for tensor in model.graph.input}
    return {name: found for name, found in shapes.items() if found is not None}


def _build_all(
    package: Package, requests: Sequence[PlanRequest], options: PlanOptions, progress: Progress
) -> list[Built]:
    """Builds `workers` plans at a time. The first failure, or an interrupt, cancels the others."""
    children = Children()
    titles = [f"Compiling for {capability}" for capability in options.compute_capabilities]
    with progress.phases(titles) as reports, ThreadPoolExecutor(options.workers) as pool:
        futures: list[Future[Built]] = []
        try:
            for request, report in zip(requests, reports, strict=True):
                futures.append(pool.submit(run_build, package, request, report, children))
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:  # In order, so that the same mistake always gives the same message.
                if future in done:
                    future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            children.end()
            raise
        return [future.result() for future in futures]


def _tensor_table(model: onnx.ModelProto, built: Built, profiles: Sequence[Profile]) -> tuple[TensorRow, ...]:
    """The network's inputs and outputs as TensorRT describes them, with the properties that TensorRT does not know."""
    inputs = {tensor.name: tensor for tensor in model.graph.input}
    aliased = aliases(model)
    rows = []
    for tensor in built.tensors:
        shapes = [profile.shapes(inputs[tensor.name]) for profile in profiles] if tensor.name in inputs else []
        rows.append(
            TensorRow(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                mode=tensor.mode,
                alias=aliased.get(tensor.name),
                profiles=tuple(found for found in shapes if found is not None),
            )
        )
    return tuple(rows)
