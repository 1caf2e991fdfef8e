"""The executor of an engine directory."""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

from .. import _core
from .._core import (
    AdapterError,
    AdaptrtError,
    ConfigError,
    ExecutorConfig,
    GuidedDecodingParams,
    LoraCacheFullError,
    LoraConfig,
    ModelType,
    PeftCacheConfig,
    PeftTaskNotCachedError,
    Request,
    RequestError,
)
from ..formats.adapter.adapter_copy import TOKENIZER_FILE
from ..formats.adapter.recognise import DRAFT_DIRECTORY
from ..formats.sources import Source, find_adapter
from .adapter_prefetch import prefetched_adapters
from .adapter_store import AdapterStore
from .adapter_versions import without_versions
from .checked_config import checked_config
from .draft_adapters import DraftAdapters
from .draft_adapters import task_id_of as draft_task_id_of
from .draft_vocabulary import check_draft_vocabulary
from .engine import LoadedEngine, load_engine, load_engine_bytes
from .guide_trial import GuideLimits
from .multimodal_rows import has_multimodal_fields, with_multimodal_rows
from .named_adapter import NamedAdapter, refuse_named_task_id
from .native_engine import NativeEngine
from .orchestrator.mode import device_of, num_ranks_at, orchestrator_of
from .orchestrator.workers import Workers
from .prompt_tuning import behind_virtual_tokens
from .ranks import rank_in

_LOG: Final = logging.getLogger("adaptrt")

if TYPE_CHECKING:
    _CoreType = type
else:
    _CoreType = type(_core.Executor)

_OF_RANK_0: Final = ("tokenizer", "guide_limits", "compare_vocabularies", "reserved_memory")
"""Arguments that other ranks do not need."""


class _NotKeptError(Exception):
    """Ends the trial of an adapter that is not kept."""


class ExecutorType(_CoreType):
    """Chooses the kind of an executor when it is made."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a RankExecutor on the ranks other than 0 of an engine that MPI runs, else an object of the class."""
        if orchestrator_of(_config_in(args, kwargs)) is not None:
            return super().__call__(*args, **kwargs)
        model = args[0] if args else kwargs.get("model_path")
        if isinstance(model, (str, Path)) and rank_in(num_ranks_at(Path(model))) > 0:
            model = load_engine(model)
        if isinstance(model, LoadedEngine) and model.rank > 0:
            _, model_type, config = _engine_directory(model, *args[1:], **_without(kwargs, "model_path", *_OF_RANK_0))
            return _rank_executor(model, model_type, config)
        return super().__call__(*args, **kwargs)


class Executor(_core.Executor, metaclass=ExecutorType):
    """Runs requests on an engine with in-flight batching. As a context manager, shuts down at its end."""

    @overload
    def __init__(
        self,
        model_path: str | Path | LoadedEngine,
        model_type: ModelType = ModelType.DECODER_ONLY,
        executor_config: ExecutorConfig | None = None,
        *,
        tokenizer: Path | None = None,
        guide_limits: GuideLimits | None = None,
        compare_vocabularies: bool = True,
        reserved_memory: int = 0,
    ) -> None: ...
    @overload
    def __init__(
        self,
        engine_buffer: bytes | bytearray | memoryview,
        json_config_str: str,
        model_type: ModelType = ModelType.DECODER_ONLY,
        executor_config: ExecutorConfig | None = None,
        *,
        tokenizer: Path | None = None,
        guide_limits: GuideLimits | None = None,
        compare_vocabularies: bool = True,
        reserved_memory: int = 0,
    ) -> None: ...
    def __init__(
        self,
        *args: Any,
        tokenizer: Path | None = None,
        guide_limits: GuideLimits | None = None,
        compare_vocabularies: bool = True,
        reserved_memory: int = 0,
        **kwargs: Any,
    ) -> None:
        """Loads an engine and starts: Executor(model_path, model_type, executor_config).

        model_path: the engine's directory, or the result of load_engine.
        engine_buffer, json_config_str: instead of model_path, the bytes of a native engine's rank0.engine and the text
            of its config.json. The bytes are copied in memory; adapters in the engine's directory are not loaded.

        tokenizer: the tokenizer.json of guided decoding, unless executor_config has one; None: the engine directory's.
            An engine in memory has none.
        guide_limits: limits of time, memory and length for one guide; None: the defaults of GuideLimits.
        compare_vocabularies: False: the caller has compared the draft engine's tokenizer with the engine's.
        reserved_memory: bytes that the caller will need later; caches sized by free memory leave them free.

        Also loads the engine of ExecutorConfig.draft_target_decoding_config, which runs on the same threads.

        An engine of several ranks needs one MPI process per rank, and each makes the executor. Only rank 0 accepts
        requests (can_enqueue_requests() is True there); the other executors follow rank 0 until it shuts down. With
        CommunicationMode.ORCHESTRATOR in ExecutorConfig.parallel_config, this process starts the ranks as workers that
        end with the executor.

        Raises ConfigError with all problems of the configuration, EngineError for a damaged engine, AdapterError for an
        invalid prefetch directory.
        """
        in_memory = "engine_buffer" in kwargs or isinstance(args[0] if args else None, (bytes, bytearray, memoryview))
        load, model_type, config = (_engine_in_memory if in_memory else _engine_directory)(*args, **kwargs)
        orchestrator = orchestrator_of(_config_in(args, kwargs))
        device = device_of(_config_in(args, kwargs))
        self._engine = load().with_weight_memory(config.weight_memory).with_device(device)
        _check_model_type(model_type, self._engine)
        self._adapters = AdapterStore(self._engine)
        self._executor_config = config
        self._guided_decoding_config = copy.copy(config.guided_decoding_config)
        self._tokenizer_file = self._engine.directory / TOKENIZER_FILE if tokenizer is None else tokenizer
        self._guide_limits = GuideLimits() if guide_limits is None else guide_limits
        self._guided_decoding_lock = threading.Lock()
        self._has_guided_decoding = False
        self._draft_engine = _load_draft_engine(config, device)
        if self._draft_engine is not None and compare_vocabularies:
            check_draft_vocabulary(
                self._engine.directory / TOKENIZER_FILE, self._draft_engine.directory / TOKENIZER_FILE
            )
        self._draft_adapters = (
            None if self._draft_engine is None else DraftAdapters(self._draft_engine, self._engine, self._adapters)
        )
        self._workers = None if orchestrator is None else Workers(self._engine, config, orchestrator)
        try:
            self._start(config, reserved_memory)
        except BaseException:
            self._stop_workers()
            raise
        _shut_down_at_exit(self)
        try:
            if config.guided_decoding_config is not None:
                self._begin_guided_decoding()
            self._prefetch(config)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Waits for the running step; requests that have not ended get an error response. May be called again.

        Workers that this process started have ended when it returns.
        """
        super().shutdown()
        self._stop_workers()

    def __exit__(self, *exception: Any) -> None:
        self.shutdown()

    @property
    def engine(self) -> LoadedEngine:
        """The engine; LoraConfig.from_peft takes it."""
        return self._engine

    @property
    def draft_engine(self) -> LoadedEngine | None:
        """The draft engine; LoraConfig.from_peft takes it. None without one."""
        return self._draft_engine

    @property
    def executor_config(self) -> ExecutorConfig:
        """The configuration that the executor was made with. It must not be changed."""
        return self._executor_config

    @property
    def adapters(self) -> AdapterStore:
        """Adapters that requests may name: those that the engine directory carries, and added ones."""
        return self._adapters

    def enqueue_request(self, request: Request, *, adapter: str | None = None) -> int:
        """Queues a request and returns its id.

        adapter: name of an adapter, instead of request.lora_config, or a weighted sum such as
            "a:0.7+b:0.3". It is read from disk if it is not cached. Drafts use the adapter in its subdirectory
            `draft`, or else the draft engine's own adapter of this name, unless the request has a draft_lora_config.
            Virtual tokens (PROMPT_TUNING, P_TUNING) are put before input_token_ids, and are part of the prompt in every
            way. The base model answers a prompt without the invocation tokens of an aLoRA adapter.

        Raises RequestError with all problems of the request, QueueFullError, and AdapterError (also for a task_id of
        2**63 or more; these ids are reserved for named adapters). Nothing is queued then.
        """
        _refuse_named_task_ids(request, "")
        request = self._with_rows(request, adapter)
        self._begin_guided_decoding_of([request])
        if adapter is None:
            return super().enqueue_request(request)
        if request.lora_config is not None:
            raise RequestError(
                f"the request has a lora_config, and adapter='{adapter}' is given as well; expected one of them"
            )
        if request.pooling_params is None:
            self._adapters.refuse_classifier(adapter)
        prompt = self._adapters.prompt_of(adapter)
        if prompt is not None:
            shown = without_versions(adapter)
            return super().enqueue_request(behind_virtual_tokens(request, prompt, self.engine_info.vocab_size, shown))
        named = copy.copy(request)
        named.lora_config = self._adapters.for_request(adapter, request.input_token_ids)
        if named.lora_config is None:
            return super().enqueue_request(named)
        drafts = self._draft_adapters if request.draft_lora_config is None else None
        if drafts is not None:
            named.draft_lora_config = drafts.reference(adapter)
        try:
            return super().enqueue_request(named)
        except PeftTaskNotCachedError:
            with self._adapters.changing(adapter):
                active_from = named.lora_config.active_from
                named.lora_config = self._adapters.load(adapter, active_from=active_from)
                if drafts is not None:
                    named.draft_lora_config = drafts.load(adapter)
                request_id = super().enqueue_request(named)
                self._mark_outdated_versions(adapter)
                return request_id

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Queues all requests, or none if one is rejected.

        A request may use an adapter whose weights come with an earlier request of the list. Raises like
        enqueue_request.
        """
        for index, request in enumerate(requests):
            _refuse_named_task_ids(request, f"requests[{index}].")
        requests = [self._with_rows(request, None) for request in requests]
        self._begin_guided_decoding_of(requests)
        return super().enqueue_requests(requests)

    def _with_rows(self, request: Request, adapter: str | None) -> Request:
        """Returns the request with its multimodal rows as virtual tokens."""
        if not isinstance(request, Request) or not has_multimodal_fields(request):
            return request  # another type is refused later
        info = self.engine_info  # a copy
        vocab_size = info.vocab_size
        if request.multimodal_embedding is not None and adapter is not None:
            vocab_size += self._adapters.terms_of(adapter).vocabulary_change
        return with_multimodal_rows(request, info, vocab_size)

    def draft_reference(self, name: str) -> LoraConfig | None:
        """Returns the draft_lora_config of requests with the adapter `name`, with only the task_id.

        None: drafts use no adapter, or there is no draft engine. Reads no files if the adapter is ready(). Raises
        AdapterError for an unknown name.
        """
        return None if self._draft_adapters is None else self._draft_adapters.reference(name)

    def enqueue_resolved_request(self, request: Request) -> int:
        """Queues a request whose lora_config, if any, was made by `adapters.for_request`; returns its id.

        Its draft_lora_config, if any, is a draft_reference(). Reads no files: raises PeftTaskNotCachedError if an
        adapter is not cached, and like enqueue_request.
        """
        self._begin_guided_decoding_of([request])
        return super().enqueue_request(request)

    def put_adapter(self, lora_config: LoraConfig) -> None:
        """Stores an adapter on the host level before the first request for it.

        Raises AdapterError for an adapter that cannot be served, LoraCacheFullError.
        """
        if isinstance(lora_config, LoraConfig):
            refuse_named_task_id(lora_config.task_id, "lora_config.task_id")
        super().put_adapter(lora_config)

    def pin_adapter(self, task_id: int) -> None:
        """Loads an adapter to the device level and keeps it there.

        Raises PeftTaskNotCachedError, LoraCacheFullError, and errors of loading.
        """
        refuse_named_task_id(task_id, "task_id")
        super().pin_adapter(task_id)

    def unpin_adapter(self, task_id: int) -> None:
        """Undoes pin_adapter. Raises PeftTaskNotCachedError."""
        refuse_named_task_id(task_id, "task_id")
        super().unpin_adapter(task_id)

    def unload_adapter(self, task_id: int) -> None:
        """Removes an adapter from the cache. Running requests keep it. Raises PeftTaskNotCachedError."""
        refuse_named_task_id(task_id, "task_id")
        super().unload_adapter(task_id)

    def set_adapter_outdated(self, task_id: int, outdated: bool) -> None:
        """Marks an adapter that another task_id replaces, or undoes that: it leaves the cache before others. No effect
        if it is not cached. Replaced adapters with names are marked already.
        """
        refuse_named_task_id(task_id, "task_id")
        super().set_adapter_outdated(task_id, outdated)

    def put_draft_adapter(self, lora_config: LoraConfig) -> None:
        """Stores an adapter of the draft engine before the first request for it (draft_lora_config).

        Raises AdapterError for an adapter that the draft engine cannot use, and without a draft engine;
        LoraCacheFullError.
        """
        if isinstance(lora_config, LoraConfig):
            refuse_named_task_id(lora_config.task_id, "lora_config.task_id")
        super().put_draft_adapter(lora_config)

    def unload_draft_adapter(self, task_id: int) -> None:
        """Removes an adapter of the draft engine from its cache. Running requests keep it. Raises
        PeftTaskNotCachedError, and AdapterError without a draft engine.
        """
        refuse_named_task_id(task_id, "task_id")
        super().unload_draft_adapter(task_id)

    def check_guide(self, guided_decoding_params: GuidedDecodingParams) -> None:
        """Compiles a guide, so that requests with the same guide are queued without delay.

        Raises RequestError with the reason if it cannot be compiled, and if the executor has no guided decoding.
        """
        self._begin_guided_decoding_for_request()
        super().check_guide(guided_decoding_params)

    def add_adapter(
        self,
        name: str,
        directory: str | os.PathLike[str],
        *,
        replace: bool = False,
        check: Callable[[NamedAdapter], None] | None = None,
    ) -> NamedAdapter:
        """Reads a PEFT adapter, caches it and makes its name known.

        directory: the adapter's directory, or a name of the Hub or of an object store (docs/names.md), which may cause
            a download. A Path is always a directory.
        replace: True: accepts a name that is known already. Running requests keep the old version; new ones get the
            new one, unless they ask for NAME@DIGEST.
        check: called with the adapter once it is cached; what it raises refuses the adapter. LLM and the server check
            its proof (adapter_proof.json) here. This method cannot do so itself, because other threads may take all
            responses.

        Raises AdapterError for a taken name and for an adapter that cannot be served, LoraCacheFullError, EngineError
        if its files cannot be read. Nothing has changed then.
        """
        source = find_adapter(directory)  # A download must not hold up other requests for this name.
        with (
            self._adapters.changing(name),
            self._tried_version(name, source, replace=replace, check=check) as adapter,
        ):
            ended = self._adapters.keep(adapter)
            self._mark_outdated_versions(name)
        for one in ended:
            self._unload(one)
        return adapter

    def _mark_outdated_versions(self, name: str) -> None:
        """Tells the cache which versions of an adapter are old. No effect for weighted sums. The caller is changing()
        the name.
        """
        name = self._adapters.plain_name(name)
        if not self._engine.lora.sites or not self._adapters.knows(name):
            return
        current, *old = self._adapters.versions(name)
        super().set_adapter_outdated(current.task_id, False)
        for version in old:
            super().set_adapter_outdated(version.task_id, True)

    def try_adapter(
        self,
        name: str,
        directory: str | os.PathLike[str],
        *,
        replace: bool,
        check: Callable[[NamedAdapter], None] | None = None,
    ) -> None:
        """Raises what add_adapter() with these arguments would; changes nothing."""
        source = find_adapter(directory)
        with (
            self._adapters.changing(name),
            contextlib.suppress(_NotKeptError),
            self._tried_version(name, source, replace=replace, check=check),
        ):
            raise _NotKeptError

    @contextlib.contextmanager
    def _tried_version(
        self, name: str, source: Source, *, replace: bool, check: Callable[[NamedAdapter], None] | None
    ) -> Iterator[NamedAdapter]:
        """Reads, caches and checks a version for a block that makes it known. Undoes it if anything raises."""
        adapter, config = self._adapters.read(name, source, replace=replace)
        draft = None if self._draft_adapters is None else self._draft_adapters.read(adapter)
        with (
            contextlib.nullcontext() if config is None else self._put_version(config, name),
            contextlib.nullcontext() if draft is None else self._put_draft(draft, adapter),
        ):
            if check is not None:
                check(adapter)
            yield adapter

    @contextlib.contextmanager
    def _put_version(self, config: LoraConfig, name: str) -> Iterator[None]:
        """Caches a new version of the adapter `name` for a block. If the old one is pinned, pins the new one instead.

        If anything raises, such as LoraCacheFullError, the cache has the old one as before.
        """
        known = self._adapters.versions(name) if self._adapters.knows(name) else ()
        old = known[0].task_id if known else config.task_id
        is_new = all(one.task_id != config.task_id for one in known)
        is_pinned = old != config.task_id and any(one.pinned for one in self.list_adapters() if one.task_id == old)
        if old != config.task_id:
            super().set_adapter_outdated(old, True)  # The new version takes its room before that of others.
        if is_pinned:
            # Its room may be needed for the new version.
            super().unpin_adapter(old)
        try:
            super().put_adapter(config)
            if is_pinned:
                super().pin_adapter(config.task_id)
            yield
        except BaseException:
            with contextlib.suppress(PeftTaskNotCachedError):
                if is_new:
                    super().unload_adapter(config.task_id)
                elif is_pinned:
                    super().unpin_adapter(config.task_id)
            self._mark_outdated_versions(name)
            if is_pinned:
                self._cache_adapter(name)
                super().pin_adapter(old)
            raise

    @contextlib.contextmanager
    def _put_draft(self, config: LoraConfig, adapter: NamedAdapter) -> Iterator[None]:
        """Caches a version's draft adapter for a block. If anything raises, the cache is as before."""
        try:
            super().put_draft_adapter(LoraConfig(config.task_id))
            is_new = False
        except PeftTaskNotCachedError:
            is_new = True
        try:
            try:
                super().put_draft_adapter(config)
            except AdaptrtError as error:
                raise type(error)(f"{adapter.directory / DRAFT_DIRECTORY}: {error}") from error
            yield
        except BaseException:
            if is_new:
                self._unload_draft(adapter)
            raise

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter from all cache levels. Running requests keep it. Raises AdapterError if it is unknown."""
        with self._adapters.changing(name):
            # The name goes last: a known name must have its adapter, even if the cache refuses to unload it.
            for version in self._adapters.versions(name):
                self._unload(version)
            self._adapters.remove(name)

    def _unload(self, adapter: NamedAdapter) -> None:
        if not self._engine.lora.sites:
            return
        with contextlib.suppress(PeftTaskNotCachedError):  # it may have been evicted or never requested
            super().unload_adapter(adapter.task_id)
        self._unload_draft(adapter)

    def _unload_draft(self, adapter: NamedAdapter) -> None:
        if self._draft_adapters is not None and self._adapters.has_draft(adapter):
            with contextlib.suppress(PeftTaskNotCachedError):
                super().unload_draft_adapter(draft_task_id_of(adapter))

    def load_adapter(self, name: str) -> None:
        """Caches an adapter, and the one with which the draft engine drafts for it if it has room. Reads them from disk
        if they are not cached. For virtual tokens it only reads the files.

        Raises like AdapterStore.load, and LoraCacheFullError.
        """
        with self._adapters.changing(name):
            if self._adapters.prompt_of(name) is None:
                self._cache_adapter(name)
                with contextlib.suppress(LoraCacheFullError):
                    self._cache_draft(name)

    def _cache_draft(self, name: str) -> None:
        reference = self.draft_reference(name)
        if reference is None or self._draft_adapters is None:
            return
        try:
            super().put_draft_adapter(reference)
        except PeftTaskNotCachedError:
            config = self._draft_adapters.load(name)
            if config is not None:
                super().put_draft_adapter(config)

    def _cache_adapter(self, name: str) -> None:
        try:
            super().put_adapter(self._adapters.reference(name))
        except PeftTaskNotCachedError:
            super().put_adapter(self._adapters.load(name))
            self._mark_outdated_versions(name)

    def pin_named_adapter(self, name: str) -> None:
        """Caches an adapter like load_adapter and keeps it on both levels. Has no effect on virtual tokens, which are
        not cached.

        Raises like load_adapter and pin_adapter.
        """
        self.load_adapter(name)
        if self._adapters.num_virtual_tokens(name) == 0:
            super().pin_adapter(self._adapters.task_id(name))

    def _start(self, config: ExecutorConfig, reserved_memory: int) -> None:
        """Starts the executor on this process's engine, or on the workers'."""
        if self._workers is None:
            engine = self._engine.start(config)
            memory = self._engine.available_memory()
        else:
            engine, memory = self._workers.engine, self._workers.available_memory
        draft_engine = None if self._draft_engine is None else self._draft_engine.start(config, beside=engine)
        memory = max(memory - reserved_memory, 0)
        super().__init__(engine, config, memory, draft_engine, _adapter_wait_warning(config))

    def _stop_workers(self) -> None:
        if self._workers is not None:
            self._workers.stop()

    def _begin_guided_decoding_of(self, requests: Sequence[Request]) -> None:
        """Prepares guided decoding if a request has a guide. Raises RequestError."""
        if any(isinstance(request, Request) and request.guided_decoding_params is not None for request in requests):
            self._begin_guided_decoding_for_request()

    def _begin_guided_decoding_for_request(self) -> None:
        """Prepares guided decoding. Raises RequestError if the executor cannot have it."""
        try:
            self._begin_guided_decoding()
        except ConfigError as error:
            raise RequestError(f"guided_decoding_params is given; {error}") from error

    def _begin_guided_decoding(self) -> None:
        """Prepares guided decoding at the first guide, because that takes time and memory. Raises ConfigError."""
        if self._has_guided_decoding:
            return
        with self._guided_decoding_lock:
            if self._has_guided_decoding:
                return
            # Imported here because it imports tokenizers, which an executor does not need otherwise.
            from .guided_decoding import grammar_compiler_of

            compiler = grammar_compiler_of(
                self._guided_decoding_config,
                self._tokenizer_file,
                self.engine_info.vocab_size,
                self._engine.config.pretrained_config.eos_token_id,
                self._guide_limits,
            )
            self.set_grammar_compiler(compiler)
            self._has_guided_decoding = True

    def _prefetch(self, config: ExecutorConfig) -> None:
        directory = config.peft_cache_config and config.peft_cache_config.lora_prefetch_dir
        if not directory:
            return
        for folder, lora_config in prefetched_adapters(directory):
            try:
                self.put_adapter(lora_config)
            except AdapterError as error:
                raise type(error)(f"{folder}: {error}") from error


def _adapter_wait_warning(config: ExecutorConfig) -> Callable[[], None]:
    """Returns the function that logs, when requests wait for adapters first, which field gives them room."""
    peft = config.peft_cache_config or PeftCacheConfig()
    field = "num_device_module_layer" if peft.num_device_module_layer else "device_cache_percent"

    def warn() -> None:
        _LOG.warning(
            "batches are smaller than max_batch_size because the LoRA cache's device level has no room for more "
            "adapters; a larger PeftCacheConfig.%s makes room (steps_waiting_for_adapters counts such steps)",
            field,
        )

    return warn


def _refuse_named_task_ids(request: Any, prefix: str) -> None:
    """Raises AdapterError if a caller's request has a task_id that is reserved for named adapters."""
    if not isinstance(request, Request):
        return
    if request.lora_config is not None:
        refuse_named_task_id(request.lora_config.task_id, f"{prefix}lora_config.task_id")
    if request.draft_lora_config is not None:
        refuse_named_task_id(request.draft_lora_config.task_id, f"{prefix}draft_lora_config.task_id")


def _engine_directory(
    model_path: str | Path | LoadedEngine,
    model_type: ModelType = ModelType.DECODER_ONLY,
    executor_config: ExecutorConfig | None = None,
) -> tuple[Callable[[], LoadedEngine], ModelType, ExecutorConfig]:
    config = _checked(model_type, executor_config)
    weight_memory = config.weight_memory

    def load() -> LoadedEngine:
        return (
            model_path if isinstance(model_path, LoadedEngine) else load_engine(model_path, weight_memory=weight_memory)
        )

    return load, model_type, config


def _engine_in_memory(
    engine_buffer: bytes | bytearray | memoryview,
    json_config_str: str,
    model_type: ModelType = ModelType.DECODER_ONLY,
    executor_config: ExecutorConfig | None = None,
) -> tuple[Callable[[], LoadedEngine], ModelType, ExecutorConfig]:
    config = _checked(model_type, executor_config)
    if not isinstance(json_config_str, str):
        raise TypeError(f"json_config_str is {type(json_config_str).__name__}; accepted: str, the text of config.json")
    return lambda: load_engine_bytes(engine_buffer, json_config_str), model_type, config


def _config_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the executor_config in the constructor's arguments; None without one."""
    given = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, ExecutorConfig)]
    return given[0] if given else None


def _without(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}


def _rank_executor(engine: LoadedEngine, model_type: ModelType, config: ExecutorConfig) -> Executor:
    """Makes the executor of a rank other than 0. Exchanges the same messages as rank 0's executor at its start."""
    from .rank_executor import RankExecutor  # which is an Executor

    assert isinstance(engine, NativeEngine)
    _check_model_type(model_type, engine)
    started = engine.with_weight_memory(config.weight_memory).start(config)
    engine.available_memory()
    return RankExecutor(started, engine.ranks)


def _load_draft_engine(config: ExecutorConfig, device: int | None) -> LoadedEngine | None:
    if config.draft_target_decoding_config is None:
        return None
    directory = config.draft_target_decoding_config.speculative_model_dir
    if not directory:
        raise ConfigError(
            "ExecutorConfig: draft_target_decoding_config.speculative_model_dir is empty; accepted: the directory of "
            "the draft engine"
        )
    return load_engine(directory).with_device(device)


def _checked(model_type: ModelType, executor_config: ExecutorConfig | None) -> ExecutorConfig:
    """Returns the checked configuration, before anything is loaded. Raises like Executor."""
    config = ExecutorConfig() if executor_config is None else executor_config
    if not isinstance(config, ExecutorConfig):
        raise TypeError(f"executor_config is {config!r}; accepted: ExecutorConfig, None")
    if not isinstance(model_type, ModelType):
        accepted = ", ".join(f"ModelType.{kind.name}" for kind in ModelType)
        raise TypeError(f"model_type is {model_type!r}; accepted: {accepted}")
    return checked_config(config)


def _check_model_type(model_type: ModelType, engine: LoadedEngine) -> None:
    if model_type != engine.model_type:
        raise ConfigError(
            f"ExecutorConfig: model_type is {model_type.name}; {engine.directory} is an engine of "
            f"{engine.model_type.name}"
        )


def _shut_down_at_exit(executor: Executor) -> None:
    """Shuts the executor down at exit, so that daemon threads and steps end before the interpreter does."""

    def shut_down() -> None:
        alive = reference()
        if alive is not None:
            alive.shutdown()

    reference = weakref.ref(executor, lambda _: atexit.unregister(shut_down))
    atexit.register(shut_down)
