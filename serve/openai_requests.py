"""Converts the fields of OpenAI's routes to executor requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final, TypeVar

from starlette.requests import Request

from .._core import GuidedDecodingParams, RequestError, SamplingConfig
from ..runtime.adapter_tokenizers import TextTokenizer, Truncation
from ..runtime.adapter_versions import without_versions
from ..runtime.images.prompt import VirtualPrompt
from ..runtime.logit_bias import logit_bias_row
from ..runtime.pooled import FloatArray
from ..runtime.sampling_params import drawing_config
from ..runtime.text_requests import bad_word_tokens
from .errors import ApiError
from .generation import TextGeneration, TextRequest
from .http import read_json
from .openai_fields import (
    MAX_PRIORITY,
    GenerationFields,
    LoraRequest,
    LoraScale,
    ModelFields,
    NamedRequestFields,
    TruncationFields,
)
from .options import ServerLimits
from .records import current_request
from .service import Service, TextLengths
from .time_slices import TimeSlices

Read = TypeVar("Read", bound=NamedRequestFields)

_NEVER: Final = 2
"""Value of early_stopping for a search that goes on while another beam can become better."""


async def read_fields(service: Service, request: Request, kind: type[Read]) -> Read:
    """Reads the fields of a request; its record then has the id that they give. Raises as read_json() does."""
    fields = await read_json(request, kind, service.options.limits, service.executor.work)
    record = current_request.get()
    if record is not None:
        record.name(fields.request_id)
    return fields


async def adapter_of(service: Service, fields: ModelFields) -> str | None:
    """Returns the version of the adapter that a request names in any of its fields, as NAME@DIGEST; None: the base
    model.

    Raises ApiError for an unknown adapter, and for two different names.
    """
    named: dict[str, str | None] = {}
    if fields.model is not None:
        named["model"] = await service.adapter_of(fields.model)
    for field in ("adapter_id", "lora_path"):
        name: str | None = getattr(fields, field)
        if name is None:
            continue
        version = await service.adapters.current_version(name)
        if version is None:
            raise ApiError.not_found(f"The adapter '{name}' does not exist.", param=field)
        named[field] = version
    if fields.lora_request is not None:
        named["lora_request"] = await _adapter_of_lora_request(service, fields.lora_request)
    if fields.lora is not None:
        named["lora"] = await adapter_of_scales(service, fields.lora)
    adapters = {name for name in named.values() if name is not None}
    if len(adapters) > 1:
        said = " and ".join(f"{field} '{without_versions(name)}'" for field, name in named.items() if name is not None)
        raise ApiError(f"{said} are different adapters; expected the same adapter in all fields")
    return adapters.pop() if adapters else None


async def adapter_of_scales(service: Service, scales: Sequence[LoraScale]) -> str | None:
    """Returns the version of the weighted sum that scales describe; None: all are 0. Raises ApiError."""
    names = [adapter.name for adapter in service.adapters.list()]
    given = [scale.id for scale in scales]
    for i, number in enumerate(given):
        if number >= len(names):
            accepted = f"0 to {len(names) - 1}, as in GET /lora-adapters" if names else "none: there are no adapters"
            raise ApiError(f"lora[{i}].id is {number}; expected {accepted}", param="lora")
        if number in given[:i]:
            raise ApiError(f"lora[{i}].id is {number}, as in an earlier item; expected each once", param="lora")
    used = [(names[scale.id], scale.scale) for scale in scales if scale.scale != 0]
    if not used:
        return None
    if len(used) == 1 and used[0][1] == 1:
        return await service.adapters.current_version(used[0][0])
    # A plus sign would begin the next term.
    named = "+".join(f"{name}:{scale!r}".replace("e+", "e") for name, scale in used)
    if any("+" in name for name, _ in used):
        raise ApiError(
            f"lora has the sum '{named}', where names have '+'; expected one adapter of scale 1", param="lora"
        )
    version = await service.adapters.current_version(named)
    if version is None:
        raise ApiError.not_found(f"The sum '{named}' cannot be found.", param="lora")
    return version


async def _adapter_of_lora_request(service: Service, asked: LoraRequest) -> str | None:
    """Returns the version of the adapter that lora_request names.

    Loads the adapter from its path if the server may load adapters. Raises ApiError for an unknown adapter, and for one
    that was loaded from another path.
    """
    name, path = asked.lora_name, asked.lora_path
    if not await service.adapters.find(name):
        record = current_request.get()
        may_load = service.options.enable_lora_loading and (record is None or record.may_change_adapters)
        if not path or not may_load:
            raise ApiError.not_found(f"The adapter '{name}' does not exist.", param="lora_request.lora_name")
        await service.adapters.load(name, await service.adapters.resolve(name, path, replace=False))
    elif path and not service.adapters.is_from(name, path):
        raise ApiError(
            f"lora_request.lora_path is '{path}', but the adapter '{name}' was loaded from another directory; "
            "expected that directory, or no path",
            param="lora_request.lora_path",
        )
    return await service.adapters.current_version(name)


def text_request(
    service: Service,
    fields: GenerationFields,
    *,
    prompt: Sequence[int],
    adapter: str | None,
    own: TextTokenizer,
    embedding_bias: FloatArray | None,
    max_tokens: int,
    top_log_probs: int | None,
    guide: GuidedDecodingParams | None,
    prompt_log_probs: int | None = None,
    shown_special: Sequence[str] = (),
    virtual_prompt: VirtualPrompt | None = None,
) -> TextRequest:
    """Makes the text request of a prompt.

    Raises ApiError for more answers than the engine generates at once, and for bad_words without tokens.

    own: the adapter's tokenizer. embedding_bias: result of embedding_bias_of() for the fields. shown_special: see
    TextRequest.
    """
    if fields.use_beam_search and guide is not None:
        raise ApiError(
            "use_beam_search is true with a guide or a required call; expected one of them: the state of a guide "
            "cannot be copied between beams",
            param="use_beam_search",
        )
    return TextRequest(
        prompt=prompt,
        adapter=adapter,
        max_tokens=max_tokens,
        sampling=_beams(service, fields) if fields.use_beam_search else _sampling(service, fields),
        stop=tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        include_stop=fields.include_stop_str_in_output,
        ignore_eos=fields.ignore_eos,
        include_end=service.options.include_eos if fields.include_eos is None else fields.include_eos,
        bad_words=_bad_words(own, fields.bad_words),
        skip_special_tokens=fields.skip_special_tokens,
        shown_special=tuple(shown_special),
        embedding_bias=embedding_bias,
        guided_decoding_params=guide,
        # Receipts have digests of log probs, which the answer does not show.
        top_log_probs=0 if fields.return_receipt and top_log_probs is None else top_log_probs,
        prompt_log_probs=prompt_log_probs,
        priority=executor_priority(fields.priority),
        cache_salt_id=salt_id(fields.cache_salt),
        num_answers=_num_answers(fields.n, service.engine_info.max_batch_size),
        virtual_prompt=virtual_prompt,
    )


def truncation_of(fields: TruncationFields, longest: int, side: str) -> Truncation | None:
    """Returns how a request cuts prompts; None: it does not.

    longest: maximum number of tokens of a prompt. side: side on which tokens are left out unless the request says it.

    Raises ApiError if prompts would still be too long.
    """
    asked = fields.truncate_prompt_tokens
    if asked is None:
        return None
    if asked > longest or longest < 1:
        raise ApiError(
            f"truncate_prompt_tokens is {asked}; expected at most {longest}, the longest prompt that leaves room for "
            "the answer",
            param="truncate_prompt_tokens",
        )
    return Truncation(longest if asked == -1 else asked, fields.truncation_side or side)


def longest_prompt(service: Service, lengths: TextLengths, num_answer_tokens: int) -> int:
    """Returns the maximum number of tokens of a prompt before an answer of this length."""
    if service.decoder_start is not None:
        return lengths.prompt
    return min(lengths.prompt, lengths.whole - num_answer_tokens)


def check_can_score_prompts(service: Service, prompt_log_probs: int | None) -> None:
    """Raises ApiError if log probs of prompts are asked for and the model has an encoder."""
    if prompt_log_probs is not None and service.decoder_start is not None:
        raise ApiError(
            "prompt_logprobs is given; expected none: the model's encoder reads the prompt, whose tokens have no log "
            "probs",
            param="prompt_logprobs",
        )


async def start_all(service: Service, requests: Sequence[TextRequest], stack: AsyncExitStack) -> list[TextGeneration]:
    """Queues all requests; `stack` ends them. If one fails, the queued ones end. Raises the same errors as
    TextGenerator.start.

    Raises RequestError for a guide that cannot be compiled.
    """
    # All requests of one client request have the same guide.
    if requests and (guide := requests[0].guided_decoding_params) is not None:
        await service.executor.compile_guide(guide)
    slices = TimeSlices()
    started = []
    async with AsyncExitStack() as starting:
        for request in requests:
            started.append(await starting.enter_async_context(await service.generator.start(request)))
            await slices.pause()
        stack.push_async_exit(starting.pop_all())
    return started


def check_answer_limits(
    limits: ServerLimits,
    n: int,
    prompt_lengths: Sequence[int],
    answer_lengths: Sequence[int],
    top_log_probs: int | None,
    prompt_log_probs: int | None = None,
) -> None:
    """Raises ApiError if a request asks for too many answers or log probs.

    prompt_lengths: tokens of each prompt. answer_lengths: maximum tokens of each of its n answers. top_log_probs:
    number of most likely tokens per position; None: no log probs. prompt_log_probs: the same for the prompts' tokens.
    """
    num_answers = len(prompt_lengths) * n
    if num_answers > limits.max_answers:
        raise ApiError(
            f"n is {n}, which makes {num_answers} answers with {len(prompt_lengths)} prompts; expected at most "
            f"{limits.max_answers} answers to a request (the server's --max-answers)",
            param="n",
        )
    in_prompts = 0 if prompt_log_probs is None else 1 + prompt_log_probs
    if (longest := max(prompt_lengths) * in_prompts) > limits.max_prompt_log_probs:
        raise ApiError(
            f"a prompt has {max(prompt_lengths)} tokens, which is {longest} log probs with {in_prompts} for each "
            f"token; expected at most {limits.max_prompt_log_probs} (the server's --max-prompt-log-probs)",
            param="prompt_logprobs",
        )
    in_answers = 0 if top_log_probs is None else 1 + top_log_probs
    num_log_probs = n * sum(answer_lengths) * in_answers + sum(prompt_lengths) * in_prompts
    # A single answer is not limited: a chat without max_tokens may fill the context.
    if num_answers > 1 and num_log_probs > limits.max_log_probs:
        raise ApiError(
            f"the answers may have {num_log_probs} log probs, with {in_answers} for each of their tokens and "
            f"{in_prompts} for each token of the prompts; expected at most {limits.max_log_probs} in a request (the "
            "server's --max-log-probs): ask for fewer answers, shorter ones, or fewer log probs",
            param="logprobs",
        )


def _num_answers(n: int, max_batch_size: int) -> int:
    if n > max_batch_size:
        raise ApiError(f"n is {n}; the engine generates at most {max_batch_size} answers at once", param="n")
    return n


def _sampling(service: Service, fields: GenerationFields) -> SamplingConfig:
    recommended = service.sampling_defaults.given()
    chosen = fields.model_copy(
        update={name: value for name, value in recommended.items() if name not in fields.model_fields_set}
    )
    return drawing_config(
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        min_p=chosen.min_p,
        temperature=chosen.temperature,
        seed=chosen.seed,
        min_tokens=chosen.min_tokens,
        repetition_penalty=chosen.repetition_penalty,
        presence_penalty=chosen.presence_penalty,
        frequency_penalty=chosen.frequency_penalty,
    )


def _beams(service: Service, fields: GenerationFields) -> SamplingConfig:
    """Returns a search with `n` beams. Raises ApiError for an engine that was built for fewer."""
    accepted = service.engine_info.max_beam_width
    if fields.n > accepted:
        raise ApiError(
            f"n is {fields.n} with use_beam_search; the engine was built for at most {accepted} beams "
            "(--max-beam-width)",
            param="n",
        )
    # vLLM compares beams by the model's own log probs if the temperature is 0.
    temperature = fields.temperature if "temperature" in fields.model_fields_set and fields.temperature else None
    config = SamplingConfig(
        fields.n,
        temperature=temperature,
        min_tokens=fields.min_tokens,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
    )
    if fields.n > 1:  # one beam is greedy decoding
        config.length_penalty = fields.length_penalty
        config.early_stopping = 1 if fields.early_stopping else _NEVER
    return config


def _bad_words(own: TextTokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(tuple(tokens) for tokens in bad_word_tokens(own, words))
    except RequestError as error:
        raise ApiError(str(error), param="bad_words") from error


def embedding_bias_of(fields: GenerationFields, vocab_size: int) -> FloatArray | None:
    """Returns the numbers that are added to the logits, float32 [vocab_size]; None: nothing is added.

    vocab_size: Service.vocab_size_of() of the adapter. Raises ApiError for a token outside the vocabulary.
    """
    allowed = fields.allowed_token_ids
    for name, tokens in (("logit_bias", fields.logit_bias), ("allowed_token_ids", allowed or ())):
        if (highest := max(tokens, default=0)) >= vocab_size:
            raise ApiError(f"{name} has token {highest}; the vocabulary is 0 to {vocab_size - 1}", param=name)
    if not fields.logit_bias and allowed is None:
        return None
    return logit_bias_row(fields.logit_bias, allowed, vocab_size)


def executor_priority(priority: int) -> float:
    """Converts vLLM's priority to the executor's."""
    return 0.5 - priority / (2 * MAX_PRIORITY)


def salt_id(salt: str | None) -> int | None:
    """Returns a 64-bit hash of a text salt. Two texts collide with a probability of 2^-64."""
    if salt is None:
        return None
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little")


def answer_length(
    service: Service, num_prompt_tokens: int, asked: int | None, *, lengths: TextLengths, param: str
) -> int:
    """Returns the maximum number of answer tokens: `asked`, or the rest of the context.

    lengths: Service.lengths_of() of the adapter.

    Raises ApiError if the engine or the KV cache cannot hold that many, and if the model has no lm_head.
    """
    if not service.engine_info.has_logits:
        raise ApiError("The model generates nothing: it has no lm_head. Use POST /v1/embeddings or /classify.")
    limit, longest_prompt = lengths.whole, lengths.prompt
    room = service.room_for_answer(lengths, num_prompt_tokens)
    if service.decoder_start is not None:
        return _decoder_length(longest_prompt, num_prompt_tokens, room, asked, param)
    virtual = f" in addition to {lengths.virtual} virtual tokens" if lengths.virtual else ""
    beginning = f"This model's maximum context length is {limit} tokens{virtual}"
    if num_prompt_tokens > longest_prompt:
        raise ApiError(
            f"{beginning}; a prompt may have up to {longest_prompt}, and this one has {num_prompt_tokens}.",
            param=param,
        )
    length = room if asked is None else asked
    if length < 1:
        raise ApiError(
            f"{beginning}; the prompt has {num_prompt_tokens}, which leaves none for an answer.", param=param
        )
    if num_prompt_tokens + length > limit:
        raise ApiError(
            f"{beginning}; the prompt has {num_prompt_tokens} and the answer up to {length}, together "
            f"{num_prompt_tokens + length}. Shorten the prompt or ask for fewer tokens.",
            param=param,
        )
    return length


def _decoder_length(longest_prompt: int, num_prompt_tokens: int, room: int, asked: int | None, param: str) -> int:
    """Does the same for an encoder-decoder model: the encoder reads the prompt, so only the answer counts."""
    if not 0 < num_prompt_tokens <= longest_prompt:
        raise ApiError(
            f"This model's encoder takes prompts of 1 to {longest_prompt} tokens; this one has {num_prompt_tokens}.",
            param=param,
        )
    length = room if asked is None else asked
    if not 0 < length <= room:
        raise ApiError(f"This model's answers have 1 to {room} tokens; {length} are asked for.", param=param)
    return length
