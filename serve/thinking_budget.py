"""Limits the tokens of a model's reasoning: a guide forces its end when the budget is spent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from ..runtime.vocabulary import Vocabulary
from .errors import ApiError
from .openai_chat_fields import ChatRequest
from .service import Service
from .tools.reasoning import Budget, ReasoningForm
from .work import WorkKind

FIELD: Final = "thinking_token_budget"


async def budget_of(
    service: Service, fields: ChatRequest, form: ReasoningForm | None, opened: str, max_tokens: int | None
) -> Budget | None:
    """Returns the budget of an answer's reasoning; None: no limit, or one that the answer's length cannot exceed.

    form: how the model reasons; None: it does not. opened: see ReasoningForm. max_tokens: of the answer; None: not
    known. Raises ApiError if the model's reasoning cannot be limited.
    """
    num_tokens = fields.max_reasoning_tokens
    if num_tokens is None:
        return None
    if form is None:
        raise ApiError(
            f"{FIELD}: neither the chat template nor --reasoning_parser shows how the model reasons; leave it out",
            param=FIELD,
        )
    if max_tokens is not None and num_tokens >= max_tokens:
        return None
    of_model = await service.tokenizers.of(None)
    mark = form.end(opened)
    budget = await service.executor.work.run(
        WorkKind.TEXTS, _budget, of_model.vocabulary, mark, of_model.end_ids, num_tokens
    )
    if budget is None:
        raise ApiError(
            f"{FIELD}: the model ends its reasoning with {mark!r}, which is not one token of its tokenizer, so the end "
            "cannot be forced; give max_tokens",
            param=FIELD,
        )
    return budget


def _budget(vocabulary: Vocabulary, mark: str, end_ids: tuple[int, ...], num_tokens: int) -> Budget | None:
    tokens = _reasoning_tokens(vocabulary, mark, end_ids)
    return None if tokens is None else Budget(num_tokens, *tokens)


@lru_cache(maxsize=4)
def _reasoning_tokens(vocabulary: Vocabulary, mark: str, end_ids: tuple[int, ...]) -> tuple[str, str] | None:
    """Returns the tokens that reasoning may have, and those that end it; None: no token ends it."""
    texts, ends = [], []
    for token, token_id in vocabulary.tokenizer.get_vocab(with_added_tokens=True).items():
        if token.endswith(mark):
            ends.append(token_id)
        elif mark not in token and token_id not in vocabulary.special and token_id not in end_ids:
            texts.append(token_id)
    return (_ranges(texts), _ranges(ends)) if ends else None


def _ranges(ids: Sequence[int]) -> str:
    """Returns ids as ranges in llguidance's Lark."""
    ranges: list[list[int]] = []
    for token_id in sorted(ids):
        if ranges and token_id == ranges[-1][1] + 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return f"<[{','.join(f'{first}-{last}' if first != last else str(first) for first, last in ranges)}]>"
