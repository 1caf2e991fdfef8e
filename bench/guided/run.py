"""Measures the cost of guided decoding: tokens per second with and without a JSON schema.

    python bench/guided/run.py ENGINE [--requests 16] [--tokens 128] [--repeats 9] [--threads N]

ENGINE is a directory with a tokenizer.json and end tokens. Rounds of guided and of free requests alternate, so that
disturbances of the machine affect both. The loss compares the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import adaptrt

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
PROMPT_TOKENS = 32


def main() -> None:
    """Prints tokens per second of both, and the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    guide = adaptrt.GuidedDecodingParams(
        adaptrt.GuidedDecodingParams.GuideType.EBNF_GRAMMAR, f"start: record+\nrecord: %json {json.dumps(RECORD)}\n"
    )
    tokenizer = Tokenizer.from_file(str(options.engine / "tokenizer.json"))
    rates: dict[bool, list[float]] = {False: [], True: []}
    config = adaptrt.ExecutorConfig(num_threads=options.threads)
    with adaptrt.Executor(options.engine, executor_config=config) as executor:
        ends = executor.engine.config.pretrained_config.eos_token_id
        executor.check_guide(guide)
        for _ in range(options.repeats + 1):
            for guided in rates:
                rates[guided].append(_rate(executor, guide if guided else None, options, tokenizer, ends))
    # The first round of each is the warm-up.
    free, guided_rate = (statistics.median(rates[guided][1:]) for guided in (False, True))
    print(f"free {free:.1f} tok/s, guided {guided_rate:.1f} tok/s, lost {100 * (1 - guided_rate / free):.2f}%")


def _rate(
    executor: adaptrt.Executor,
    guide: adaptrt.GuidedDecodingParams | None,
    options: argparse.Namespace,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
) -> float:
    generator = np.random.default_rng(0)
    # Without an end_id, only the guide can end an output. The bias on end tokens prevents that.
    bias = np.zeros(executor.engine_info.vocab_size, np.float32)
    bias[list(ends)] = -np.inf
    requests = [
        adaptrt.Request(
            generator.integers(100, min(1000, tokenizer.get_vocab_size()), PROMPT_TOKENS),
            options.tokens,
            sampling_config=adaptrt.SamplingConfig(top_p=1.0, seed=number),
            embedding_bias=bias,
            guided_decoding_params=guide,
        )
        for number in range(options.requests)
    ]
    start = time.perf_counter()
    for request_id in executor.enqueue_requests(requests):
        for response in executor.await_responses(request_id):
            assert not response.has_error(), response.error_msg
            assert response.result.finish_reasons[0] is adaptrt.FinishReason.LENGTH
    return options.requests * options.tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
