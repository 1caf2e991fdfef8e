"""Text in, text out, for one engine and its adapters.

Prompts go to the tokenizer unchanged; chat messages go through the model's or the adapter's template.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, overload

from .._core import (
    ConfigError,
    DraftTargetDecodingConfig,
    ExecutorConfig,
    GuidedDecodingParams,
    PromptTuningConfig,
    SamplingConfig,
)
from ..builder.model_cache.options import EngineOptions
from ..common.progress import Progress, SilentProgress, progress_on
from ..formats.adapter.adapter_copy import TOKENIZER_FILE
from ..formats.sources import find_model
from .adapter_tokenizers import Tokenizers, load_tokenizer, read_tokenizer, require_tokenizer
from .answer import Answer, AnswerStream, AsyncAnswer, Completion
from .chat_template import ChatTemplate
from .engine import load_engine
from .executor import Executor
from .first_use import ModelOrEngine, make_engines
from .images.prompt import PreparedMessages, RenderedPrompt, has_images, take_images
from .images.vision import Vision, memory_for_images
from .llm_adapters import Lora
from .llm_config import (
    with_chunks,
    with_device_ids,
    with_kernels,
    with_lora_storage,
    with_speculation,
    with_weight_memory,
)
from .llm_options import CompletionOptions, combined, combined_for_each, recommended_sampling
from .llm_prompts import (
    Prompt,
    SeeingText,
    has_idle_temperature,
    is_conversation,
    is_one_prompt,
    listed_prompts,
    text_or_ids,
)
from .memory_adapters import MemoryAdapters
from .options.speculative import LookaheadDecodingConfig
from .orchestrator.mode import with_workers
from .pooled_texts import PooledTexts
from .rank_executor import RankExecutor
from .sampling_fields import SAMPLING_FIELDS, unaccepted
from .sampling_params import SamplingParams
from .text_options import AnswerOptions, GenerateOptions
from .text_requests import TextRequests
from .unnamed_adapters import UnnamedAdapters
from .vllm_arguments import with_vllm_arguments
from .vllm_method_arguments import with_method_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MAX_TOKENS: Final = 64
"""Default length of a completion."""
_MAX_CHAT_TOKENS: Final = 256
"""Default length of an answer to a conversation."""
_IMAGE_THREADS: Final = 4
"""Maximum number of prompts whose images are encoded at a time: a step of the tower has so many tiles."""
_MANY_PROMPTS: Final = 100
"""Number of prompts from which generate() shows its progress on a terminal."""


class LLM(PooledTexts):
    """An executor with a tokenizer: LLM(model).generate("text", lora="name")."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        executor_config: ExecutorConfig | None = None,
        *,
        tokenizer: str | Path | None = None,
        kernels: str = "",
        device_ids: Sequence[int] | None = None,
        weight_memory: int | str | None = None,
        lora_storage: str = "",
        speculative_config: LookaheadDecodingConfig | DraftTargetDecodingConfig | None = None,
        engine_options: EngineOptions | None = None,
        generation_config: str | Path | None = "auto",
        seed: int | None = None,
        allow_no_op_adapters: bool = False,
        **vllm_arguments: Any,
    ) -> None:
        """Loads the engine and its tokenizer.json, or the one at `tokenizer`.

        model: an engine directory; or a Hugging Face model or checkpoint, by its directory or its name in the Hub (see
            docs/names.md), whose engine is built on first use with `engine_options` and then taken from the user's
            cache (see engine_for).
        tokenizer: a tokenizer.json, or its directory, which may also have the chat template.
        kernels: sets ExecutorConfig.kernels.
        device_ids: sets ParallelConfig.device_ids: a list with the number of the GPU that runs the engine.
        weight_memory: sets ExecutorConfig.weight_memory: bytes, or a text such as "4GiB" or "all".
        lora_storage: sets PeftCacheConfig.lora_storage.
        speculative_config: only changes the speed. LookaheadDecodingConfig takes drafts from each completion's own text
            and sets ExecutorConfig.decoding_config. DraftTargetDecodingConfig takes drafts from a small model, whose
            directory is given like `model`, and sets ExecutorConfig.draft_target_decoding_config; the small model's
            engine is built without engine_options.
        generation_config: sampling of requests that do not set it, as the model's publisher recommends it. "auto": from
            the model's generation_config.json; a directory: from the file there; "vllm" or None: none is used. Methods
            without sampling_params and sampling_config then sample if the file has a temperature, top_p, top_k or
            min_p, and otherwise take the most likely token. A sampling_config is used as it is.
        seed: gives the seeds of requests that have none, so that the same requests in the same order have the same
            completions; None: their seeds are random.
        allow_no_op_adapters: accepts adapters that change nothing, such as those of PEFT before training, which are
            refused otherwise.
        vllm_arguments: vLLM's arguments of the engine: max_model_len, max_num_seqs, max_num_batched_tokens,
            max_lora_rank, long_lora_scaling_factors and dtype are the engine_options of these meanings. Others are
            accepted with the values that ask for what happens anyway (docs/from-vllm.md).

        This process starts workers that run an engine of several ranks. If MPI started the process, every MPI process
        makes the LLM instead. On ranks other than 0, executor.can_enqueue_requests() is then False, methods for texts
        raise RequestError, and shutdown() and the end of the process wait until rank 0 has shut down.

        Raises ConfigError if the tokenizer is missing or cannot be read, and the errors of engine_for and Executor.
        """
        if seed is not None and (problem := unaccepted("seed", seed, SAMPLING_FIELDS["seed"])) is not None:
            raise ConfigError(problem)
        # Checked before an engine is built; the engine's directory gets a copy of the model's tokenizer.
        source = find_model(model)
        path = source.directory / TOKENIZER_FILE if tokenizer is None else Path(tokenizer)
        if path.is_dir():
            path = path / TOKENIZER_FILE
        planned = ModelOrEngine.of(source, with_vllm_arguments(engine_options, vllm_arguments))
        require_tokenizer(path)
        if planned.plan is not None and not planned.plan.is_made(progress_on()):
            load_tokenizer(path)  # a damaged file must not be noticed only after the engine was built
        self._recommended = recommended_sampling(source.directory, generation_config)
        config = with_device_ids(with_kernels(executor_config, kernels), device_ids)
        config = with_weight_memory(config, weight_memory)
        config = with_speculation(with_lora_storage(config, lora_storage), speculative_config)
        draft = None
        if isinstance(speculative_config, DraftTargetDecodingConfig) and speculative_config.speculative_model_dir:
            draft = ModelOrEngine.of(find_model(speculative_config.speculative_model_dir))
        engine_dir, config = make_engines(ExecutorConfig() if config is None else config, planned, draft, progress_on())
        path = engine_dir / TOKENIZER_FILE if tokenizer is None else path
        self._template_directory = path.parent
        engine = load_engine(engine_dir, weight_memory=config.weight_memory)
        config = with_chunks(config, engine, is_given=executor_config is not None)
        of_model = engine.config.pretrained_config
        tokenizer_of_model = read_tokenizer(path, of_model.eos_token_id, of_model.vocab_size)
        executor = Executor(
            engine,
            engine.model_type,
            with_workers(config, engine),
            tokenizer=path,
            compare_vocabularies=draft is None,
            reserved_memory=memory_for_images(engine),
        )
        self._executor = executor
        self._memory = MemoryAdapters()
        self._unnamed = UnnamedAdapters(executor, self._memory)
        self._sources = {}
        self._has_warned = False
        if isinstance(executor, RankExecutor):
            return  # its methods raise RequestError
        self._vision = Vision(engine, executor.adapters, config)
        executor.adapters.allows_no_op = allow_no_op_adapters
        tokenizers = Tokenizers(tokenizer_of_model, executor.adapters)
        self._text_requests = TextRequests(executor, tokenizers, self._recommended, seed)
        # One thread per request that can run at a time. The executor starts requests in the order of arrival, so the
        # running ones have the threads.
        self._workers = ThreadPoolExecutor(
            self._executor.engine_info.max_batch_size, thread_name_prefix="adaptrt-answers"
        )

    @property
    def _requests(self) -> TextRequests:
        if isinstance(self._executor, RankExecutor):
            raise self._executor.refusal("a method of LLM")
        return self._text_requests

    @property
    def executor(self) -> Executor:
        """The executor, for statistics and for functions that LLM does not have."""
        return self._executor

    # A str is a Sequence[str] too, and an empty list may be one of ids. The first matching overload counts.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        sampling_params: None = None,
        *,
        lora: Lora | None = None,
        n: None = None,
        progress: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: None = None,
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        n: None = None,
        progress: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        sampling_params: None = None,
        *,
        lora: Lora | None = None,
        n: int,
        progress: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: None = None,
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        n: int,
        progress: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Completion]]: ...
    # SamplingParams.n decides about the lists.
    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        n: int | None = None,
        progress: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        max_tokens: int | None = None,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        n: int | None = None,
        progress: bool | None = None,
        **vllm_arguments: Any,
    ) -> Any:
        """Completes one prompt, or several in one batch. In an encoder-decoder model, the encoder reads the prompt.

        prompts: texts, lists of token ids, or dictionaries {"prompt": text} or {"prompt_token_ids": ids}. For a
            vision-language model also {"prompt": text, "multi_modal_data": {"image": images}}, with one image or a
            list as in chat(); the text contains the model's placeholder, such as "<image>", for each of them.
        sampling_params: options with vLLM's names, for all prompts or a list of one per prompt. An option may not be
            given a second time as one of the arguments below.
        lora: an adapter for all prompts, or one (or None) per prompt: its name; its directory or name in the Hub, which
            is loaded on first use under this name; a LoRARequest; or a PeftModel or LoraTensors, which are used as they
            are at the call. "a:0.7+b:0.3" is the weighted sum of the adapters a and b.
        max_tokens: maximum number of tokens of a completion; None: 64, or the room after the prompt if that is less,
            unless sampling_params has another number.
        sampling_config: how tokens are chosen, with TensorRT-LLM's names and meaning, instead of sampling_params.
        stop: one or several texts. A completion ends before the first of them.
        guided_decoding_params: guide that completions must match (needs adaptrt[guided]).
        n: number of completions per prompt, returned as a list. Completion i equals the only completion with seed + i.
            With sampling_config.beam_width above 1 it is the i-th best beam. Beams accept no stop texts. n above 1
            needs beams or sampling: sampling_params, or sampling_config with top_k, top_p or min_p.
        progress: show on sys.stderr how many prompts are done; None: only for 100 prompts or more, on a terminal.
        vllm_arguments: vLLM's arguments of this method: lora_request and use_tqdm are `lora` and `progress`. Others are
            accepted with the values that ask for what happens anyway (docs/from-vllm.md).

        Raises RequestError or AdapterError if a prompt is rejected; the other prompts are cancelled then.
        """
        lora, progress, _ = with_method_arguments("generate", vllm_arguments, lora=lora, progress=progress)
        is_one = is_one_prompt(prompts)
        listed = listed_prompts(prompts)
        held = self._hold(len(listed), lora)
        options = combined_for_each(
            len(listed), sampling_params, sampling_config, self._recommended, max_tokens=max_tokens, stop=stop, n=n
        )
        self._warn_if_idle(sampling_config)
        makes = [partial(self._prompt_of, given, name) for given, name in zip(listed, held.names, strict=True)]
        with_images = [isinstance(given, SeeingText) for given in listed]
        with closing(_made_in_order(makes, with_images)) as made:
            completions = self._complete(made, held.names, options, guided_decoding_params, _MAX_TOKENS, progress)
        return completions[0] if is_one else completions

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora: Lora | None = None,
        max_tokens: int | None = None,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
    ) -> AnswerStream:
        """Returns an iterator over the completion's text. Deleting the iterator cancels the request.

        The arguments are those of generate(). The request is made, and may be rejected, at the first piece.
        """
        options = combined(sampling_params, sampling_config, self._recommended, max_tokens=max_tokens, stop=stop)
        self._warn_if_idle(sampling_config)
        held = self._hold(1, lora)
        ids = self._prompt_of(text_or_ids(prompt, "prompt"), held.names[0])
        return AnswerStream(
            lambda: self._ask(ids, held.names[0], options, guided_decoding_params, _MAX_TOKENS, streaming=True)
        )

    def generate_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora: Lora | None = None,
        max_tokens: int | None = None,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        streaming: bool = False,
    ) -> AsyncAnswer:
        """Completes a prompt on a running asyncio loop. `await` the result, or iterate over its text with `async for`.

        guided_decoding_params: guide that the completion must match (needs adaptrt[guided]).
        streaming: text arrives with each token instead of at once.

        Makes the request at once; reads an adapter that is not cached from disk first. Raises the errors of generate(),
        and RuntimeError without a running loop.
        """
        options = combined(sampling_params, sampling_config, self._recommended, max_tokens=max_tokens, stop=stop)
        self._warn_if_idle(sampling_config)
        held = self._hold(1, lora)
        ids = self._prompt_of(text_or_ids(prompt, "prompt"), held.names[0])
        answer = self._ask(ids, held.names[0], options, guided_decoding_params, _MAX_TOKENS, streaming=streaming)
        return AsyncAnswer(answer, self._workers)

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: None = None,
        *,
        lora: Lora | None = None,
        n: None = None,
        progress: bool | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: None = None,
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        n: None = None,
        progress: bool | None = None,
        **options: Unpack[AnswerOptions],
    ) -> list[Completion]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: None = None,
        *,
        lora: Lora | None = None,
        n: int,
        progress: bool | None = None,
        **options: Unpack[AnswerOptions],
    ) -> list[Completion]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        n: int | None = None,
        progress: bool | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Any: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        max_tokens: int | None = None,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        n: int | None = None,
        progress: bool | None = None,
        **vllm_arguments: Any,
    ) -> Any:
        """Answers a conversation, or several in one batch. The chat template of the adapter, or else of the model,
        converts each to text.

        messages: in OpenAI's format, [{"role": "user", "content": "..."}, ...], or a list of such lists. For a
            vision-language model, a content may be a list with parts {"type": "image", "image": ...} next to its texts:
            images of Pillow, arrays uint8 [height, width, 3], paths of files, or data: URLs (needs adaptrt[vision]).
        max_tokens: maximum number of tokens of an answer; None: 256, or the room after the prompt if that is less,
            unless sampling_params has another number.
        tools: JSON schemas of functions, which the template shows to the model.
        template_variables: the template's own, such as Qwen3's enable_thinking.
        vllm_arguments: as in generate(); chat_template_kwargs are `template_variables`.

        The other arguments are those of generate().

        Raises ConfigError without a template, RequestError for messages that the template rejects, and the errors of
        generate().
        """
        lora, progress, template_variables = with_method_arguments(
            "chat", vllm_arguments, lora=lora, progress=progress, template_variables=template_variables
        )
        is_one = is_conversation(messages)
        conversations: list[Any] = [messages] if is_one else list(messages)
        held = self._hold(len(conversations), lora)
        options = combined_for_each(
            len(conversations),
            sampling_params,
            sampling_config,
            self._recommended,
            max_tokens=max_tokens,
            stop=stop,
            n=n,
        )
        self._warn_if_idle(sampling_config)
        makes = [
            partial(self._render, conversation, name, tools, template_variables)
            for conversation, name in zip(conversations, held.names, strict=True)
        ]
        with closing(_made_in_order(makes, list(map(has_images, conversations)))) as made:
            completions = self._complete(made, held.names, options, guided_decoding_params, _MAX_CHAT_TOKENS, progress)
        return completions[0] if is_one else completions

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        lora: Lora | None = None,
        max_tokens: int | None = None,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> AnswerStream:
        """Works like chat(), but returns an iterator over the text. Deleting the iterator cancels the request.

        Raises the errors of chat() for messages. The request is made, and may be rejected, at the first piece.
        """
        options = combined(sampling_params, sampling_config, self._recommended, max_tokens=max_tokens, stop=stop)
        self._warn_if_idle(sampling_config)
        held = self._hold(1, lora)
        rendered = self._render(messages, held.names[0], tools, template_variables)
        return AnswerStream(
            lambda: self._ask(
                rendered, held.names[0], options, guided_decoding_params, _MAX_CHAT_TOKENS, streaming=True
            )
        )

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        lora: Lora | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], PromptTuningConfig | None]:
        """Returns a conversation as a Request takes it: input_token_ids, and the prompt_tuning_config with the rows of
        its images, or None if it has no images.

        The arguments are those of chat(). The rows of images are made with the adapter `lora`, so the request needs the
        same one (`executor.enqueue_request(request, adapter=...)`). Raises the errors of chat() for messages.
        """
        held = self._hold(1, lora)
        rendered = self._render(messages, held.names[0], tools, template_variables)
        if rendered.images is None:
            return rendered.ids, None
        made = rendered.images.within(rendered.ids, self._requests.vocab_size_of(held.names[0]))
        return made.ids, made.rows

    def chat_template(self, lora: Lora | None = None) -> ChatTemplate:
        """Returns the chat template of an adapter, or else of the model.

        Raises ConfigError if neither has one, AdapterError for an unknown adapter.
        """
        held = self._hold(1, lora)
        return self._template_of(held.names[0])

    def _template_of(self, version: str | None) -> ChatTemplate:
        template = self._model_template
        if version is not None:
            # Read each time, because an adapter of this name may have been replaced.
            directory = self._executor.adapters.find(version).directory
            template = ChatTemplate.load(directory, base=template) or template
        if template is None:
            raise ConfigError(
                f"{self._template_directory}: has no chat template; give it a chat_template.jinja, or use generate()"
            )
        return template

    def shutdown(self) -> None:
        """Shuts the executor down."""
        self._executor.shutdown()
        if not isinstance(self._executor, RankExecutor):
            self._vision.shutdown()
            self._workers.shutdown()
        self._memory.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    @cached_property
    def _model_template(self) -> ChatTemplate | None:
        return ChatTemplate.load(self._template_directory)

    def _complete(
        self,
        prompts: Iterable[RenderedPrompt],
        names: Sequence[str | None],
        options: Sequence[CompletionOptions],
        guide: GuidedDecodingParams | None,
        max_tokens: int,
        progress: bool | None,
    ) -> list[Completion | list[Completion]]:
        """Completes prompts in one batch. Returns each prompt's completion, or the list that its options ask for."""
        answers: list[Answer] = []
        try:
            for prompt, name, option in zip(prompts, names, options, strict=True):
                # One response with all tokens is less work than one per token, but stop texts need the latter.
                answers.append(self._ask(prompt, name, option, guide, max_tokens, streaming=False))
            running = answers
            with _progress(progress, len(answers)).items("prompts", len(answers)) as advance:
                # Takes turns, so that any answer that a stop text ends is cancelled soon.
                while running:
                    for answer in running:
                        answer.next_text()
                    still_running = [answer for answer in running if not answer.is_final]
                    advance(len(running) - len(still_running))
                    running = still_running
        except BaseException:
            for answer in answers:
                answer.close()
            raise
        lists = [answer.completions() for answer in answers]
        return [made if option.has_list else made[0] for made, option in zip(lists, options, strict=True)]

    def _ask(
        self,
        prompt: RenderedPrompt,
        lora: str | None,
        options: CompletionOptions,
        guide: GuidedDecodingParams | None,
        max_tokens: int,
        *,
        streaming: bool,
    ) -> Answer:
        return self._requests.ask(
            prompt.ids,
            lora,
            options.params,
            options.sampling_config,
            guide,
            max_tokens=max_tokens,
            streaming=streaming or bool(options.params.stop),
            images=prompt.images,
        )

    def _warn_if_idle(self, sampling_config: SamplingConfig | None) -> None:
        """Warns the caller of a public method once about a temperature that has no effect."""
        if not self._has_warned and sampling_config is not None and has_idle_temperature(sampling_config):
            self._has_warned = True
            warnings.warn(
                f"sampling_config.temperature is {sampling_config.temperature} without top_k, top_p or min_p: the most "
                "likely token is taken each time, as in TensorRT-LLM; give top_p=1.0, or sampling_params, to sample",
                stacklevel=3,
            )

    def _prompt_of(self, given: str | list[int] | SeeingText, lora: str | None) -> RenderedPrompt:
        if not isinstance(given, SeeingText):
            return RenderedPrompt(self._requests.prompt_ids(given, lora))
        prepared = PreparedMessages([], given.images, given.places)

        def tokens(text: str) -> list[int]:
            return self._requests.token_ids(text, lora)

        return RenderedPrompt(*self._vision.prompt(prepared, lora, lambda _: given.text, tokens, paths=True))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        lora: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> RenderedPrompt:
        template = self._template_of(lora)

        def render(conversation: Sequence[Mapping[str, Any]]) -> str:
            return template.render(conversation, tools=tools, variables=variables)

        def tokens(text: str) -> list[int]:
            return self._requests.token_ids(text, lora, add_special_tokens=False)  # templates write the special tokens

        if not has_images(messages):
            return RenderedPrompt(tokens(render(messages)))
        ids, images = self._vision.prompt(take_images(messages), lora, render, tokens, paths=True)
        return RenderedPrompt(ids, images)


def _made_in_order(
    makes: Sequence[Callable[[], RenderedPrompt]], with_images: Sequence[bool]
) -> Generator[RenderedPrompt, None, None]:
    """Makes prompts. If several have images, later ones are made in threads meanwhile, so that they share steps of the
    tower.

    with_images: True for each prompt with images.
    """
    if sum(with_images) < 2:
        yield from (make() for make in makes)
        return
    with ThreadPoolExecutor(min(_IMAGE_THREADS, len(makes)), thread_name_prefix="adaptrt-images") as threads:
        running = [threads.submit(make) for make in makes]
        try:
            for one in running:
                yield one.result()
        finally:
            for one in running:
                one.cancel()


def _progress(asked: bool | None, num_prompts: int) -> Progress:
    is_shown = (num_prompts >= _MANY_PROMPTS and sys.stderr.isatty()) if asked is None else asked
    return progress_on() if is_shown else SilentProgress()
