"""Limits the tokens of a model's reasoning: a guide forces its end when the budget is spent."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from ..runtime.vocabulary import Vocabulary
from .errors import ApiError
from .openai_chat_fields import ChatRequest
from .service import Service
from .tools.reasoning import Budget, BudgetEnd, ReasoningForm
from .work import WorkKind

FIELD: Final = "thinking_token_budget"
_MAX_RESTARTS: Final = 3
"""Maximum number of times that text within the budget may begin like the reasoning's end again at once."""


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
            f"{FIELD}: neither the chat template nor --reasoning-parser shows how the model reasons; leave it out",
            param=FIELD,
        )
    if max_tokens is not None and num_tokens >= max_tokens:
        return None
    of_model = await service.tokenizers.of(None)
    marks = tuple(form.ends(opened))
    ends = await service.executor.work.run(WorkKind.TEXTS, _ends_of, of_model.vocabulary, marks, of_model.end_ids)
    if ends is None:
        raise ApiError(
            f"{FIELD}: the model ends its reasoning with {' or '.join(map(repr, marks))}, which its tokenizer cannot "
            "write, so the end cannot be forced; give max_tokens",
            param=FIELD,
        )
    return Budget(num_tokens, ends)


def _ends_of(vocabulary: Vocabulary, marks: Sequence[str], end_ids: tuple[int, ...]) -> dict[str, BudgetEnd] | None:
    """Returns how reasoning ends with each of the texts; None: no tokens make one of them."""
    ends = {mark: _end_of(vocabulary, mark, end_ids) for mark in marks}
    known = {mark: end for mark, end in ends.items() if end is not None}
    return known if len(known) == len(ends) else None


@lru_cache(maxsize=4)
def _end_of(vocabulary: Vocabulary, mark: str, end_ids: tuple[int, ...]) -> BudgetEnd | None:
    """Returns how reasoning ends with a text; None: no tokens make it."""
    texts, ends, plain = [], [], {}
    for token, token_id in vocabulary.tokenizer.get_vocab(with_added_tokens=True).items():
        if token.endswith(mark):
            ends.append(token_id)
        elif token_id not in vocabulary.special and token_id not in end_ids:
            plain[token_id] = token
            if mark not in token:
                texts.append(token_id)
    if ends:
        return BudgetEnd(_ranges(texts), _ranges(ends))
    of_tokens = vocabulary.bytes
    return end_of_tokens(mark, {token_id: of_tokens.of(token) or b"" for token_id, token in plain.items()})


def end_of_tokens(mark: str, tokens: Mapping[int, bytes]) -> BudgetEnd | None:
    """Returns how reasoning ends with a text that takes several tokens; None: they cannot write it.

    tokens: bytes of the tokens that reasoning may have, by id. Tokens that begin like the text and go on differently
    count as one token of the budget. A state is the number of the text's first bytes that have been written. A rule's
    numbers are its state and how often the text may still begin again.
    """
    search = _Search(mark.encode())
    classes: dict[tuple[int, ...], list[int]] = {}
    for token_id, data in tokens.items():
        if data:
            classes.setdefault(search.states_after(data), []).append(token_id)
    prefix = f"budget_{zlib.crc32(mark.encode()):x}"
    # No token is in two expressions: the lexer does not backtrack.
    names = {states: f"{prefix}_tokens_{i}" for i, states in enumerate(classes)}
    rules = [f"{name}: {_ranges(classes[states])}" for states, name in names.items()]
    to_end = _rules_to_end(f"{prefix}_end", search.length, names)
    if not to_end:
        return None
    rules += to_end
    for depth in range(_MAX_RESTARTS + 1):
        for state in range(search.length):
            parts = []
            for after, tokens_rule in _by_next_state(state, names):
                left = depth if after > state else depth - 1
                if after == 0:
                    parts.append(tokens_rule)
                elif 0 < after < search.length and left >= 0:
                    parts.append(f"{tokens_rule} {prefix}_text_{after}_{left}")
            rules.append(f"{prefix}_text_{state}_{depth}: {' | '.join(parts)}")
    return BudgetEnd(f"{prefix}_text_0_{_MAX_RESTARTS}", f"{prefix}_end_0_{_MAX_RESTARTS}", tuple(rules))


def _rules_to_end(prefix: str, length: int, names: Mapping[tuple[int, ...], str]) -> list[str]:
    """Returns rules of the tokens from each state to the text's end; [] if they cannot be written."""
    rules: dict[tuple[int, int], str] = {}
    for depth in range(_MAX_RESTARTS + 1):
        for state in reversed(range(length)):
            parts = []
            for after, tokens_rule in _by_next_state(state, names):
                next_rule = (after, depth if after > state else depth - 1)
                if after == length:
                    parts.append(tokens_rule)
                elif after > 0 and next_rule in rules:
                    parts.append(f"{tokens_rule} {prefix}_{next_rule[0]}_{next_rule[1]}")
            if parts:
                rules[state, depth] = f"{prefix}_{state}_{depth}: {' | '.join(parts)}"
    return [*rules.values()] if (0, 0) in rules else []


def _by_next_state(state: int, names: Mapping[tuple[int, ...], str]) -> list[tuple[int, str]]:
    """Returns each state that tokens lead to, with an expression in Lark of these tokens."""
    found: dict[int, list[str]] = {}
    for states, name in names.items():
        found.setdefault(states[state], []).append(name)
    return [(after, f"({' | '.join(rules)})") for after, rules in found.items()]


class _Search:
    """Knuth, Morris and Pratt's search for a text."""

    def __init__(self, text: bytes) -> None:
        self.length = len(text)
        self._text = text
        self._fallback = [0, 0]
        for byte in text[1:]:
            self._fallback.append(self._next(self._fallback[-1], byte))

    def states_after(self, data: bytes) -> tuple[int, ...]:
        """Returns the state after a token, from each state; -1: the token goes on after the text's end."""
        usual = self._after(0, data)
        starts = {state for state in range(1, self.length) if self._fallback[state] or self._text[state] == data[0]}
        return tuple(self._after(state, data) if state in starts else usual for state in range(self.length))

    def _after(self, state: int, data: bytes) -> int:
        if not state and self._text[0] not in data:
            return 0
        for i, byte in enumerate(data):
            state = self._next(state, byte)
            if state == self.length:
                return state if i == len(data) - 1 else -1
        return state

    def _next(self, state: int, byte: int) -> int:
        while state and self._text[state] != byte:
            state = self._fallback[state]
        return state + 1 if self._text[state] == byte else 0


def _ranges(ids: Sequence[int]) -> str:
    """Returns ids as ranges in llguidance's Lark."""
    ranges: list[list[int]] = []
    for token_id in sorted(ids):
        if ranges and token_id == ranges[-1][1] + 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return f"<[{','.join(f'{first}-{last}' if first != last else str(first) for first, last in ranges)}]>"
