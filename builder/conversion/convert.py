"""Converts a Hugging Face model directory to a checkpoint directory, one piece of a tensor at a time."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Final

import numpy as np

from ..._core import CheckpointError, ConfigError, DType, dtype_name
from ..checkpoint.casting import CHECKPOINT_DTYPES, Array, cast, to_float32
from ..checkpoint.config import CONFIG_FILE, PRODUCER, CheckpointConfig, ParallelMapping
from ..checkpoint.hf_weights import HfWeights
from ..checkpoint.planned_tensor import PlannedTensor, Slice
from ..checkpoint.quantization import QuantConfig
from ..checkpoint.quantizer import QuantizationError
from ..checkpoint.rank_file import rank_file, rank_specs, write_rank
from ..models.registry import FAMILIES, declare
from ..network.checkpoint_tensors import hf_tensor_shapes, plan_rank, tied_lm_head
from ..network.network import Network
from ..network.weights import name_now
from ..output_directory import holds_only, producer_of, replaced_directory
from ..progress import Advance, Progress, SilentProgress
from ..safetensors_stream import TensorSpec
from .hf_config import load_hf_config

COPIED_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What text-level tools need, copied from the model directory where it is there."""

_RANK_FILE: Final = re.compile(r"rank\d+\.safetensors")


@dataclass(frozen=True)
class Converted:
    """What convert_checkpoint wrote."""

    config: CheckpointConfig
    num_tensors: int
    num_bytes: int
    quantization_errors: tuple[QuantizationError, ...] = ()
    """Of each tensor that was quantised, rank by rank."""
    num_vision_tensors: int = 0
    """Tensors of the model's vision tower, which are left aside."""


def convert_checkpoint(
    model_dir: Path,
    output_dir: Path,
    *,
    dtype: DType | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    workers: int = 1,
    quantization: QuantConfig | None = None,
    int8_kv_cache: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Writes config.json, rank{N}.safetensors and the tokenizer's files to `output_dir`.

    `dtype` None keeps the type that the model's config.json states. Up to `workers` ranks are written at a
    time. `quantization` is of the linear layers; their values are rounded to `dtype` first. `int8_kv_cache` asks
    engines to keep keys and values as int8.

    `output_dir` must be absent, empty, or a checkpoint that this function wrote, which is replaced; it stays as it was
    when anything goes wrong. Raises CheckpointError for everything that is wrong with the model and ConfigError for
    sizes that cannot cut it, and for a quantisation that it cannot have.
    """
    for name, value in (("tp_size", tp_size), ("pp_size", pp_size), ("workers", workers)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: is not a directory")
    mapping = ParallelMapping(tp_size=tp_size, pp_size=pp_size)
    config = replace(
        load_hf_config(model_dir, dtype=dtype, mapping=mapping),
        quantization=quantization,
        int8_kv_cache=int8_kv_cache,
    )
    network = declare(config)
    weights = HfWeights(model_dir).renamed(partial(name_now, older_names=network.older_names))
    _check_tensors(weights, network, model_dir)
    plans = [plan_rank(network, rank) for rank in range(mapping.world_size)]
    check_quantization(config, plans, str(model_dir))
    numpy_dtype = np.dtype(dtype_name(config.dtype))
    specs = [spec for plan in plans for spec in rank_specs(plan, numpy_dtype, quantization)]
    num_bytes = sum(spec.num_bytes for spec in specs)
    with replaced_directory(
        output_dir, is_ours=_is_checkpoint, kind="a checkpoint of AdaptRT", error=CheckpointError
    ) as directory:
        with (progress or SilentProgress()).task("Converting", num_bytes) as advance:
            _check_tied_lm_head(weights, network)
            jobs = [_RankJob(weights, plan, numpy_dtype, quantization) for plan in plans]
            errors = _write_ranks(jobs, directory, workers, advance)
        for name in COPIED_FILES:
            if (model_dir / name).is_file():
                shutil.copyfile(model_dir / name, directory / name)
        (directory / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")
    num_vision_tensors = sum(_is_of_vision_tower(name, config) for name in weights.names)
    return Converted(config, len(specs), num_bytes, tuple(errors), num_vision_tensors)


def check_quantization(config: CheckpointConfig, plans: Sequence[Sequence[PlannedTensor]], subject: str) -> None:
    """Raises ConfigError, which begins with `subject`, for a quantisation that these tensors cannot have."""
    if config.quantization is None:
        return
    problems = config.quantization.problems()
    for plan in plans:
        problems += config.quantization.shape_problems({tensor.name: tensor.shape for tensor in plan})
    if problems:
        raise ConfigError(f"{subject}: quantization: " + "; ".join(dict.fromkeys(problems)))


def _check_tensors(weights: HfWeights, network: Network, model_dir: Path) -> None:
    """Raises CheckpointError with every tensor that is missing, unused, or of another shape or dtype."""
    expected = hf_tensor_shapes(network)
    missing = [name for name in expected if name not in weights]
    unused = [name for name in weights.names if name not in expected and not _is_harmless(name, network)]
    differing = []
    for name, shape in expected.items():
        if name not in weights:
            continue
        spec = weights.spec(name)
        if spec.shape != shape:
            differing.append(f"tensor '{name}' is {list(spec.shape)}, but config.json makes it {list(shape)}")
        if spec.dtype not in CHECKPOINT_DTYPES:
            accepted = ", ".join(map(str, CHECKPOINT_DTYPES))
            differing.append(f"tensor '{name}' is of {spec.dtype}; accepted: {accepted}")
    problems = []
    if missing:
        problems.append(f"missing tensors: {', '.join(missing)}")
    if unused:
        problems.append(f"unexpected tensors: {', '.join(unused)}")
    problems.extend(differing)
    if problems:
        raise CheckpointError(f"{model_dir}: " + "; ".join(problems))


def _is_harmless(name: str, network: Network) -> bool:
    tied = tied_lm_head(network)
    if tied is not None and name == tied.lm_head:
        return True
    ignored = FAMILIES[network.config.architecture].ignored_tensors
    return _is_of_vision_tower(name, network.config) or any(re.fullmatch(pattern, name) for pattern in ignored)


def _is_of_vision_tower(name: str, config: CheckpointConfig) -> bool:
    vision = FAMILIES[config.architecture].vision
    return vision is not None and name.startswith(vision.tensor_prefixes)


def _check_tied_lm_head(weights: HfWeights, network: Network) -> None:
    """A tied checkpoint may store lm_head.weight once more, with the embedding's values."""
    tied = tied_lm_head(network)
    if tied is None or tied.lm_head not in weights:
        return
    complaint = (
        f"{weights.where(tied.lm_head)} differs from {tied.embedding}, although tie_word_embeddings is true; "
        "set it to false to use both, or remove the tensor"
    )
    embedding = weights.spec(tied.embedding)
    if weights.spec(tied.lm_head) != TensorSpec(tied.lm_head, embedding.dtype, embedding.shape):
        raise CheckpointError(complaint)
    rows = range(network.config.vocab_size)
    for head, row in zip(weights.rows(tied.lm_head, rows), weights.rows(tied.embedding, rows), strict=True):
        if not np.array_equal(to_float32(head), to_float32(row)):
            raise CheckpointError(complaint)


class _RankJob:
    """Writes one rank's file."""

    def __init__(
        self, weights: HfWeights, plan: list[PlannedTensor], dtype: np.dtype[Any], quantization: QuantConfig | None
    ) -> None:
        self._weights = weights
        self._plan = plan
        self._dtype = dtype
        self._quantization = quantization

    def write(self, path: Path, advance: Advance) -> list[QuantizationError]:
        return write_rank(path, self._plan, self._dtype, self._quantization, self._pieces, advance)

    def _pieces(self, tensor: PlannedTensor) -> Iterator[Array]:
        for part in tensor.slices:
            subject = self._weights.where(part.source)
            for piece in self._rows(part):
                columns = piece if part.columns is None else piece[:, part.columns.start : part.columns.stop]
                yield cast(np.ascontiguousarray(columns), self._dtype, subject)
        if tensor.zero_rows:
            yield np.zeros((tensor.zero_rows, *tensor.shape[1:]), self._dtype)

    def _rows(self, part: Slice) -> Iterator[Array]:
        """Whole rows of [out, in]; those of a tensor that is stored as [in, out] come as one piece."""
        if not part.transposed:
            yield from self._weights.rows(part.source, part.rows)
            return
        inputs = range(self._weights.spec(part.source).shape[0])
        pieces = self._weights.rows(part.source, inputs)
        yield np.concatenate([piece[:, part.rows.start : part.rows.stop] for piece in pieces]).T


def _write_ranks(jobs: list[_RankJob], directory: Path, workers: int, advance: Advance) -> list[QuantizationError]:
    """Writes the ranks' files on `workers` threads: most of the time goes to calls that release the GIL."""
    stop = Event()

    def advance_unless_stopped(num_bytes: int) -> None:
        if stop.is_set():
            raise _StoppedError
        advance(num_bytes)

    with ThreadPoolExecutor(min(workers, len(jobs))) as pool:
        futures = [
            pool.submit(job.write, directory / rank_file(rank), advance_unless_stopped) for rank, job in enumerate(jobs)
        ]
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
        directory, lambda name: name in known or _RANK_FILE.fullmatch(name) is not None
    )
