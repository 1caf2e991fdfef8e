"""State that all APIs share: the executor of one engine, its adapters by name, tokenizers and templates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from .._core import AdaptrtError, ConfigError, EngineInfo
from ..formats.adapter.adapter_copy import TOKENIZER_FILE
from ..runtime.adapter_tokenizers import Tokenizers, read_tokenizer
from ..runtime.adapter_versions import without_versions
from ..runtime.executor import Executor
from ..runtime.images.vision import Vision
from ..runtime.llm_options import recommended_sampling
from ..runtime.sampling_defaults import SamplingDefaults
from ..runtime.text_requests import decoder_start
from .adapter_proofs import ServedProofs
from .adapters import ServedAdapters
from .async_executor import AsyncExecutor
from .errors import ApiError
from .generation import TextGenerator
from .image_metrics import ImageCollector
from .metrics import ExecutorCollector, ServiceMetrics
from .ollama_store import CreatedModels
from .options import ServerOptions
from .prompts import Prompts
from .statistics import ExecutorStatistics
from .tenant_gate import TenantGate
from .tokenizers_of_adapters import ServedTokenizers
from .work import WorkKind

AdaptersMaker: TypeAlias = Callable[[AsyncExecutor, ServerOptions, frozenset[str]], ServedAdapters]


@dataclass(frozen=True)
class TextLengths:
    """Maximum numbers of tokens of a request with an adapter."""

    whole: int
    """Prompt and answer together: the engine's limit, or the size of the KV cache if that is less."""
    prompt: int
    """The prompt; in an encoder-decoder model, the encoder's input."""
    virtual: int
    """Virtual tokens that the adapter puts before the prompt. They are already subtracted from the other two."""


@dataclass(frozen=True)
class Service:
    """An open service. Call open() and close() on the event loop."""

    options: ServerOptions
    engine_dir: Path
    model_names: tuple[str, ...]
    """Names of the base model. Answers show the first one."""
    created: int
    """Time of the start, in seconds since the epoch."""
    executor: AsyncExecutor
    statistics: ExecutorStatistics
    metrics: ServiceMetrics
    adapters: ServedAdapters
    tokenizers: ServedTokenizers
    prompts: Prompts
    vision: Vision
    sampling_defaults: SamplingDefaults
    generator: TextGenerator
    created_models: CreatedModels | None
    """Models that clients create; None: they may not."""
    decoder_start: tuple[int, ...] | None
    """Tokens that the decoder begins with if the model has an encoder, which reads the prompts; None: no encoder."""

    @classmethod
    async def open(
        cls, executor: Executor, options: ServerOptions, make_adapters: AdaptersMaker = ServedAdapters.of_options
    ) -> Service:
        """Opens a service with an executor, which close() shuts down. Raises ConfigError, also for an adapter of
        lora_modules.

        make_adapters: makes ServedAdapters, or a subclass that shares adapters with other servers.
        """
        engine_dir = executor.engine.directory.absolute()
        model = executor.engine.config.pretrained_config
        of_model = read_tokenizer(engine_dir / TOKENIZER_FILE, model.eos_token_id, model.vocab_size)
        metrics = ServiceMetrics()
        asynchronous = AsyncExecutor(executor, metrics, options.limits)
        asynchronous.gate = TenantGate.of_options(options, executor.engine_info.max_batch_size)
        statistics = ExecutorStatistics(asynchronous)
        model_names = options.served_model_name or (engine_dir.name,)
        named = options.limits.max_named_adapters
        metrics.registry.register(ExecutorCollector(asynchronous, statistics, metrics, model_names[0], named))
        executor.adapters.version_limits = options.limits.versions
        executor.adapters.allows_no_op = options.allow_no_op_adapters
        adapters = make_adapters(asynchronous, options, frozenset(model_names))
        of_adapters = Tokenizers(of_model, executor.adapters)
        asynchronous.check_adapter = ServedProofs(asynchronous, of_adapters).check
        tokenizers = ServedTokenizers(asynchronous, of_adapters)
        start = decoder_start(executor.engine)
        vision = Vision(executor.engine, executor.adapters, executor.executor_config, options.limits.images)
        metrics.registry.register(ImageCollector(vision))
        prompts = Prompts(asynchronous, tokenizers, options, vision)
        created_models = None
        if options.ollama_models is not None:
            created_models = CreatedModels(options.ollama_models, options.limits, asynchronous.work, adapters)
            prompts.is_trusted = created_models.has_template
        service = cls(
            options=options,
            engine_dir=engine_dir,
            model_names=model_names,
            created=int(time.time()),
            executor=asynchronous,
            statistics=statistics,
            metrics=metrics,
            adapters=adapters,
            tokenizers=tokenizers,
            prompts=prompts,
            vision=vision,
            sampling_defaults=recommended_sampling(engine_dir, options.generation_config),
            generator=TextGenerator(adapters, tokenizers, options.limits.max_request_seconds, start),
            created_models=created_models,
            decoder_start=None if start is None else tuple(start),
        )
        asynchronous.start()
        try:
            await asyncio.to_thread(vision.load)
            await _check_carried(asynchronous)
            for name, path in options.lora_modules:
                try:
                    await adapters.add_trusted(name, path)
                except ApiError as error:
                    raise ConfigError(f"lora_modules '{name}={path}': {error}") from error
            if created_models is not None:
                await created_models.open()
        except BaseException:
            await service.close()
            raise
        return service

    @property
    def engine_info(self) -> EngineInfo:
        """Information about the engine."""
        return self.executor.executor.engine_info

    async def vocab_size_of(self, adapter: str | None) -> int:
        """Returns the vocabulary size of requests with an adapter. Raises AdaptrtError."""
        own = self.engine_info.vocab_size
        return own if adapter is None else own + (await self.adapters.ready(adapter)).terms.vocabulary_change

    async def lengths_of(self, adapter: str | None) -> TextLengths:
        """Returns the maximum lengths of requests with an adapter. Raises AdaptrtError."""
        if adapter is None:
            return self._lengths(1, 0)
        ready = await self.adapters.ready(adapter)
        return self._lengths(ready.terms.rotary_factor, ready.num_virtual_tokens)

    def _lengths(self, rotary_factor: int, num_virtual_tokens: int) -> TextLengths:
        info = self.engine_info
        if info.has_kv_cache:
            in_blocks = self.executor.executor.num_kv_blocks * info.tokens_per_block
            longest = min(info.max_seq_len_of(rotary_factor), in_blocks)
        else:
            longest = min(info.max_input_len, info.max_num_tokens)
        prompt = min(info.max_input_len, longest)
        if self.decoder_start is not None:
            prompt = info.max_encoder_input_len
        return TextLengths(longest - num_virtual_tokens, prompt - num_virtual_tokens, num_virtual_tokens)

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its answer without an adapter."""
        return self._lengths(1, 0).whole

    def room_for_answer(self, lengths: TextLengths, num_prompt_tokens: int) -> int:
        """Returns the number of tokens that may follow a prompt. An encoder's input takes no room in the decoder."""
        return lengths.whole - (num_prompt_tokens if self.decoder_start is None else len(self.decoder_start))

    async def adapter_of(self, model: str) -> str | None:
        """Returns the version of the adapter that a request's `model` names, as NAME@DIGEST; None: the base model.

        Accepts an adapter's name, a version's, the base model's, and SGLang's "base:adapter". Raises ApiError for an
        unknown name.
        """
        if model in self.model_names:
            return None
        base, colon, adapter = model.partition(":")
        name = adapter if colon and base in self.model_names else model
        version = await self.adapters.current_version(name)
        if version is not None:
            return version
        raise ApiError.not_found(f"The model '{model}' does not exist.", param="model")

    def shown_model(self, adapter: str | None) -> str:
        """Returns the name that an answer shows: the adapter's without its digest, or the base model's first one."""
        return self.model_names[0] if adapter is None else without_versions(adapter)

    async def close(self) -> None:
        """Shuts the executor down; running requests fail."""
        self.vision.shutdown()
        await self.executor.close()


async def _check_carried(executor: AsyncExecutor) -> None:
    """Checks the proofs of the adapters that the engine carries. Raises ConfigError."""
    for adapter in executor.executor.adapters.list():
        try:
            await executor.work.run_alone(WorkKind.ADAPTERS, adapter.name, executor.check_carried, adapter)
        except AdaptrtError as error:
            raise ConfigError(
                f"{executor.executor.engine.directory}: the engine carries adapter '{adapter.name}': {error}; expected "
                "an engine that is built without the adapter, or without its proof"
            ) from error
