"""Converts a Hugging Face model directory to a checkpoint directory, one piece of a tensor at a time."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final

from ..._core import CheckpointError, ConfigError, DType
from ...common.output_directory import holds_only, producer_of, replaced_directory
from ...common.progress import Advance, Progress, SilentProgress
from ...formats.checkpoint.config import CONFIG_FILE, PRODUCER, CheckpointConfig, ParallelMapping
from ...formats.checkpoint.config_file import ConfigFile
from ...formats.checkpoint.quantization import QuantConfig
from ...formats.checkpoint.quantizer import QuantizationError
from ...formats.checkpoint.rank_file import rank_file, rank_specs, write_rank
from ...formats.hugging_face.hf_config import GENERATION_CONFIG_FILE
from ...formats.template_files import PROCESSOR_TEMPLATE_FILE, TEMPLATE_FILE, additional_templates, holds_templates
from .hf_model import HfModel, model_config
from .left_out import NOTHING_LEFT_OUT, LeftOut
from .published.dequantized import Dequantization, check_dequantized
from .published.kept_layers import KeptLayers

COPIED_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    PROCESSOR_TEMPLATE_FILE,
    GENERATION_CONFIG_FILE,
)
"""Tokenizer and chat files, copied from the model directory if they exist. See copied_files()."""

_RANK_FILE: Final = re.compile(r"rank\d+\.safetensors")


@dataclass(frozen=True)
class Converted:
    """Result of convert_checkpoint()."""

    config: CheckpointConfig
    num_tensors: int
    num_bytes: int
    quantization_errors: tuple[QuantizationError, ...] = ()
    """Error of each quantised tensor, rank by rank."""
    left_out: LeftOut = NOTHING_LEFT_OUT
    """Tensors of the model that are ignored."""
    dequantization: Dequantization | None = None
    """Layers of a model published quantised that were dequantised."""
    kept: KeptLayers | None = None
    """Layers of a model published quantised that keep their quantised weights."""


def convert_checkpoint(
    model_dir: Path | ConfigFile,
    output_dir: Path,
    *,
    dtype: DType | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    moe_tp_size: int | None = None,
    moe_ep_size: int | None = None,
    workers: int = 1,
    quantization: QuantConfig | None = None,
    int8_kv_cache: bool = False,
    keeps_published: bool = True,
    progress: Progress | None = None,
) -> Converted:
    """Writes config.json, rank{N}.safetensors and the tokenizer's files to `output_dir`.

    model_dir: directory of a Hugging Face model, or its config.json if that has been read.
    output_dir: must be absent, empty, or a checkpoint that this function wrote. Such a checkpoint is replaced, but only
    if the conversion succeeds.
    dtype: None: the type in the model's config.json.
    moe_tp_size, moe_ep_size: the tp_size ranks of a layer form moe_ep_size groups, each with its own experts, and each
    expert is split over the moe_tp_size ranks of its group. ParallelMapping.of() defines the meaning of None.
    workers: number of ranks' files that are written at a time.
    quantization: of the linear layers; their values are rounded to `dtype` first.
    int8_kv_cache: engines store keys and values as int8.
    keeps_published: False: dequantises the layers of a model that was published quantised.

    Raises CheckpointError that lists all problems of the model, and ConfigError for sizes that cannot divide it, a
    quantisation that does not fit it, or a model without layers to dequantise.
    """
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be at least 1")
    mapping = ParallelMapping.of(tp_size, pp_size, moe_tp_size, moe_ep_size)
    source = model_config(model_dir, dtype=dtype, mapping=mapping)
    opened = HfModel.open(
        source, quantization=quantization, int8_kv_cache=int8_kv_cache, keeps_published=keeps_published
    )
    if not keeps_published:
        check_dequantized(opened.dequantization, source.directory)
    config = opened.config
    specs = [spec for plan in opened.plans for spec in rank_specs(plan, opened.numpy_dtype, config.quantization)]
    num_bytes = sum(spec.num_bytes for spec in specs)
    with replaced_directory(
        output_dir, is_ours=_is_checkpoint, kind="a checkpoint of AdaptRT", error=CheckpointError
    ) as directory:
        with (progress or SilentProgress()).task("Converting", num_bytes) as advance:
            errors = _write_ranks(opened, directory, workers, advance)
        copy_files(source.directory, directory)
        (directory / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")
    return Converted(
        config,
        len(specs),
        num_bytes,
        tuple(errors),
        opened.left_out,
        opened.dequantization,
        opened.kept,
    )


def copied_files(directory: Path) -> list[str]:
    """Paths of the tokenizer and chat files in a model's directory, relative to it.

    Raises CheckpointError if its directory of chat templates cannot be listed.
    """
    files = [name for name in COPIED_FILES if (directory / name).is_file()]
    return [*files, *additional_templates(directory, CheckpointError)]


def copy_files(source: Path, destination: Path) -> None:
    """Copies the tokenizer and chat files to a checkpoint or an engine. Raises OSError and CheckpointError."""
    for name in copied_files(source):
        (destination / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, destination / name)


def _write_ranks(model: HfModel, directory: Path, workers: int, advance: Advance) -> list[QuantizationError]:
    """Writes the ranks' files on `workers` threads: most of the time is spent in calls that release the GIL."""
    stop = Event()

    def advance_unless_stopped(num_bytes: int) -> None:
        if stop.is_set():
            raise _StoppedError
        advance(num_bytes)

    def write(rank: int) -> tuple[QuantizationError, ...]:
        tensors = model.tensors(rank)
        path, plan, how = directory / rank_file(rank), model.plans[rank], model.config.quantization
        write_rank(path, plan, model.numpy_dtype, how, tensors, advance_unless_stopped)
        return tensors.errors

    with ThreadPoolExecutor(min(workers, len(model.plans))) as pool:
        futures = [pool.submit(write, rank) for rank in range(len(model.plans))]
        try:
            for future in as_completed(futures):
                future.result()
            return [error for future in futures for error in future.result()]
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


class _StoppedError(Exception):
    """Ends a rank's thread after another one failed."""


def _is_checkpoint(directory: Path) -> bool:
    known = {CONFIG_FILE, *COPIED_FILES}
    return producer_of(directory / CONFIG_FILE) == PRODUCER and holds_only(
        directory,
        lambda name: name in known or _RANK_FILE.fullmatch(name) is not None,
        directories=holds_templates,
    )
