"""Builds an engine of quantised weights from a checkpoint that is not quantised."""

from __future__ import annotations

import tempfile
from pathlib import Path

from .._core import ConfigError, EngineError
from .build import ENGINE_KIND, BuildReport, build, checked_config, is_engine_directory
from .checkpoint.quantization import QuantConfig
from .checkpoint.quantize_checkpoint import quantize_checkpoint
from .checkpoint.quantizer import QuantizationError
from .compile.checkpoint import Checkpoint
from .config import NATIVE, BuildConfig
from .output_directory import replaceable
from .progress import Progress, SilentProgress


def build_quantized(
    checkpoint_dir: str | Path,
    quantization: QuantConfig,
    config: BuildConfig,
    output_dir: str | Path,
    *,
    workers: int = 1,
    timing_cache: Path | None = None,
    dump_onnx_to: Path | None = None,
    progress: Progress | None = None,
) -> tuple[BuildReport, tuple[QuantizationError, ...]]:
    """build(), of the checkpoint's weights quantised; what it reports, and how far the weights are from their own.

    The quantised checkpoint lies beside `output_dir` for the time of the build. Raises what build() raises, and
    ConfigError for a quantisation that the checkpoint cannot have.
    """
    if config.backend != NATIVE:
        raise ConfigError(f"quantization needs backend {NATIVE}: {config.backend} multiplies 16-bit weights here")
    progress = progress or SilentProgress()
    source, output_dir = Path(checkpoint_dir), Path(output_dir)
    checkpoint = Checkpoint.open(source)
    # build() checks both again; here they are refused before anything is quantised, and with the user's directory.
    checked_config(config, checkpoint, workers, timing_cache)
    replaceable(output_dir, is_ours=is_engine_directory, kind=ENGINE_KIND, error=EngineError)
    place = next(parent for parent in output_dir.absolute().parents if parent.is_dir())
    prefix = f".{source.absolute().name}-{quantization.quant_algo.name.lower()}-"
    try:
        temporary = tempfile.TemporaryDirectory(dir=place, prefix=prefix)
    except OSError as reason:
        raise EngineError(f"{output_dir}: cannot be written: {reason.strerror}") from None
    with temporary as directory:
        quantized = Path(directory)
        errors = quantize_checkpoint(source, checkpoint.config, quantized, quantization, progress)
        report = build(
            quantized,
            config,
            output_dir,
            workers=workers,
            timing_cache=timing_cache,
            dump_onnx_to=dump_onnx_to,
            progress=progress,
        )
    return report, errors
