"""Measures gain and cost of drafts from a request's own text: tokens per second of one request with and without them.

    python bench/speculation/run.py ENGINE [--tokens 256] [--repeats 9] [--window 8] [--threads N]

ENGINE is any engine directory. Its weights may be random, because each row constrains the output:

- all right: embedding_bias allows only one token, so the text repeats itself and every draft is right. This is the
  maximum gain with this window.
- greedy: the engine's own greedy text after a random prompt. Repetitions depend on the model.
- none right: embedding_bias allows 24 tokens, so the end of the text has occurred before. But no_repeat_ngram_size
  forbids the token that followed it, so every draft is wrong. This is the maximum loss.

Rounds with and without drafts alternate, so that disturbances of the machine affect both. Rates are those of the tokens
after the first response. The ratio is the median of the rounds' ratios, with the middle half in brackets.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rounds import measure, print_row

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
                without, drafted = (
                    measure(executor, window, max_tokens=options.tokens, **fields) for window in (None, options.window)
                )
                rounds.append((without, drafted))
            # The first round is the warm-up.
            print_row(name, rounds[1:])


def _rows(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Fields of the requests, by row."""
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


if __name__ == "__main__":
    main()
