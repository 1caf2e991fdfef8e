"""`adaptrt serve`: an engine and its adapters over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import logging
from pathlib import Path

from .._core import (
    AdapterError,
    ConfigError,
    DraftTargetDecodingConfig,
    ExecutorConfig,
    KvCacheConfig,
    ModelType,
    PeftCacheConfig,
)
from ..builder.commands import engine_flags
from ..builder.model_cache.first_use import EnginePlan
from ..common.progress import progress_on
from ..formats.adapter.adapter_copy import TOKENIZER_FILE
from ..formats.sources import find_model
from ..runtime.adapter_tokenizers import load_tokenizer, require_tokenizer
from ..runtime.chat_template import ChatTemplate
from ..runtime.engine import LoadedEngine, load_engine
from ..runtime.executor import Executor
from ..runtime.first_use import ModelOrEngine, make_engines
from ..runtime.guide_trial import GuideLimits
from ..runtime.images.opened import ImageLimits
from ..runtime.images.vision import memory_for_images
from ..runtime.llm_config import needs_chunks
from ..runtime.llm_options import recommended_sampling
from ..runtime.options.parallel import ParallelConfig
from ..runtime.orchestrator.mode import with_workers, without_parallel_config
from ..runtime.ranks import is_started_by_mpi
from .adapter_names import name_problem
from .command_flags import add_arguments as add_arguments
from .command_options import chat_template_of, limits_of, lora_modules_of, model_names_of, options_of


def executor_config_of(args: argparse.Namespace) -> ExecutorConfig:
    """Returns the executor's configuration. Raises ConfigError that names every field that cannot be used."""
    config = ExecutorConfig(num_threads=args.num_threads, kernels=args.kernels, max_queue_size=args.max_queue_size)
    config.kv_cache_config = KvCacheConfig(
        max_tokens=args.kv_cache_tokens,
        max_state_snapshots=args.max_state_snapshots,
        host_cache_size=args.kv_cache_dir_bytes,
        host_cache_dir=None if args.kv_cache_dir is None else str(args.kv_cache_dir),
    )
    if args.device_ids is not None:
        config.parallel_config = ParallelConfig(device_ids=args.device_ids)
    config.weight_memory = args.weight_memory
    config.max_num_tokens = args.max_step_tokens
    config.peft_cache_config = PeftCacheConfig(
        host_cache_size=args.host_cache_bytes,
        device_cache_percent=args.device_cache_percent,
        lora_storage=args.lora_storage,
    )
    if args.draft_model is not None:
        draft = DraftTargetDecodingConfig(
            speculative_model_dir=str(args.draft_model), kv_cache_size=args.draft_kv_cache_bytes
        )
        if args.max_draft_len is not None:
            draft.max_draft_len = args.max_draft_len
        config.draft_target_decoding_config = draft
    checked, problems = without_parallel_config(config)
    if problems := [*problems, *checked.validate()]:
        raise ConfigError("; ".join(problems))
    return config


def make_executor(args: argparse.Namespace) -> Executor:
    """Makes the executor. Builds the model's engine on first use; an engine of several ranks gets worker processes.

    Raises AdaptrtError. Flags, sizes, model files and adapters of lora_modules are checked before an engine is built.
    """
    config = executor_config_of(args)
    options = engine_flags.engine_options_of(args)
    model = find_model(args.model)
    planned = ModelOrEngine.of(model, options)
    draft = None if args.draft_model is None else ModelOrEngine.of(find_model(args.draft_model))
    _check_files(args, model.directory, planned.plan)
    engine, config = make_engines(config, planned, draft, progress_on())
    loaded = load_engine(engine, weight_memory=args.weight_memory)
    for name in loaded.adapters:
        if (problem := name_problem(name, model_names_of(args))) is not None:
            raise ConfigError(f"{engine}: name of an adapter that the engine carries {problem}; see served_model_name")
    config.enable_chunked_context = needs_chunks(loaded) or _divides_prompts(args, loaded)
    config.max_beam_width = loaded.config.build_config.max_beam_width
    guide_limits = GuideLimits(args.max_guide_seconds, args.max_guide_bytes, args.max_guide_characters)
    return Executor(
        loaded,
        loaded.model_type,
        with_workers(config, loaded),
        guide_limits=guide_limits,
        compare_vocabularies=draft is None,
        reserved_memory=memory_for_images(loaded, ImageLimits(max_images=args.max_images)),
    )


def _divides_prompts(args: argparse.Namespace, engine: LoadedEngine) -> bool:
    """True if max_step_tokens is given. Raises ConfigError for engines that cannot divide prompts."""
    if args.max_step_tokens is None:
        return False
    if engine.model_type is not ModelType.DECODER_ONLY:
        raise ConfigError(
            f"max_step_tokens is {args.max_step_tokens}; expected none: {engine.directory} is an engine of "
            f"{engine.model_type.name}, which computes prompts whole"
        )
    return True


def _check_files(args: argparse.Namespace, model: Path, plan: EnginePlan | None) -> None:
    """Raises AdaptrtError for files of the model or of lora_modules that a server could not use."""
    recommended_sampling(model, args.generation_config)
    given, _ = chat_template_of(args)
    if given is not None:
        ChatTemplate.of_text(given, {}, limits=limits_of(args).template)
    require_tokenizer(model / TOKENIZER_FILE)
    if plan is None or plan.is_made(progress_on()):
        return
    # If the engine exists, the service reads these files once.
    load_tokenizer(model / TOKENIZER_FILE)
    ChatTemplate.load(model)
    for name, path in lora_modules_of(args, model_names_of(args))[0]:
        try:
            plan.check_adapter(Path(path))
        except AdapterError as error:
            raise ConfigError(f"lora_modules '{name}={path}': {error}") from error


def run(args: argparse.Namespace) -> int:
    """Serves until the process is told to end."""
    try:
        from .server import bind, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"adaptrt serve needs {error.name}: pip install 'adaptrt[serve]'") from error
    options = options_of(args)
    args.model = find_model(args.model)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    # Under MPI only rank 0 listens, and the rank is known once the engine is loaded.
    listening = None if is_started_by_mpi() else bind(options)
    with contextlib.nullcontext() if listening is None else listening:
        executor = make_executor(args)
        if not executor.can_enqueue_requests():  # rank 0 serves the requests of all ranks
            executor.shutdown()
            return 0
        serve(
            executor,
            options,
            listening=listening,
            on_ready=lambda address: print(f"serving {args.model} at {address}", flush=True),
        )
    return 0
