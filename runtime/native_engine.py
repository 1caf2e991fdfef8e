"""Engines of the native compiler: maps the engine file, checks every byte and makes the program."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from .. import _core
from .._core import ConfigError, CpuEngine, ExecutorConfig, WeightMemory
from .._version import __version__
from ..common.usable_cpus import num_usable_cpus
from ..formats.engine.engine_config import EngineConfig, engine_file
from ..formats.engine.engine_file import EngineFile
from ..formats.engine.weight_usage import WeightUsage, usage_names
from .compiled_engine import CompiledEngine, checked_program
from .engine_weights import EngineBase
from .file_weights import FileWeights, MappedWeights
from .kv_identity import kv_identity
from .loaded_engine import IN_MEMORY, engine_adapters
from .ranks import Ranks
from .weight_memory import describe_placement, require_one_rank, require_room

_LOG: Final = logging.getLogger("adaptrt")


@dataclass(frozen=True)
class NativeEngine(CompiledEngine):
    """An engine whose weights are memory-mapped, not copied, unless it has a weight_memory."""

    weight_memory: int = 0
    """Maximum bytes of weights in memory; 0: all weights are mapped. Otherwise only the check reads the mapping."""
    usage_counter: _core.WeightUsage | None = None
    """Counts which weights steps use; None: not counted."""

    def base_weights(self) -> EngineBase:
        """Returns the packed weights."""
        return self._base

    @cached_property
    def _base(self) -> EngineBase:
        others = (rank for rank in range(self.num_ranks) if rank != self.rank)
        loaded = [self, *(load_native_engine(self.directory, self.config, rank) for rank in others)]
        weights = FileWeights(self.storage) if self.weight_memory else MappedWeights()
        return EngineBase([(engine.program, engine.storage) for engine in loaded], self.directory, weights)

    @cached_property
    def ranks(self) -> Ranks:
        """The processes that run an engine of several ranks. Raises ConfigError if they were not started."""
        return Ranks(self.num_ranks)

    def with_weight_memory(self, num_bytes: int | None) -> NativeEngine:
        """See LoadedEngine.with_weight_memory."""
        if num_bytes is None or num_bytes == self.weight_memory:
            return self
        if num_bytes:
            require_one_rank(num_bytes, self.num_ranks, self.directory)
        if num_bytes and self.directory == IN_MEMORY:
            raise ConfigError(f"weight_memory is {num_bytes}; accepted: None and 0, because the engine is in memory")
        return dataclasses.replace(self, weight_memory=num_bytes)

    def memory_of_weights(self) -> WeightMemory | None:
        """Returns the weight memory settings for CpuEngine; None: all weights are mapped."""
        if not self.weight_memory:
            return None
        return WeightMemory(
            path=str(self.storage.path),
            mapping=self.storage.file_bytes,
            num_bytes=self.weight_memory,
            usage=self._known_usage(),
        )

    def _known_usage(self) -> _core.WeightUsage | None:
        """Returns the weight usage that the build measured with a text. Raises EngineError for an invalid usage."""
        program = self.storage.program
        found = WeightUsage.load(self.directory, self.config.engine_checksums[self.rank], program)
        if found is None:
            return None
        of_ops = {at: found.counts[name] for at, (name, _) in usage_names(program).items()}
        return _core.WeightUsage(tokens=found.tokens, of_ops=of_ops)

    def start(
        self,
        config: ExecutorConfig,
        *,
        beside: _core.Engine | None = None,
        profile: _core.StepProfile | None = None,
    ) -> _core.Engine:
        """Starts the engine. Shares the threads of `beside` if that is a native engine too.

        With several ranks, all start together, and rank 0's engine runs on all of them. profile: records every step;
        with several ranks, only rank 0's part.
        """
        num_threads = config.num_threads or num_usable_cpus()
        if self.num_ranks == 1:
            identity = kv_identity(*self.config.engine_checksums) if config.kv_cache_config.host_cache_size else ""
            return self._start(config, num_threads, identity, beside, None, profile)
        if not config.num_threads:
            num_threads = max(1, num_threads // self.ranks.on_this_host)
        communicator = self.ranks.communicator
        engine = self.ranks.together(lambda: self._start(config, num_threads, "", None, communicator, profile))
        self.ranks.require_same(
            {
                "engine": self.config.engine_checksums,
                "release": __version__,
                "kernels": engine.info.kernels,
            }
        )
        pipeline = self._pipeline_facts(engine.info) if self.program.num_stages > 1 else None
        return engine if self.rank > 0 else _core.ShardedEngine(engine, communicator, pipeline, profile)

    def _pipeline_facts(self, info: _core.EngineInfo) -> _core.PipelineFacts:
        """Returns the facts of all pipeline stages. Every rank must call it."""
        of_rank = {
            name: getattr(info, name)
            for name in (
                "hidden_size", "has_logits", "max_reusable_prompt_len", "kv_block_bytes", "cross_kv_block_bytes",
                "state_bytes",
            )
        }  # fmt: skip
        of_ranks = self.ranks.gather(of_rank)
        return _core.PipelineFacts(
            hidden_size=of_ranks[-1]["hidden_size"],
            has_logits=of_ranks[-1]["has_logits"],
            max_reusable_prompt_len=min(one["max_reusable_prompt_len"] for one in of_ranks),
            num_layers=self.config.pretrained_config.num_hidden_layers,
            kv_block_bytes=max(one["kv_block_bytes"] for one in of_ranks),
            cross_kv_block_bytes=max(one["cross_kv_block_bytes"] for one in of_ranks),
            state_bytes=max(one["state_bytes"] for one in of_ranks),
        )

    def available_memory(self) -> int:
        """See LoadedEngine.available_memory."""
        if self.num_ranks == 1:
            return super().available_memory()
        return self.ranks.least(super().available_memory() // self.ranks.on_this_host)

    def _start(
        self,
        config: ExecutorConfig,
        num_threads: int,
        identity: str,
        beside: _core.Engine | None,
        communicator: _core.Communicator | None,
        profile: _core.StepProfile | None,
    ) -> CpuEngine:
        if self.weight_memory:
            require_room(self.program, self.storage, self.weight_memory, config, self.available_memory())
        engine = CpuEngine(
            self.program,
            self.storage,
            num_threads,
            kernels=config.kernels,
            profile=profile,
            identity=identity,
            beside=beside if isinstance(beside, CpuEngine) else None,
            communicator=communicator,
            weight_memory=self.memory_of_weights(),
            usage=self.usage_counter,
            mapped_file=self.storage.mapped_file,
        )
        if engine.weight_placement is not None:
            _LOG.info("%s: %s", self.directory, describe_placement(engine.weight_placement))
        said = "asked for" if config.kernels else _why_chosen()
        _LOG.info("%s: kernels %s (%s), threads %d", self.directory, engine.info.kernels, said, num_threads)
        return engine


def _why_chosen() -> str:
    """Returns why the kernels were chosen for this CPU: the reason against the next better ones."""
    return "; ".join(["chosen", *(f"not {name}: {reason}" for name, reason in _core.impossible_cpu_kernels()[:1])])


def load_native_engine(
    directory: Path, config: EngineConfig, rank: int = 0, weight_memory: int | None = None
) -> NativeEngine:
    """Loads one rank of an engine. weight_memory: see ExecutorConfig.weight_memory; None: the build's.

    Raises EngineError for an engine file that is damaged or disagrees with config.json, ConfigError for a weight_memory
    that the engine cannot have.
    """
    num_bytes = config.build_config.weight_memory if weight_memory is None else weight_memory
    file = directory / engine_file(rank)
    storage = EngineFile(file, config.engine_checksums[rank], keeps_in_memory=not num_bytes)
    return _checked(directory, config, storage, engine_adapters(config, directory)).with_weight_memory(num_bytes)


def native_engine_in_memory(
    subject: Path, config: EngineConfig, engine: bytes | bytearray | memoryview
) -> NativeEngine:
    """Loads the bytes of an engine file, which are copied. It carries no adapters. subject: path for messages."""
    return _checked(subject, config, EngineFile(subject / engine_file(0), config.engine_checksums[0], engine), {})


def _checked(directory: Path, config: EngineConfig, storage: EngineFile, adapters: Mapping[str, Path]) -> NativeEngine:
    program = checked_program(directory, config, storage)
    return NativeEngine(directory, config, adapters, program, storage)
