"""Log probs of tokens in a request's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from .._core import Result


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log prob of one token, and the most likely tokens at its position."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log prob), most likely first."""
    text_offset: int = 0
    """Position of the token's text in characters from the beginning of the answer; 0 for prompt tokens."""


def limited(entries: Sequence[TokenLogProbs], num_tops: int) -> tuple[TokenLogProbs, ...]:
    """Returns the entries with at most `num_tops` most likely tokens each."""
    return tuple(entry if len(entry.top) <= num_tops else replace(entry, top=entry.top[:num_tops]) for entry in entries)


def answer_log_probs(
    results: Sequence[Result], tokens: Sequence[int], num_before: int, offsets: Sequence[int], beam: int = 0
) -> tuple[TokenLogProbs, ...]:
    """Returns the log probs of `tokens`, the new tokens in results; num_before: number of tokens before them."""
    # Each result has the log probs of all tokens so far, but the most likely tokens only for its own tokens.
    log_probs = results[-1].log_probs[beam][num_before:] if results[-1].log_probs else []
    tops = [top for result in results if result.top_log_probs for top in result.top_log_probs[beam]]
    return tuple(
        TokenLogProbs(token, log_prob, tuple(top), offset)
        for token, log_prob, top, offset in zip(tokens, log_probs, tops or repeat(()), offsets, strict=False)
    )


def prompt_log_probs(
    result: Result, prompt: Sequence[int], num_virtual_tokens: int
) -> tuple[TokenLogProbs, ...] | None:
    """Returns the log probs of the prompt's tokens from the second on; None if the request ended before they were
    computed.

    Those of virtual tokens are left out.
    """
    if result.prompt_log_probs is None:
        return None
    log_probs = result.prompt_log_probs[num_virtual_tokens:]
    tops = result.prompt_top_log_probs[num_virtual_tokens:] if result.prompt_top_log_probs else repeat(())
    return tuple(
        TokenLogProbs(token, log_prob, tuple(top))
        for token, log_prob, top in zip(prompt[1:], log_probs, tops, strict=False)
    )
