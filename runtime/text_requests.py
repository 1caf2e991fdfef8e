"""Requests of an executor whose answers are texts."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Sequence

from .._core import (
    ConfigError,
    ExecutorClosedError,
    GuidedDecodingParams,
    OutputConfig,
    PoolingParams,
    Request,
    RequestError,
    Result,
    SamplingConfig,
)
from ..formats.models.encoder_decoder import EncoderDecoderConfig
from .adapter_proof import ProofCheck
from .adapter_tokenizers import TextTokenizer, Tokenizers
from .adapter_versions import without_versions
from .answer import Answer, AnswerForm
from .executor import Executor
from .images.prompt import PromptImages
from .llm_prompts import is_greedy
from .loaded_engine import LoadedEngine
from .logit_bias import logit_bias_row
from .named_adapter import NamedAdapter
from .pooled import FloatArray, PromptTokens, rows_of
from .sampling_defaults import SamplingDefaults
from .sampling_params import SamplingParams
from .text_bound import max_prompt_tokens
from .text_stream import TextStream


class TextRequests:
    """Makes requests that end with the model's end tokens or with stop texts."""

    def __init__(
        self, executor: Executor, tokenizers: Tokenizers, recommended: SamplingDefaults, seed: int | None = None
    ) -> None:
        """recommended: sampling settings of requests that do not set them.

        seed: gives the seeds of requests that have none, in their order; None: their seeds are random.
        """
        self._seeds = None if seed is None else random.Random(seed)
        self._executor = executor
        self._recommended = recommended
        self._tokenizers = tokenizers
        self._decoder_start = decoder_start(executor.engine)
        self._num_token_types = executor.engine_info.num_token_types
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
        params: SamplingParams,
        sampling_config: SamplingConfig | None,
        guided_decoding_params: GuidedDecodingParams | None,
        *,
        max_tokens: int,
        streaming: bool = True,
        images: PromptImages | None = None,
    ) -> Answer:
        """Makes a request. Raises RequestError or AdapterError if it is rejected.

        sampling_config: replaces the sampling of `params`. max_tokens: used if `params` has none, and then
            shortened to the room after the prompt.
        streaming: text arrives with each token.
        images: rows for the image tokens of the prompt.
        """
        n = 1 if params.n is None else params.n
        sampling = self._sampling(params, sampling_config, n)
        if sampling.beam_width > 1:
            streaming = False  # beams end together
        own = self._tokenizers.of(lora)
        first_text = _text_stream(own, params)  # raises before anything runs
        start = self._decoder_start
        form = self._form(prompt, lora, params, own)
        # A request has only one end_id, which is not part of its output. Other end tokens become stop words, which
        # Answer removes from the output again.
        end_id = form.end_ids[0] if form.end_ids and not form.include_end_in_tokens else None
        stop_ids = [token for token in (*form.end_ids, *form.stop_token_ids) if token != end_id]
        seen = None if images is None else images.within(prompt, self.vocab_size_of(lora))
        tokens = prompt if seen is None else seen.ids
        request = Request(
            tokens if start is None else start,
            self._default_length(prompt, lora, max_tokens) if params.max_tokens is None else params.max_tokens,
            encoder_input_token_ids=None if start is None else prompt,
            streaming=streaming,
            sampling_config=sampling,
            output_config=OutputConfig(
                return_log_probs=params.logprobs is not None,
                return_prompt_log_probs=params.prompt_logprobs is not None,
                top_log_probs=max(params.logprobs or 0, params.prompt_logprobs or 0),
                exclude_input_from_output=True,
                return_perf_metrics=params.return_perf_metrics,
            ),
            end_id=end_id,
            stop_words=[[token] for token in dict.fromkeys(stop_ids)] or None,
            bad_words=bad_word_tokens(own, params.bad_words or ()) or None,
            embedding_bias=self._embedding_bias(lora, params),
            num_return_sequences=n,
            guided_decoding_params=guided_decoding_params,
            prompt_tuning_config=None if seen is None else seen.rows,
        )
        request_id = self._executor.enqueue_request(request, adapter=lora)
        # The executor checks n first.
        texts = [first_text, *(_text_stream(own, params) for _ in range(n - 1))]
        return Answer(self._executor, request_id, texts, form)

    def _sampling(self, params: SamplingParams, given: SamplingConfig | None, n: int) -> SamplingConfig:
        """Returns the sampling of `n` completions: `given`, or else that of `params` with the LLM's next seed.

        Raises RequestError for values that exclude each other.
        """
        if given is not None and given.num_return_sequences not in (None, n):
            raise RequestError(
                f"sampling_config.num_return_sequences is {given.num_return_sequences}; accepted: None, or {n} as "
                "asked for here (generate() takes n)"
            )
        if given is not None:
            sampling = given
        else:
            sampling = params.sampling_config(self._recommended)
            if params.seed is None and self._seeds is not None:
                sampling.seed = self._seeds.getrandbits(64)
        if n > 1 and sampling.beam_width == 1 and is_greedy(sampling):
            raise RequestError(
                f"n is {n} with greedy sampling_config, which makes the same completion {n} times; expected 1, or "
                "sampling_config with top_k, top_p or min_p, or with beam_width, or sampling_params with a temperature "
                "above 0"
            )
        if sampling.beam_width == 1:
            return sampling
        if params.stop:
            raise RequestError(
                f"stop is given with sampling_config.beam_width {sampling.beam_width}; accepted: none, because beams "
                "end with tokens"
            )
        sampling = copy.copy(sampling)
        sampling.num_return_sequences = n
        return sampling

    def _default_length(self, prompt: Sequence[int], lora: str | None, max_tokens: int) -> int:
        """Returns `max_tokens`, or the room after the prompt if that is less.

        At least 1, so that the executor refuses a prompt that leaves no room.
        """
        text = prompt if self._decoder_start is None else self._decoder_start
        num_virtual = 0 if lora is None else self._executor.adapters.num_virtual_tokens(lora)
        return max(1, min(max_tokens, self._executor.engine_info.max_seq_len - len(text) - num_virtual))

    def _form(self, prompt: Sequence[int], lora: str | None, params: SamplingParams, own: TextTokenizer) -> AnswerForm:
        return AnswerForm(
            tuple(prompt),
            None if lora is None else without_versions(lora),
            end_ids=() if params.ignore_eos else own.end_ids,
            stop_token_ids=tuple(params.stop_token_ids or ()),
            include_end_in_tokens=params.include_eos,
            include_stop_in_text=params.include_stop_str_in_output,
            num_log_probs=params.logprobs,
            num_prompt_log_probs=params.prompt_logprobs,
            num_virtual_tokens=0 if lora is None else self._executor.adapters.num_virtual_tokens(lora),
            has_encoder=self._decoder_start is not None,
        )

    def _embedding_bias(self, lora: str | None, params: SamplingParams) -> FloatArray | None:
        """Returns what is added to the logits, float32 [vocab_size] with the adapter's new tokens; None: nothing."""
        if params.logit_bias is None and params.allowed_token_ids is None:
            return None
        return logit_bias_row(params.logit_bias or {}, params.allowed_token_ids, self.vocab_size_of(lora))

    def vocab_size_of(self, lora: str | None) -> int:
        """Returns the size of the vocabulary, with the adapter's new tokens."""
        vocab_size = self._executor.engine_info.vocab_size
        return vocab_size if lora is None else vocab_size + self._executor.adapters.terms_of(lora).vocabulary_change

    def check_proof(self, adapter: NamedAdapter) -> None:
        """Checks the proof of an adapter that is cached. Raises AdapterError if it fails."""
        ProofCheck(self._executor, self._tokenizers, self._results_of)(adapter)

    def _results_of(self, requests: Sequence[Request]) -> list[Result]:
        """Runs requests of one token. Raises RequestError if one fails."""
        ids: list[int] = []
        try:
            ids += [self._executor.enqueue_resolved_request(request) for request in requests]
            responses = [self._executor.await_responses(request_id)[-1] for request_id in ids]
        except BaseException:
            for request_id in ids:
                with contextlib.suppress(RequestError, ExecutorClosedError):
                    self._executor.cancel_request(request_id)
                    self._executor.await_responses(request_id)
            raise
        for response in responses:
            if response.has_error():
                raise RequestError(response.error_msg)
        return [response.result for response in responses]

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


def _text_stream(own: TextTokenizer, params: SamplingParams) -> TextStream:
    return TextStream(
        own.vocabulary,
        tuple(params.stop or ()),
        skip_special_tokens=params.skip_special_tokens,
        include_stop=params.include_stop_str_in_output,
    )


def bad_word_tokens(own: TextTokenizer, words: Sequence[str]) -> list[list[int]]:
    """Returns the token sequences of words: at the beginning of a text, and after a space.

    Raises RequestError for a word without tokens.
    """
    found = []
    for word in words:
        texts = (word, f" {word.lstrip()}")
        encoded = [list(own.tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
        if not any(encoded):
            raise RequestError(f"bad_words has {word!r}, which has no tokens; expected words that the tokenizer knows")
        found += [tokens for tokens in encoded if tokens]
    return [list(tokens) for tokens in dict.fromkeys(map(tuple, found))]


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
