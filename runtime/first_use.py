"""Builds engines on first use. Before that, checks the executor's configuration against the engines to be built."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path

from .. import _core
from .._core import EngineInfo, ExecutorConfig, WeightMemory
from ..builder.model_cache.first_use import EnginePlan, plan_engine
from ..builder.model_cache.options import EngineOptions
from ..common.progress import Progress
from ..formats.adapter.adapter_copy import TOKENIZER_FILE
from ..formats.engine.bind import bind_program
from ..formats.engine.build_config import NATIVE
from ..formats.engine.engine_config import EngineConfig, engine_file
from ..formats.engine.engine_file import EngineLayout
from ..formats.sources import Source
from .checked_config import checked_config
from .draft_vocabulary import check_draft_vocabulary
from .memory import available_memory
from .weight_memory import require_one_rank, require_room


@dataclass(frozen=True)
class ModelOrEngine:
    """An engine, or a model whose engine may have to be built."""

    directory: Path
    plan: EnginePlan | None
    """None: `directory` is an engine."""

    @classmethod
    def of(cls, source: Source, options: EngineOptions | None = None) -> ModelOrEngine:
        """Plans the engine of a model. Raises like plan_engine()."""
        return cls(source.directory, plan_engine(source, options))

    def must_be_built(self, progress: Progress) -> bool:
        """True for a model whose engine is not in the cache. Reads the whole model once, like EnginePlan.is_made."""
        return self.plan is not None and not self.plan.is_made(progress)

    def engine(self, progress: Progress) -> Path:
        """Returns the engine's directory. Builds it if necessary. Raises like engine_for()."""
        return self.directory if self.plan is None else self.plan.engine(progress)


def make_engines(
    config: ExecutorConfig, model: ModelOrEngine, draft: ModelOrEngine | None, progress: Progress
) -> tuple[Path, ExecutorConfig]:
    """Returns the directory of a model's engine, and the configuration with that of the draft model's engine.

    draft: the draft model of config.draft_target_decoding_config. Its tokenizer is compared with the model's here, so
    the executor need not compare them.

    Raises what engine_for() raises. Before anything is built, also raises the ConfigError with which the executor would
    refuse the configuration with these engines, and the errors of check_draft_vocabulary().
    """
    if draft is not None:
        check_draft_vocabulary(model.directory / TOKENIZER_FILE, draft.directory / TOKENIZER_FILE)
    if model.must_be_built(progress) or (draft is not None and draft.must_be_built(progress)):
        check_config(config, model, draft)
    directory = model.engine(progress)
    settings = config.draft_target_decoding_config  # a copy
    if draft is not None and settings is not None:
        settings.speculative_model_dir = str(draft.engine(progress))
        config = copy.copy(config)
        config.draft_target_decoding_config = settings
    return directory, config


def check_config(config: ExecutorConfig, model: ModelOrEngine, draft: ModelOrEngine | None = None) -> None:
    """Raises the ConfigError with which Executor would refuse a configuration with these engines.

    Builds nothing. Reads weights only if their sizes depend on them: if they are compressed, and config.weight_memory
    is set. Engines of GPUs are not checked here.
    """
    config = checked_config(config)
    engine = _Planned.of(model, config)
    if engine is None:
        return
    of_draft = None if draft is None else _Planned.of(draft, config)
    engine.check_weight_memory(config)
    _core.check_executor_config(config, engine.info, available_memory(), None if of_draft is None else of_draft.info)


@dataclass(frozen=True)
class _Planned:
    """Rank 0 of a native engine that may not exist yet."""

    model: ModelOrEngine
    layout: EngineLayout
    program: _core.Program
    info: EngineInfo
    weight_memory: int
    """Bytes that the engine was built with; 0: none."""

    @classmethod
    def of(cls, model: ModelOrEngine, config: ExecutorConfig) -> _Planned | None:
        """Returns None for an engine that does not run on the CPU."""
        if model.plan is not None:
            if model.plan.build_config.backend != NATIVE:
                return None
            compiled = model.plan.compile()
            layout, built_with = EngineLayout.planned(compiled.program, compiled.tensors), None
        else:
            of_engine = EngineConfig.load(model.directory)
            if of_engine.build_config.backend != NATIVE:
                return None
            layout = EngineLayout.of_file(model.directory / engine_file(0))
            built_with = of_engine.build_config.weight_memory
        program = bind_program(layout.program, layout.tensors, str(model.directory))
        identity = str(model.directory) if program.num_ranks == 1 else ""
        info = _core.cpu_engine_info(program, kernels=config.kernels, identity=identity)
        return cls(model, layout, program, info, built_with or 0)

    def check_weight_memory(self, config: ExecutorConfig) -> None:
        """Raises ConfigError if the engine cannot have the configuration's weight_memory."""
        num_bytes = self.weight_memory if config.weight_memory is None else config.weight_memory
        if not num_bytes:
            return
        require_one_rank(num_bytes, self.program.num_ranks, self.model.directory)
        planned = self._with_stored_weights()
        layout, program = planned.layout, planned.program
        require_room(program, layout, num_bytes, config, available_memory())
        _core.check_weight_memory(
            program, WeightMemory(path=str(self.model.directory), mapping=layout.file_bytes, num_bytes=num_bytes)
        )

    def _with_stored_weights(self) -> _Planned:
        """Returns this engine with weights of the sizes that the file will have."""
        plan = self.model.plan
        if plan is None or not plan.build_config.compress_weights:
            return self
        compiled = plan.compile(compress_weights=True)
        layout = EngineLayout.planned(compiled.program, compiled.tensors)
        return replace(self, layout=layout, program=bind_program(layout.program, layout.tensors, str(plan.directory)))
