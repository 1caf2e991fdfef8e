"""Requests of an executor whose answers are texts."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Sequence

from .._core import (
    ConfigError,
    ExecutorClosedError,
    GuidedDecodingParams,
    OutputConfig,
    PoolingParams,
    Request,
    RequestError,
    SamplingConfig,
)
from ..formats.models.encoder_decoder import EncoderDecoderConfig
from .adapter_tokenizers import Tokenizers
from .answer import Answer
from .executor import Executor
from .llm_prompts import has_idle_temperature, is_greedy
from .loaded_engine import LoadedEngine
from .pooled import FloatArray, PromptTokens, rows_of
from .text_bound import max_prompt_tokens
from .text_stream import TextStream


class TextRequests:
    """Makes requests that end with the model's end tokens or with stop texts."""

    def __init__(self, executor: Executor, tokenizers: Tokenizers) -> None:
        self._executor = executor
        self._tokenizers = tokenizers
        self._decoder_start = decoder_start(executor.engine)
        self._num_token_types = executor.engine_info.num_token_types
        self._has_warned = False
        self._max_prompt_tokens = max_prompt_tokens(executor.engine_info)

    def token_ids(self, text: str, lora: str | None, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a prompt with the adapter's tokenizer. Raises TextTooLongError for a too long text."""
        encoding = self._tokenizers.of(lora).encode(
            text, self._max_prompt_tokens, "the prompt", add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    def prompt_ids(self, prompt: str | list[int], lora: str | None) -> list[int]:
        """Returns the tokens of a text as token_ids() does, or the given tokens."""
        return self.token_ids(prompt, lora) if isinstance(prompt, str) else prompt

    def pair_tokens(self, first: str, second: str, lora: str | None) -> PromptTokens:
        """Returns the tokens of two texts with the separators of the adapter's tokenizer. Raises like token_ids()."""
        encoding = self._tokenizers.of(lora).encode((first, second), self._max_prompt_tokens, "the pair of texts")
        return PromptTokens.of_pair(encoding, self._num_token_types)

    def ask(
        self,
        prompt: Sequence[int],
        lora: str | None,
        max_tokens: int,
        sampling_config: SamplingConfig | None,
        stop: str | Sequence[str],
        guided_decoding_params: GuidedDecodingParams | None,
        *,
        streaming: bool = True,
        n: int = 1,
    ) -> Answer:
        """Makes a request. Raises RequestError or AdapterError if it is rejected.

        The arguments are those of LLM.generate(). streaming: text arrives with each token.
        """
        stop = (stop,) if isinstance(stop, str) else stop
        if sampling_config is not None and sampling_config.num_return_sequences not in (None, n):
            raise RequestError(
                f"sampling_config.num_return_sequences is {sampling_config.num_return_sequences}; accepted: None, or "
                f"{n} as asked for here (generate() takes n)"
            )
        sampling = SamplingConfig() if sampling_config is None else sampling_config
        if n > 1 and sampling.beam_width == 1 and is_greedy(sampling):
            raise RequestError(
                f"n is {n} with greedy sampling_config, which makes the same completion {n} times; expected 1, or "
                "sampling_config with top_k, top_p or min_p, or with beam_width"
            )
        self._warn_if_idle(sampling)
        if sampling.beam_width > 1:
            if stop:
                raise RequestError(
                    f"stop is given with sampling_config.beam_width {sampling.beam_width}; accepted: none, because "
                    "beams end with tokens"
                )
            sampling = copy.copy(sampling)
            sampling.num_return_sequences = n
            streaming = False  # beams end together
        own = self._tokenizers.of(lora)
        first_text = TextStream(own.vocabulary, stop)  # raises before anything runs
        start = self._decoder_start
        request = Request(
            prompt if start is None else start,
            max_tokens,
            encoder_input_token_ids=None if start is None else prompt,
            streaming=streaming,
            sampling_config=sampling,
            output_config=OutputConfig(exclude_input_from_output=True),
            end_id=own.end_ids[0] if own.end_ids else None,
            # A request has only one end_id. Other end tokens become stop words, which Answer removes from the output
            # again.
            stop_words=[[token] for token in own.end_ids[1:]] or None,
            num_return_sequences=n,
            guided_decoding_params=guided_decoding_params,
        )
        request_id = self._executor.enqueue_request(request, adapter=lora)
        # The executor checks n first.
        texts = [first_text, *(TextStream(own.vocabulary, stop) for _ in range(n - 1))]
        return Answer(self._executor, request_id, texts, own.end_ids)

    def _warn_if_idle(self, sampling: SamplingConfig) -> None:
        """Warns once about a temperature that has no effect."""
        if not self._has_warned and has_idle_temperature(sampling):
            self._has_warned = True
            warnings.warn(
                f"sampling_config.temperature is {sampling.temperature} without top_k, top_p or min_p: the most likely "
                "token is taken each time, as in TensorRT-LLM; give top_p=1.0 to sample from all tokens",
                stacklevel=4,
            )

    def ask_for_rows(self, prompt: PromptTokens, lora: str | None, params: PoolingParams) -> PooledAnswer:
        """Makes a request that ends in rows. Raises RequestError or AdapterError if it is rejected."""
        request = Request(prompt.ids, 0, pooling_params=params, token_type_ids=prompt.types)
        return PooledAnswer(self._executor, self._executor.enqueue_request(request, adapter=lora))


class PooledAnswer:
    """A request that ends in rows."""

    def __init__(self, executor: Executor, request_id: int) -> None:
        self._executor = executor
        self._request_id = request_id
        self._is_running = True

    def rows(self) -> FloatArray:
        """Waits for the rows, float32 [width] or [tokens, width]. Raises RequestError if the request failed."""
        (response,) = self._executor.await_responses(self._request_id)
        self._is_running = False
        if response.has_error():
            raise RequestError(f"request {response.request_id}: {response.error_msg}")
        return rows_of(response.result.pooled_output)

    def close(self) -> None:
        """Cancels the request and takes its response, so that nothing of it stays in the executor."""
        if not self._is_running:
            return
        self._is_running = False
        # The executor may be closed already.
        with contextlib.suppress(RequestError, ExecutorClosedError):
            self._executor.cancel_request(self._request_id)
            self._executor.await_responses(self._request_id)


def decoder_start(engine: LoadedEngine) -> list[int] | None:
    """Returns the start tokens of the decoder if the engine has an encoder; None: no encoder.

    A forced_bos_token_id follows the start token: it is the first token that the decoder would generate anyway. Raises
    ConfigError for a model without decoder_start_token_id.
    """
    config = engine.config.pretrained_config
    if not isinstance(config, EncoderDecoderConfig):
        return None
    if not config.decoder_start_ids:
        raise ConfigError(
            f"{engine.directory}: its model has no decoder_start_token_id, so that text cannot be generated; set it in "
            "the model's config.json, or give the decoder its tokens by the executor"
        )
    return list(config.decoder_start_ids)
