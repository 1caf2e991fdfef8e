"""What drafts from a request's own text bring, and cost: tokens a second of one request with and without them.

    python bench/speculation/run.py ENGINE [--tokens 256] [--repeats 9] [--window 8] [--threads N]

ENGINE is any engine directory; its weights may be random, because outputs are held to what each row is about:

- all right: embedding_bias leaves one token, so the text repeats itself and every draft is right. The most there is to
  gain, with this window.
- greedy: the engine's own greedy text after a random prompt; how much of it repeats is the model's doing.
- none right: embedding_bias leaves 24 tokens, so that what the text ends with has stood in it before; but
  no_repeat_ngram_size forbids what followed it, so no draft is ever right. The most there is to lose.

Rounds with and without drafts take turns, so that whatever else the machine does hits both. Rates are those of the
tokens after the first response; the ratio is the median of the rounds' ratios, with the middle half in brackets.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import adaptrt

PROMPT_TOKENS = 256
FEW_TOKENS = np.arange(100, 124)


def main() -> None:
    """Prints a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    lookahead = adaptrt.LookaheadDecodingConfig(options.window, 4, 4)
    off = adaptrt.LookaheadDecodingConfig(1, 1, 0)
    config = adaptrt.ExecutorConfig(
        num_threads=options.threads,
        iter_stats_max_iterations=options.tokens + 1,
        # Each round computes its prompt.
        kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=False),
    )
    with adaptrt.Executor(options.engine, executor_config=config) as executor:
        for name, fields in _rows(executor.engine_info.vocab_size).items():
            rounds = []
            for _ in range(options.repeats + 1):
                without = _rate(executor, fields, off, options.tokens)
                rounds.append((without, _rate(executor, fields, lookahead, options.tokens)))
            # The first round is the warm-up.
            _print_row(name, rounds[1:])


def _rows(vocab_size: int) -> dict[str, dict[str, Any]]:
    """By name, the fields of the requests."""
    random = np.random.default_rng(0)
    prompt = random.integers(100, min(vocab_size, 10000), PROMPT_TOKENS)
    one, few = (np.full(vocab_size, -np.inf, np.float32) for _ in range(2))
    one[FEW_TOKENS[0]] = 0.0
    few[FEW_TOKENS] = 0.0
    return {
        "all right": {"input_token_ids": prompt, "embedding_bias": one},
        "greedy": {"input_token_ids": prompt},
        "none right": {
            "input_token_ids": random.choice(FEW_TOKENS, PROMPT_TOKENS),
            "embedding_bias": few,
            "sampling_config": adaptrt.SamplingConfig(no_repeat_ngram_size=3, top_p=1.0),
        },
    }


class _Round:
    """What came of a request."""

    def __init__(self, tokens: list[int], rate: float, drafts: list[adaptrt.SpecDecodingStats]) -> None:
        self.tokens = tokens
        self.rate = rate
        self.num_drafts = sum(step.num_draft_tokens for step in drafts)
        self.num_right = sum(step.num_accepted_tokens for step in drafts)


def _rate(
    executor: adaptrt.Executor, fields: dict[str, Any], lookahead: adaptrt.LookaheadDecodingConfig, max_tokens: int
) -> _Round:
    executor.get_latest_iteration_stats()
    request = adaptrt.Request(max_tokens=max_tokens, streaming=True, lookahead_config=lookahead, **fields)
    request_id = executor.enqueue_request(request)
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
    return _Round(tokens, rate, [step for step in steps if step is not None])


def _print_row(name: str, rounds: list[tuple[_Round, _Round]]) -> None:
    assert all(drafted.tokens == without.tokens for without, drafted in rounds), "drafts have changed the output"
    off, on = (statistics.median(both[i].rate for both in rounds) for i in range(2))
    ratios = [drafted.rate / without.rate for without, drafted in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    drafted = rounds[-1][1]
    print(
        f"{name}: {off:.1f} tok/s without drafts, {on:.1f} with, {middle:.3f} x ({low:.3f} to {high:.3f}); "
        f"{drafted.num_right} of {drafted.num_drafts} drafts right"
    )


if __name__ == "__main__":
    main()
