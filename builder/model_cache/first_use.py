"""Finds a model's engine in the cache, or builds it."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from ..._core import ConfigError, EngineError, dtype_name
from ..._version import __version__
from ...common.file_lock import file_lock
from ...common.output_directory import replaced_directory
from ...common.progress import Progress, SilentProgress, format_bytes
from ...formats.adapter.recognise import CONFIG_FILE as ADAPTER_CONFIG_FILE
from ...formats.checkpoint.config import CONFIG_FILE, CheckpointConfig
from ...formats.checkpoint.config_file import ConfigFile
from ...formats.checkpoint.hf_weights import weight_file_names
from ...formats.checkpoint.quantization import quantization_to_dict
from ...formats.checkpoint.rank_file import rank_file, rank_specs
from ...formats.engine import engine_file
from ...formats.engine.build_config import NATIVE, BuildConfig
from ...formats.engine.engine_config import FORMAT_VERSIONS
from ...formats.gguf.model_directory import gguf_file_of
from ...formats.hugging_face.hf_config import HfConfig
from ...formats.models.registry import declare, read_config
from ...formats.network.network import Network
from ...formats.sources import find_model
from ..engine.adapter_fit import modules_changed_by
from ..engine.problems import problems_of
from ..network.checkpoint_tensors import plan_rank
from .code_digest import code_digest
from .model_digest import ModelFiles, file_state
from .options import EngineOptions
from .store import DIGESTS_DIRECTORY, ENGINE_DIRECTORY, EngineCache

if TYPE_CHECKING:
    from ..build import BuildReport
    from ..compile.native import CompiledNetwork
    from ..conversion.checkpoint import Checkpoint

_BYTES_PER_RANK: Final = 4 * 4
"""Memory of a step per adapter rank and token: float32 products with A for the four parts of a fused layer."""
_ACCEPTED: Final = (
    "expected an engine (adaptrt build), a checkpoint (adaptrt convert-checkpoint), or a Hugging Face model: a "
    "directory with config.json, a GGUF file, or its name in the Hub (ORGANISATION/NAME)"
)


def engine_for(
    model: str | os.PathLike[str],
    options: EngineOptions | None = None,
    progress: Progress | None = None,
    *,
    cache: EngineCache | None = None,
) -> Path:
    """The engine directory of a model, built on first use.

    model: an engine, which is returned unchanged; or a checkpoint or a Hugging Face model, by its directory or its name
    in the Hub (docs/names.md), whose engine is found in the cache or built into it.
    options: options of the engine; None: the defaults.
    cache: None: the user's cache.

    If several processes ask for one engine at once, one builds it while the others wait. The cache may be read-only if
    it already has the engine. An entry with damaged files is rebuilt.

    Raises the errors of plan_engine() before any work is done; ConfigError if there is too little space, or if the
    engine must be built and the cache is read-only; CheckpointError and EngineError like build().
    """
    source = find_model(model)
    plan = plan_engine(source, options)
    return source.directory if plan is None else plan.engine(progress, cache=cache)


def plan_engine(model: str | os.PathLike[str], options: EngineOptions | None = None) -> EnginePlan | None:
    """The plan of a model's engine, with engine_for()'s arguments; None: `model` is an engine. Builds nothing.

    Raises ConfigError for a directory that is neither a model nor an engine, and for options that are invalid or would
    have no effect; CheckpointError for an invalid config.json.
    """
    source = find_model(model)
    directory = source.directory
    options = EngineOptions() if options is None else options
    _check_place(directory)
    state = file_state(directory / CONFIG_FILE)
    file = ConfigFile.read(directory, ConfigError)
    if not file.is_of_engine:
        return EnginePlan.open(file, ModelFiles(directory, state), options, source.record)
    if options.given:
        raise ConfigError(
            f"{directory}: is an engine, whose options were chosen when it was built; {', '.join(options.given)} "
            "would have no effect. Leave them out, or name the model directory"
        )
    return None


@dataclass(frozen=True)
class EnginePlan:
    """A model directory and the options of its engine."""

    directory: Path
    files: ModelFiles
    source: CheckpointConfig | HfConfig
    """The config.json of a checkpoint or of a Hugging Face model."""
    config: CheckpointConfig
    """The model's config, quantised as the engine will be."""
    build_config: BuildConfig
    options: EngineOptions
    origin: str | None = None
    """For a model of the Hugging Face Hub: its name with the commit."""

    @classmethod
    def open(cls, file: ConfigFile, files: ModelFiles, options: EngineOptions, origin: str | None = None) -> EnginePlan:
        """Checks the options. Raises ConfigError that lists all problems, CheckpointError for an invalid
        config.json."""
        directory = file.directory
        source: CheckpointConfig | HfConfig
        if file.is_of_checkpoint:
            if options.dtype is not None:
                raise ConfigError(
                    f"{directory}: is a checkpoint, whose dtype was chosen when it was converted; dtype "
                    f"{dtype_name(options.dtype)} is only for Hugging Face models"
                )
            if options.dequantize:
                raise ConfigError(
                    f"{directory}: is a checkpoint; dequantize is only for Hugging Face models and GGUF files"
                )
            source = config = read_config(file.data, subject=str(file.path))
            files.add_weights(rank_file(rank) for rank in range(config.mapping.world_size))
        elif file.is_of_hugging_face:
            source = HfConfig.read(file, dtype=options.dtype)
            config = source.config
            files.add_weights(weight_file_names(directory))
        else:
            raise ConfigError(f"{file.path}: has no architectures; {_ACCEPTED}")
        build_config = options.build_config(config)
        config = replace(config, int8_kv_cache=config.int8_kv_cache or options.int8_kv_cache)
        problems = []
        if options.quantization is not None:
            problems += options.quantization.problems()
            if file.is_of_checkpoint and config.quantization is not None:
                problems.append(f"quantization: the weights are already {config.quantization.describe()}")
            config = replace(config, quantization=options.quantization)
        problems += problems_of(build_config, config)
        if not problems and build_config.backend == NATIVE:
            problems += _memory_problems(build_config)
        if problems:
            raise ConfigError(f"{directory}: " + "; ".join(problems))
        return cls(directory, files, source, config, build_config, options, origin)

    @cached_property
    def network(self) -> Network:
        """Network of `config`; declared once, for the plan and for the build."""
        known = self.source.network if isinstance(self.source, HfConfig) else None
        return declare(self.config, known)

    @cached_property
    def _code(self) -> str:
        """code_digest() when it was first needed: reading all of the code takes longer than the rest of the key."""
        return code_digest()

    def is_made(self, progress: Progress | None = None, *, cache: EngineCache | None = None) -> bool:
        """True if the cache has the engine. Reads the whole model once; its digest is remembered."""
        cache = EngineCache() if cache is None else cache
        return cache.is_entry(cache.place(self._key_in(cache, SilentProgress() if progress is None else progress)))

    def engine(self, progress: Progress | None = None, *, cache: EngineCache | None = None) -> Path:
        """The engine's directory, built if the cache does not have it. Raises as engine_for()."""
        progress = SilentProgress() if progress is None else progress
        cache = EngineCache() if cache is None else cache
        key = self._key_in(cache, progress)
        if not cache.is_entry(cache.place(key)):
            _make_or_wait(self, key, cache, progress)
        cache.touch(key)
        return cache.place(key) / ENGINE_DIRECTORY

    def compile(self, *, compress_weights: bool = False) -> CompiledNetwork:
        """Compiles rank 0's program of the engine, without packing weights.

        compress_weights: True: compresses weights if the engine's options say so, which reads all of them. False: the
        program has the plain weights; only their sizes differ from the engine's.

        Raises CheckpointError for model files that do not fit config.json.
        """
        # Imported here because only a build needs the compiler.
        from ..compile.native import compile_network
        from ..engine.carried_adapters import with_adapters

        options, checkpoint = self.options, self.open_checkpoint()
        if options.int8_kv_cache:
            checkpoint = checkpoint.with_int8_kv_cache(True)
        checkpoint = checkpoint.with_quantization(options.quantization, int8_activations=options.int8_activations)
        config = with_adapters(self.build_config, checkpoint.network)
        if not compress_weights:
            config = replace(config, compress_weights=False)
        return compile_network(checkpoint.network, checkpoint.ranks[0], config)

    def open_checkpoint(self) -> Checkpoint:
        """Opens the model's files. Raises CheckpointError for files that do not fit config.json."""
        # Imported here because only a build needs it.
        from ..conversion.checkpoint import Checkpoint

        if isinstance(self.source, HfConfig):
            opened = Checkpoint.of_dequantized_model if self.options.dequantize else Checkpoint.of_model
            return replace(opened(self.source), origin=self.origin)
        return Checkpoint.of_config(self.source, self.directory, self.network)

    def check_adapter(self, directory: Path) -> None:
        """Raises AdapterError that says why the engine could not serve an adapter."""
        modules_changed_by(directory, self.build_config, self.network)

    def _key_in(self, cache: EngineCache, progress: Progress) -> str:
        cache.make_directory()
        return self.key(self.files.digest(cache.directory / DIGESTS_DIRECTORY, progress))

    def description(self, report: BuildReport) -> str:
        """Text that distinguishes the engines of one model for the user."""
        build = self.build_config
        quantised = report.kept or report.dequantization
        published = "" if quantised is None else f" from {quantised.format}"
        compressed = ", compressed" if build.compress_weights else ""
        backend = "" if build.backend == NATIVE else f", backend {build.backend}"
        sizes = (
            f"max_batch_size {build.max_batch_size}, max_num_tokens {build.max_num_tokens}, max_seq_len "
            f"{build.max_seq_len}, max_input_len {build.max_input_len}, max_lora_rank {build.lora_config.max_lora_rank}"
        )
        return f"{report.checkpoint.describe_types()}{published}{compressed}{backend}, {sizes}"

    def key(self, model_digest: str) -> str:
        """Cache key of 16 hexadecimal digits. It changes with everything that the engine depends on."""
        parts: dict[str, Any] = {
            "adaptrt": __version__,
            "code": self._code,
            "formats": [FORMAT_VERSIONS[self.build_config.backend], engine_file.FORMAT_VERSION],
            "model": model_digest,
            "eos_token_id": list(self.config.eos_token_id),
            "build_config": self.build_config.to_dict(),
            "quantization": quantization_to_dict(self.config.quantization, int8_kv_cache=self.config.int8_kv_cache),
        }
        if self.options.int8_activations:
            parts["int8_activations"] = True
        if self.options.dequantize:
            parts["dequantize"] = True
        if self.origin is not None:
            parts["source"] = self.origin
        return xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode())

    @property
    def needed_bytes(self) -> int:
        """Estimated size of the engine: that of its checkpoint."""
        plan, dtype = plan_rank(self.network, 0), np.dtype(dtype_name(self.config.dtype))
        return sum(spec.num_bytes for spec in rank_specs(plan, dtype, self.config.quantization))


def _make_or_wait(source: EnginePlan, key: str, cache: EngineCache, progress: Progress) -> None:
    if not os.access(cache.directory, os.W_OK):
        raise ConfigError(
            f"{cache.directory}: cannot be written and has no engine of {source.directory} with these options; "
            "set XDG_CACHE_HOME to another directory"
        )
    with ExitStack() as waiting:

        def say_so() -> None:
            (report,) = waiting.enter_context(progress.phases(["Waiting for another process that builds this engine"]))
            report("", 0.0)

        with file_lock(cache.lock_file(key), on_wait=say_so):
            waiting.close()
            if not cache.is_entry(cache.place(key)):
                _make(source, key, cache, progress)


def _make(source: EnginePlan, key: str, cache: EngineCache, progress: Progress) -> None:
    """Builds the entry. The caller must hold its lock."""
    # Imported here because only a build needs the compiler.
    from ..build import build

    cache.remove_unfinished(key)
    _check_space(source, cache.directory)
    options = source.options
    place = cache.place(key)
    kind = "an entry of AdaptRT's cache of engines"
    with replaced_directory(place, is_ours=cache.is_of_entry, kind=kind, error=EngineError) as directory:
        report = build(
            source.open_checkpoint(),
            source.build_config,
            directory / ENGINE_DIRECTORY,
            quantization=options.quantization,
            int8_activations=options.int8_activations,
            int8_kv_cache=options.int8_kv_cache,
            progress=progress,
        )
        source.files.check_unchanged()
        model = source.origin or str(gguf_file_of(source.directory) or source.directory.absolute())
        cache.describe(directory, {"model": model, "options": source.description(report)})
    if report.kept is not None:
        progress.note(f"kept: {report.kept.describe()}")
    if report.dequantization is not None:
        progress.note(f"dequantised: {report.dequantization.describe()}")


def _check_space(source: EnginePlan, place: Path) -> None:
    needed, free = source.needed_bytes, shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"{place}: building the engine of {source.directory} needs about {format_bytes(needed)}, and "
            f"{format_bytes(free)} are free; remove engines (see adaptrt cache), or set XDG_CACHE_HOME to "
            "another directory"
        )


def _memory_problems(config: BuildConfig) -> list[str]:
    """Sizes for which this machine, which will run the engine, has too little memory."""
    rank, rows = config.lora_config.max_lora_rank, config.max_num_tokens
    needed, total = rank * rows * _BYTES_PER_RANK, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= total:
        return []
    return [
        f"max_lora_rank is {rank}; with max_num_tokens {rows} a step needs {format_bytes(needed)}, and the "
        f"machine has {format_bytes(total)}; expected a lower max_lora_rank or max_num_tokens"
    ]


def _check_place(directory: Path) -> None:
    """Raises ConfigError if `directory` is not a directory with a config.json."""
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        raise ConfigError(f"{directory}: {problem}; {_ACCEPTED}")
    if not (directory / CONFIG_FILE).is_file():
        if (directory / ADAPTER_CONFIG_FILE).is_file():
            raise ConfigError(f"{directory}: is a PEFT adapter; name the directory of its base model, or an engine")
        raise ConfigError(f"{directory}: has no config.json; {_ACCEPTED}")
