"""Text in, text out, over one engine and its adapters.

Prompts are given to the tokenizer as they are; the messages of a chat go through the model's or the adapter's template.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, overload

from .._core import (
    ConfigError,
    DraftTargetDecodingConfig,
    ExecutorConfig,
    GuidedDecodingParams,
    SamplingConfig,
)
from ..builder.model_cache import EngineOptions, plan_engine
from ..common.progress import Progress, SilentProgress, progress_on
from ..formats.adapter.adapter_copy import TOKENIZER_FILE
from .adapter_tokenizers import Tokenizers, read_tokenizer, require_tokenizer
from .answer import Answer, AnswerStream, AsyncAnswer, Completion
from .chat_template import ChatTemplate
from .engine import load_engine
from .executor import Executor
from .llm_config import with_kernels, with_speculation, with_weight_memory
from .llm_prompts import Prompt, is_one_prompt, listed_prompts, text_or_ids
from .options.speculative import LookaheadDecodingConfig
from .orchestrator.mode import with_workers
from .pooled_texts import PooledTexts, names_of
from .text_requests import TextRequests

_MANY_PROMPTS: Final = 100
"""From so many on, generate() shows on a terminal how far it is."""


class LLM(PooledTexts):
    """An executor with a tokenizer: LLM(model).generate("text", lora="name")."""

    def __init__(
        self,
        model: str | Path,
        executor_config: ExecutorConfig | None = None,
        *,
        tokenizer: str | Path | None = None,
        kernels: str = "",
        weight_memory: int | str | None = None,
        speculative_config: LookaheadDecodingConfig | DraftTargetDecodingConfig | None = None,
        engine_options: EngineOptions | None = None,
    ) -> None:
        """Loads the engine and its tokenizer.json, or the one at `tokenizer`.

        model: an engine directory; or a Hugging Face model or checkpoint directory, whose engine is made on first use,
            with `engine_options`, and taken from the user's cache from then on (see engine_for).
        tokenizer: a tokenizer.json or the directory of one, in which the chat template is looked for as well.
        kernels: as ExecutorConfig.kernels, for which it stands.
        weight_memory: bytes, or a text such as "4GiB" or "all"; as ExecutorConfig.weight_memory, for which it stands.
        speculative_config: for speed alone. LookaheadDecodingConfig: drafts from each completion's own text; as
            ExecutorConfig.decoding_config, for which it stands. DraftTargetDecodingConfig: drafts of a small model, an
            engine, model or checkpoint directory as `model`, whose engine is made without engine_options; as
            ExecutorConfig.draft_target_decoding_config.

        An engine of several ranks is run by workers that this process starts, unless MPI has started it: then as many
        processes make the LLM, and on those that do not lead, this never returns: the process does as rank 0 says, and
        exits when that has shut down.

        Raises ConfigError when there is no tokenizer or it cannot be read, and what engine_for and Executor raise.
        """
        # Looked for before an engine is made, which has a copy of the model's.
        path = Path(model) / TOKENIZER_FILE if tokenizer is None else Path(tokenizer)
        if path.is_dir():
            path = path / TOKENIZER_FILE
        plan = plan_engine(model, engine_options)
        require_tokenizer(path)
        engine_dir = Path(model) if plan is None else plan.engine(progress_on())
        path = engine_dir / TOKENIZER_FILE if tokenizer is None else path
        self._template_directory = path.parent
        config = with_weight_memory(with_kernels(executor_config, kernels), weight_memory)
        config = with_speculation(config, speculative_config)
        engine = load_engine(engine_dir, weight_memory=None if config is None else config.weight_memory)
        of_model = engine.config.pretrained_config
        tokenizer_of_model = read_tokenizer(path, of_model.eos_token_id, of_model.vocab_size)
        executor = Executor(engine, engine.model_type, with_workers(config, engine), tokenizer=path)
        if not executor.can_enqueue_requests():
            executor.shutdown()
            sys.exit()
        self._executor = executor
        self._requests = TextRequests(executor, Tokenizers(tokenizer_of_model, executor.adapters))
        # Those that the executor runs at a time are the first that came, and each has a thread here that waits for it.
        self._workers = ThreadPoolExecutor(
            self._executor.engine_info.max_batch_size, thread_name_prefix="adaptrt-answers"
        )

    @property
    def executor(self) -> Executor:
        """For statistics, and for what the text level does not cover."""
        return self._executor

    # A str is a sequence of str as well, and an empty list one of ids; the first overload that fits counts.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        *,
        lora: str | None = None,
        max_tokens: int = 64,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        n: None = None,
        progress: bool | None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        lora: str | Sequence[str | None] | None = None,
        max_tokens: int = 64,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        n: None = None,
        progress: bool | None = None,
    ) -> list[Completion]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        *,
        lora: str | None = None,
        max_tokens: int = 64,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        n: int,
        progress: bool | None = None,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        lora: str | Sequence[str | None] | None = None,
        max_tokens: int = 64,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        n: int,
        progress: bool | None = None,
    ) -> list[list[Completion]]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        lora: str | Sequence[str | None] | None = None,
        max_tokens: int = 64,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        n: int | None = None,
        progress: bool | None = None,
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """Completes one prompt, or several in one batch. With an encoder, that is given the prompt.

        prompts: texts, lists of token ids, or dictionaries {"prompt": text} or {"prompt_token_ids": ids}.
        lora: the name of one of the engine's adapters for all prompts, or one (or None) for each. "a:0.7+b:0.3" is the
            weighted sum of the adapters a and b.
        stop: a text, or several, that end a completion, which ends before the first of them.
        guided_decoding_params: what completions have to be like (adaptrt[guided]).
        n: completions of each prompt, which are a list then; completion i is what the seed + i gives alone, or, with
            sampling_config.beam_width above 1, the beam that comes i-th. Beams take no stop texts. More than one needs
            beams or sampling: top_k, top_p or min_p.
        progress: show on sys.stderr how many prompts are answered; None: for 100 prompts or more, on a terminal.

        Raises RequestError or AdapterError for a prompt that is refused; the others are cancelled then.
        """
        is_one = is_one_prompt(prompts)
        listed = listed_prompts(prompts)
        names = names_of(len(listed), lora)
        answers: list[Answer] = []
        try:
            for given, name in zip(listed, names, strict=True):
                prompt = self._requests.prompt_ids(given, name)
                # Without stop strings, one response with all tokens is less work than one with each.
                streaming = bool(stop)
                answers.append(
                    self._requests.ask(
                        prompt,
                        name,
                        max_tokens,
                        sampling_config,
                        stop,
                        guided_decoding_params,
                        streaming=streaming,
                        n=1 if n is None else n,
                    )
                )
            running = answers
            with _progress(progress, len(listed)).items("prompts", len(listed)) as advance:
                # In turns: an answer that a stop string ends is cancelled soon, whichever of them it is.
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
        if n is None:
            completions = [answer.completions()[0] for answer in answers]
            return completions[0] if is_one else completions
        lists = [answer.completions() for answer in answers]
        return lists[0] if is_one else lists

    def stream(
        self,
        prompt: Prompt,
        *,
        lora: str | None = None,
        max_tokens: int = 64,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
    ) -> AnswerStream:
        """The completion's text piece by piece; giving the iterator up cancels the request.

        The request is made, or refused, when the first piece is asked for.
        """
        ids = self._requests.prompt_ids(text_or_ids(prompt, "prompt"), lora)
        return AnswerStream(
            lambda: self._requests.ask(ids, lora, max_tokens, sampling_config, stop, guided_decoding_params)
        )

    def generate_async(
        self,
        prompt: Prompt,
        *,
        lora: str | None = None,
        max_tokens: int = 64,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        streaming: bool = False,
    ) -> AsyncAnswer:
        """Completes a prompt beside a running asyncio loop: `await` it for the Completion, or `async for` its text.

        guided_decoding_params: what it has to be like (adaptrt[guided]).
        streaming: pieces of text come with each token, instead of all in one.

        The request is made at once; an adapter that is not cached is read from disk first. Raises what generate()
        raises, and RuntimeError without a running loop.
        """
        ids = self._requests.prompt_ids(text_or_ids(prompt, "prompt"), lora)
        is_streaming = streaming or bool(stop)
        answer = self._requests.ask(
            ids, lora, max_tokens, sampling_config, stop, guided_decoding_params, streaming=is_streaming
        )
        return AsyncAnswer(answer, self._workers)

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        lora: str | None = None,
        max_tokens: int = 256,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        n: None = None,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        lora: str | None = None,
        max_tokens: int = 256,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        n: int,
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        lora: str | None = None,
        max_tokens: int = 256,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        n: int | None = None,
    ) -> Completion | list[Completion]:
        """Answers a conversation, which the template of the adapter writes as text, or the model's.

        messages: in OpenAI's form, [{"role": "user", "content": "..."}, ...].
        tools: JSON schemas of functions, which the template shows to the model.
        template_variables: of the template, such as Qwen3's enable_thinking.
        n: answers, which are a list then; as generate()'s.

        Raises ConfigError when there is no template or jinja2 is not installed (adaptrt[serve]), RequestError for
        messages that the template refuses, and what generate() raises.
        """
        prompt = self._render(messages, lora, tools, template_variables)
        num_answers = 1 if n is None else n
        answer = self._requests.ask(
            prompt, lora, max_tokens, sampling_config, stop, guided_decoding_params, n=num_answers
        )
        try:
            while not answer.is_final:
                answer.next_text()
        finally:
            answer.close()
        return answer.completions()[0] if n is None else answer.completions()

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        lora: str | None = None,
        max_tokens: int = 256,
        sampling_config: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        guided_decoding_params: GuidedDecodingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> AnswerStream:
        """chat(), piece by piece; giving the iterator up cancels the request.

        Raises what chat() raises for messages; the request is made, or refused, when the first piece is asked for.
        """
        ids = self._render(messages, lora, tools, template_variables)
        return AnswerStream(
            lambda: self._requests.ask(ids, lora, max_tokens, sampling_config, stop, guided_decoding_params)
        )

    def chat_template(self, lora: str | None = None) -> ChatTemplate:
        """What writes the chats of an adapter: its own template, or the model's.

        Raises ConfigError when there is none, AdapterError for an unknown adapter.
        """
        template = self._model_template
        if lora is not None:
            # Read each time: an adapter of the name may have been replaced.
            directory = self._executor.adapters.find(lora).directory
            template = ChatTemplate.load(directory, base=template) or template
        if template is None:
            raise ConfigError(
                f"{self._template_directory}: has no chat template; give it a chat_template.jinja, or use generate()"
            )
        return template

    def shutdown(self) -> None:
        """Ends the executor."""
        self._executor.shutdown()
        self._workers.shutdown()

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

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        lora: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> list[int]:
        text = self.chat_template(lora).render(messages, tools=tools, variables=variables)
        return self._requests.token_ids(text, lora, add_special_tokens=False)  # templates write them


def _progress(asked: bool | None, num_prompts: int) -> Progress:
    is_shown = (num_prompts >= _MANY_PROMPTS and sys.stderr.isatty()) if asked is None else asked
    return progress_on() if is_shown else SilentProgress()
