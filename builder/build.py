"""Builds an engine directory from a checkpoint, or from a Hugging Face model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from .._core import ConfigError, EngineError, QuantAlgo
from ..common.output_directory import replaced_directory
from ..common.progress import Progress, SilentProgress
from ..formats.checkpoint.activation import Activation
from ..formats.checkpoint.config import CheckpointConfig
from ..formats.checkpoint.quantization import QuantConfig
from ..formats.checkpoint.quantizer import QuantizationError
from ..formats.engine.build_config import CUDA, DISABLE, ENABLE, NATIVE, TENSORRT, BuildConfig, LoraBuildConfig
from ..formats.engine.engine_quality import EngineQuality, QualityMeasure
from ..formats.engine.tensorrt.package import Package
from ..formats.engine.weight_usage import UsageMeasure, usage_names
from ..formats.gguf.model_directory import gguf_file_of
from ..formats.network.ops import Experts
from .compile.cuda_support import problems_of_network
from .compile.emit_linear import sparse_pairs
from .compile.native import CompiledNetwork
from .compile.tensorrt.compiled_plans import CompiledPlans
from .compile.tensorrt.process import describe_package
from .compile.tensorrt.refusal import problems_of_network as problems_of_plans
from .compile.tensorrt.targets import resolve_targets, target_problems
from .conversion.checkpoint import Checkpoint
from .conversion.left_out import NOTHING_LEFT_OUT, LeftOut
from .conversion.published.dequantized import Dequantization
from .conversion.published.kept_layers import KeptLayers
from .engine.carried_adapters import with_adapters
from .engine.directory import is_engine_directory, write_engine
from .engine.options import CompilerOptions
from .engine.problems import problems_of
from .engine.vision import Tower, tower_of, with_tower

ENGINE_KIND: Final = "an engine of AdaptRT"
"""Name of the directories that may be replaced, for error messages."""


@dataclass(frozen=True)
class BuildReport:
    """Result of build()."""

    directory: Path
    checkpoint: CheckpointConfig
    """Config of the checkpoint, quantised like the engine."""
    config: BuildConfig
    engine_bytes: int
    """Size of the engine file, or of the plans and their weights."""
    compiled: CompiledNetwork | CompiledPlans
    """Output of the backend's compiler."""
    seconds: float
    quantization_errors: tuple[QuantizationError, ...] = ()
    """Quantisation error of each weight that the build quantised."""
    quality: EngineQuality | None = None
    """Measured quality; None: not measured."""
    left_out: LeftOut = NOTHING_LEFT_OUT
    """Tensors of the model that its language model's network does not have."""
    tower: Tower | None = None
    """The vision tower in the engine's directory; None: the engine only takes text."""
    why_only_text: str | None = None
    """Reason why there is no tower; None: there is one."""
    dequantization: Dequantization | None = None
    """Layers of a model published quantised that were dequantised."""
    kept: KeptLayers | None = None
    """Layers of a model published quantised that keep their quantised weights."""


def build(
    source: str | Path | Checkpoint,
    config: BuildConfig,
    output_dir: str | Path,
    *,
    quantization: QuantConfig | None = None,
    int8_activations: bool = False,
    int8_kv_cache: bool = False,
    quality: QualityMeasure | None = None,
    usage: UsageMeasure | None = None,
    workers: int = 1,
    timing_cache: Path | None = None,
    dump_onnx_to: Path | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Compiles a checkpoint into an engine directory.

    source: a checkpoint directory, or a Hugging Face model opened by Checkpoint.of_model(). The model's tensors are
    split, cast and packed while they are read.
    config: the engine's sizes and options.
    output_dir: must be absent, empty, or an engine that this function wrote. Such an engine is replaced, but only if
    the build succeeds.
    quantization: applied to the weights of a checkpoint that is not quantised. A vision tower becomes W8A16.
    int8_activations: multiplies the integer weights of a quantised checkpoint with activations rounded to int8.
    int8_kv_cache: quantises the KV cache of a checkpoint that does not already ask for it.
    quality: measures the engine, and a reference engine: the unchanged checkpoint with its own KV cache type and every
    gate computed. The reference is written next to `output_dir` and deleted after the build.
    usage: runs the engine; the usage of neurons and experts is stored in the engine directory.
    workers: number of TensorRT plans, or of ranks' files, that are made at a time.
    timing_cache: TensorRT's timing cache; it is read if it exists, and written.
    dump_onnx_to: also writes the network as an ONNX file.

    ONNX files and TensorRT plans need the weights in a file. If the source has none, a temporary one is written next to
    `output_dir`.

    Raises CheckpointError, ConfigError, AdapterError (the engine could not serve an adapter of lora_dir), EngineError,
    and the errors of `quality` and `usage`.
    """
    began = time.monotonic()
    output_dir = Path(output_dir)
    progress = progress or SilentProgress()
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(Path(source))
    if config.backend != NATIVE and gguf_file_of(checkpoint.directory) is not None:
        checkpoint = checkpoint.dequantized()
    found = tower_of(checkpoint, config, is_quantized=quantization is not None)
    tower = None if isinstance(found, str) else found
    if tower is not None:
        checkpoint = with_tower(checkpoint, tower)
    plain = checkpoint.with_int8_kv_cache(False)
    if int8_kv_cache:
        if checkpoint.config.is_encoder_only:
            raise ConfigError(
                f"{checkpoint.directory}: int8_kv_cache: {checkpoint.config.architecture} keeps no keys and values"
            )
        checkpoint = checkpoint.with_int8_kv_cache(True)
    config, package = _checked_config(
        config, checkpoint, quantization, quality, usage, workers, timing_cache, dump_onnx_to is not None
    )
    base_name = output_dir.absolute().name
    if base_name in config.lora_config.adapter_names:
        raise ConfigError(
            f"lora_dir: the name of an adapter is '{base_name}', which servers give to the base model of {output_dir}; "
            "expected another name of the adapter's directory or of the engine's"
        )
    if int8_activations and config.backend != NATIVE:
        raise ConfigError(f"{checkpoint.directory}: int8_activations needs backend {NATIVE}")
    checkpoint = checkpoint.with_quantization(quantization, int8_activations=int8_activations)
    options = CompilerOptions(package=package, workers=workers, timing_cache=timing_cache, dump_onnx_to=dump_onnx_to)
    options.check()
    if dump_onnx_to is not None and not checkpoint.config.has_lm_head:
        raise ConfigError(
            f"{checkpoint.directory}: dump_onnx needs a model with an lm_head, whose logits are the graph's output"
        )
    with (
        replaced_directory(output_dir, is_ours=is_engine_directory, kind=ENGINE_KIND, error=EngineError) as directory,
        ExitStack() as stack,
    ):
        written = write_engine(checkpoint, config, options, directory, progress, tower)
        measured = None
        if quality is not None:
            reference = None
            if checkpoint.config != plain.config or config.sparse_predictors is not None:
                reference = stack.enter_context(_reference_engine(plain, config, directory.parent, progress))
            measured = quality.measure(directory, reference)
            replace(written.config, quality=measured).save(directory)
        if usage is not None:
            _require_choices(written.compiled, checkpoint.directory)
            if config.backend == NATIVE:
                usage.measure(directory).save(directory)
            else:
                native = replace(config, backend=NATIVE, weight_memory=None)
                twin = stack.enter_context(_reference_engine(plain, native, directory.parent, progress))
                usage.measure(twin, directory).save(directory)
    return BuildReport(
        directory=output_dir,
        checkpoint=written.config.pretrained_config,
        config=written.config.build_config,
        engine_bytes=written.engine_bytes,
        compiled=written.compiled,
        seconds=time.monotonic() - began,
        quantization_errors=checkpoint.quantization_errors + (() if tower is None else tower.quantization_errors),
        quality=measured,
        left_out=checkpoint.left_out,
        tower=tower,
        why_only_text=found if isinstance(found, str) else None,
        dequantization=checkpoint.dequantization,
        kept=checkpoint.kept,
    )


def _require_choices(compiled: CompiledNetwork | CompiledPlans, directory: Path) -> None:
    """Raises ConfigError if usage cannot vary: every token uses all weights of the engine."""
    assert isinstance(compiled, CompiledNetwork)
    if not usage_names(compiled.program):
        raise ConfigError(
            f"{directory}: usage_text: the engine has neither experts nor neurons that are read one by one; "
            "expected a model with ReLU-gated MLPs and sparse_mlp not disabled; for backend native with "
            "weight_memory, or a model with experts"
        )


@contextmanager
def _reference_engine(source: Checkpoint, config: BuildConfig, place: Path, progress: Progress) -> Iterator[Path]:
    """Builds an engine of the checkpoint without adapters and predictors in `place`; deletes it after the with
    statement."""
    without_adapters = replace(
        config,
        sparse_predictors=None,
        lora_config=LoraBuildConfig(),
        plugin_config=replace(config.plugin_config, lora_plugin=DISABLE, dora_plugin=DISABLE),
    )
    with tempfile.TemporaryDirectory(dir=place, prefix=f".{source.directory.absolute().name}-engine-") as name:
        directory = Path(name)
        write_engine(source, without_adapters, CompilerOptions(package=None), directory, progress)
        yield directory


def _checked_config(
    config: BuildConfig,
    checkpoint: Checkpoint,
    quantization: QuantConfig | None,
    quality: QualityMeasure | None,
    usage: UsageMeasure | None,
    workers: int,
    timing_cache: Path | None,
    dumps_onnx: bool,
) -> tuple[BuildConfig, Package | None]:
    """The config with all defaults filled in, and TensorRT's package; None: another backend compiles.

    Raises ConfigError that lists all problems, and AdapterError for adapters that the engine could not serve.
    """
    config = config.with_defaults(checkpoint.config)
    problems = problems_of(config, checkpoint.config)
    package = None
    if dumps_onnx and config.sparse_predictors is not None:
        problems.append("dump_onnx and sparse_predictors: the graph has no predictors; choose one")
    ranks = checkpoint.config.mapping.world_size
    if ranks > 1:
        needs_one = {
            f"backend {config.backend}": config.backend != NATIVE,
            "quality_text": quality is not None,
            "usage_text": usage is not None,
            "dump_onnx": dumps_onnx,
        }
        problems += [
            f"{name} needs a checkpoint of one rank, not of {ranks}" for name, given in needs_one.items() if given
        ]
    if usage is not None and config.backend in (NATIVE, CUDA):
        problems += usage.problems(config)
    if config.backend == NATIVE:
        problems += quality.problems(config) if quality is not None else []
        if usage is not None and (checkpoint.config.num_encoder_layers > 0 or not checkpoint.config.has_lm_head):
            problems.append(f"usage_text needs a decoder with an lm_head; {checkpoint.config.architecture} is not one")
        if quality is not None and checkpoint.config.num_encoder_layers > 0:
            problems.append(
                f"quality_text needs a decoder without an encoder; {checkpoint.config.architecture} has an encoder"
            )
        if quality is not None and not checkpoint.config.has_lm_head:
            problems.append(f"quality_text needs a model with an lm_head; {checkpoint.config.architecture} has none")
        if quantization is not None and config.compress_weights:
            problems.append("compress_weights and quantization: quantised weights cannot be compressed; choose one")
        if quantization is not None and config.sparse_mlp == ENABLE:
            problems.append("sparse_mlp and quantization: quantised weights are read whole; choose one")
        if quantization is not None and config.sparse_predictors is not None:
            problems.append("sparse_predictors and quantization: quantised weights are read whole; choose one")
    else:
        if config.backend == CUDA:
            quantized = (
                checkpoint
                if quantization is None
                else checkpoint.with_quantization(quantization, int8_activations=False)
            )
            problems += problems_of_network(quantized.network)
            has_relu = Activation(checkpoint.config.hidden_act).leaves_zeros  # Otherwise it is refused already.
            if config.sparse_mlp == ENABLE and has_relu and not sparse_pairs(checkpoint.network):
                problems.append(
                    f"sparse_mlp needs a model with ReLU-gated MLPs for backend {CUDA}; "
                    f"{checkpoint.config.architecture} has none"
                )
            if config.sparse_mlp == ENABLE and quantization is not None:
                problems.append("sparse_mlp and quantization: quantised weights are read whole; choose one")
        else:
            scaled_from = checkpoint.network.scales_queries_from
            if scaled_from is not None and config.max_seq_len is not None and config.max_seq_len > scaled_from:
                problems.append(
                    f"max_seq_len is {config.max_seq_len}: {checkpoint.config.architecture} scales queries by their "
                    f"position from {scaled_from} on, which needs backend {NATIVE} or {CUDA}; expected up to "
                    f"{scaled_from}"
                )
            problems += problems_of_plans(checkpoint.network)
            if any(isinstance(op, Experts) for op in checkpoint.network.ops):
                problems.append(f"{checkpoint.config.architecture} has experts, which need backend {NATIVE}")
            if any(op.sinks is not None for op in checkpoint.network.attentions):
                problems.append(f"{checkpoint.config.architecture} has attention sinks, which need backend {NATIVE}")
            if any(op.norms_after_rotation for op in checkpoint.network.attentions):
                problems.append(
                    f"{checkpoint.config.architecture} has norms of heads after their rotation, which need backend "
                    f"{NATIVE}"
                )
        if not checkpoint.config.has_lm_head:
            problems.append(f"{checkpoint.config.architecture} has no lm_head; such models need backend {NATIVE}")
        published = checkpoint.config.quantization if config.backend == TENSORRT else None
        if published is not None and published.is_codebook:
            problems.append(f"weights of {published.code.name} need backend {NATIVE}")
        if published is not None and published.act_order:
            problems.append(f"weights with an input permutation need backend {NATIVE}")
        if published is not None and published.has_zero_point and published.quant_algo is QuantAlgo.W8A16:
            problems.append(f"weights of 8 bits with zero points need backend {NATIVE}")
        needs = {
            "quantization": quantization is not None and config.backend == TENSORRT,
            "quality_text": quality is not None,
        }
        problems += [f"{name} needs backend {NATIVE}" for name, given in needs.items() if given]
        if usage is not None and config.backend == TENSORRT:
            problems.append(f"usage_text needs backend {NATIVE} or {CUDA}")
    if workers < 1:
        problems.append(f"workers is {workers}; it must be at least 1")
    if config.tensorrt_config is not None and config.backend == TENSORRT:
        try:
            package = describe_package()
            problems += target_problems(config.tensorrt_config.compute_capability, timing_cache, package)
        except ConfigError as error:
            problems.append(str(error))
    elif timing_cache is not None:
        problems.append(f"timing_cache {timing_cache} needs backend {TENSORRT}")
    if problems:
        raise ConfigError(f"{checkpoint.directory}: " + "; ".join(problems))
    if package is not None and config.tensorrt_config is not None:
        targets = resolve_targets(config.tensorrt_config.compute_capability, package)
        config = replace(config, tensorrt_config=replace(config.tensorrt_config, compute_capability=targets))
    return with_adapters(config, checkpoint.network), package
