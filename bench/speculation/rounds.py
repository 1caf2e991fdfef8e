"""Runs one request with and without drafts."""

from __future__ import annotations

import statistics
import time
from typing import Any

import adaptrt


class Round:
    """Result of a request."""

    def __init__(self, tokens: list[int], rate: float, drafts: list[adaptrt.SpecDecodingStats]) -> None:
        """`rate` is that of the tokens after the first response."""
        self.tokens = tokens
        self.rate = rate
        self.num_drafts = sum(step.num_draft_tokens for step in drafts)
        self.num_right = sum(step.num_accepted_tokens for step in drafts)


def measure(executor: adaptrt.Executor, window: int | None, adapter: str | None = None, **fields: Any) -> Round:
    """Runs a request with drafts of at most `window` tokens, or without drafts; `fields` are the request's."""
    executor.get_latest_iteration_stats()
    lookahead = adaptrt.LookaheadDecodingConfig(*((1, 1, 0) if window is None else (window, 4, 4)))
    request = adaptrt.Request(streaming=True, lookahead_config=lookahead, **fields)
    request_id = executor.enqueue_request(request, adapter=adapter)
    tokens: list[int] = []
    num_first, begin, is_final = 0, 0.0, False
    while not is_final:
        for response in executor.await_responses(request_id):
            assert not response.has_error(), response.error_msg
            tokens += response.result.output_token_ids[0]
            is_final = response.result.is_final
        if begin == 0.0:
            num_first, begin = len(tokens), time.perf_counter()
    rate = (len(tokens) - num_first) / (time.perf_counter() - begin)
    steps = [step.spec_decoding_stats for step in executor.get_latest_iteration_stats()]
    return Round(tokens, rate, [step for step in steps if step is not None])


def print_row(name: str, rounds: list[tuple[Round, Round]]) -> None:
    """Prints the medians of rounds without and with drafts, and of their ratios."""
    assert all(drafted.tokens == without.tokens for without, drafted in rounds), "drafts have changed the output"
    off, on = (statistics.median(both[i].rate for both in rounds) for i in range(2))
    ratios = [drafted.rate / without.rate for without, drafted in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    drafted = rounds[-1][1]
    print(
        f"{name}: {off:.1f} tok/s without drafts, {on:.1f} with, {middle:.3f} x ({low:.3f} to {high:.3f}); "
        f"{drafted.num_right} of {drafted.num_drafts} drafts right"
    )
