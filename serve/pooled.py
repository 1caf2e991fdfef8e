"""Requests whose result is rows instead of tokens, for the routes of embeddings and classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from .._core import OutputConfig, PoolingParams, Request
from ..runtime.pooled import FloatArray, PromptTokens, rows_of
from .async_executor import Generation
from .errors import ApiError
from .openai_fields import PooledFields
from .openai_requests import executor_priority, salt_id, truncation_of
from .service import Service
from .time_slices import TimeSlices


@dataclass(frozen=True)
class PooledTexts:
    """The tokens of a request's texts and the rows computed for them, in the texts' order."""

    prompts: list[PromptTokens]
    rows: list[FloatArray]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(len(prompt.ids) for prompt in self.prompts)


def check_can_pool(service: Service) -> None:
    """Raises ApiError for a model that can only generate tokens."""
    if service.decoder_start is not None:
        raise ApiError(
            "The model has an encoder and a decoder: it generates text, and cannot embed or classify it. Use POST "
            "/v1/completions."
        )


async def pool(
    service: Service,
    fields: PooledFields,
    texts: Sequence[str | list[int] | tuple[str, str]],
    adapter: str | None,
    params: PoolingParams,
    change: Callable[[PromptTokens], PromptTokens] = lambda prompt: prompt,
    *,
    param: str = "input",
) -> PooledTexts:
    """Runs one executor request for each text or pair, all at once. `change` may change a request's tokens before.

    param: request field of the texts. Raises ApiError, and AdaptrtError as ServedAdapters.submit does.
    """
    made = await _prompts(service, fields, texts, adapter, param)
    slices = TimeSlices()
    prompts = []
    running = []
    async with AsyncExitStack() as stack:
        for prompt in map(change, made):
            asked = _executor_request(service, fields, prompt, params)
            running.append(await stack.enter_async_context(await service.adapters.submit(asked, adapter)))
            prompts.append(prompt)
            await slices.pause()
        rows = await _all(running)
    return PooledTexts(prompts, rows)


async def _all(running: Sequence[Generation]) -> list[FloatArray]:
    # The order of waiting does not matter, because all requests run at the same time.
    slices = TimeSlices()
    rows = []
    for generation in running:
        rows.append(rows_of((await generation.next_results())[-1].pooled_output))
        await slices.pause()
    return rows


async def _prompts(
    service: Service,
    fields: PooledFields,
    texts: Sequence[str | list[int] | tuple[str, str]],
    adapter: str | None,
    param: str,
) -> list[PromptTokens]:
    limit = service.options.limits.max_prompts
    if len(texts) > limit:
        raise ApiError(f"{param} has {len(texts)} texts; at most {limit} are accepted", param=param)
    lengths = await service.lengths_of(adapter)
    longest = min(service.engine_info.max_input_len, lengths.whole)
    truncation = truncation_of(fields, longest, "right")
    how: dict[str, Any] = {
        "add_special_tokens": fields.add_special_tokens,
        "param": param,
        "truncation": truncation,
    }
    slices = TimeSlices()
    prompts = []
    for i, text in enumerate(texts):
        await slices.pause()
        if isinstance(text, list):
            prompt = PromptTokens(text if truncation is None else truncation.cut(text))
        elif isinstance(text, str):
            prompt = PromptTokens(await service.prompts.tokenize(text, adapter, **how))
        else:
            prompt = await service.prompts.tokenize_pair(text, adapter, **how)
        where = f"{param}[{i}]" if len(texts) > 1 else param
        if not prompt.ids:
            raise ApiError(f"{where} is empty; accepted: a text of one token or more", param=param)
        if len(prompt.ids) > longest:
            raise ApiError(
                f"This model's maximum context length is {longest} tokens; {where} has {len(prompt.ids)}.", param=param
            )
        prompts.append(prompt)
    return prompts


def _executor_request(service: Service, fields: PooledFields, prompt: PromptTokens, params: PoolingParams) -> Request:
    limit = service.options.limits.max_request_seconds
    return Request(
        prompt.ids,
        0,
        output_config=OutputConfig(exclude_input_from_output=True),
        allotted_time_ms=limit * 1000 if limit > 0 else None,
        priority=executor_priority(fields.priority),
        cache_salt_id=salt_id(fields.cache_salt),
        pooling_params=params,
        token_type_ids=prompt.types,
    )
