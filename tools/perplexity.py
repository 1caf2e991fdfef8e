"""Measures engines on a text: the perplexity of each, and how far others are from the first one.

The text is cut into windows of tokens; each token but the first of a window is predicted from those before it there.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from .._core import ConfigError, ExecutorConfig, ModelType, OutputConfig, Request, RequestError
from ..runtime.executor import Executor
from ..runtime.llm import TOKENIZER_FILE, load_tokenizer

Array = np.ndarray[Any, np.dtype[Any]]

DEFAULT_WINDOW: Final = 512


@dataclass
class Quality:
    """What an engine made of a text, gathered window by window."""

    tokens: int = 0
    """That were predicted."""
    negative_log_likelihood: float = 0.0
    divergence: float = 0.0
    """Sum over the tokens of the Kullback-Leibler divergence of this engine's distribution from the first one's."""
    same_choices: int = 0
    """Tokens for which the most probable one is that of the first engine."""

    def add(self, log_probabilities: Array, expected: Array, reference: Array) -> None:
        """Takes in log probabilities [tokens, vocabulary] for `expected`; `reference` are the first engine's."""
        self.tokens += len(expected)
        self.negative_log_likelihood -= float(log_probabilities[np.arange(len(expected)), expected].sum())
        self.divergence += float((np.exp(reference) * (reference - log_probabilities)).sum())
        self.same_choices += int((reference.argmax(axis=1) == log_probabilities.argmax(axis=1)).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log likelihood; infinite where that is too great."""
        mean = self.negative_log_likelihood / self.tokens
        return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf


def measure(engines: Sequence[Path], token_ids: Sequence[int], window: int) -> list[Quality]:
    """The quality of each engine on the tokens; divergences are from the first. Raises what Executor raises."""
    results = [Quality() for _ in engines]
    with ExitStack() as stack:
        executors = [
            stack.enter_context(Executor(engine, ModelType.DECODER_ONLY, ExecutorConfig())) for engine in engines
        ]
        _check_window(min(window, len(token_ids)), executors, engines)
        for first in range(0, len(token_ids) - 1, window):
            ids = list(token_ids[first : first + window])
            if len(ids) < 2:
                break
            expected = np.asarray(ids[1:])
            of_first: Array | None = None
            for executor, result in zip(executors, results, strict=True):
                log_probabilities = _log_probabilities(executor, ids)
                if of_first is None:
                    of_first = log_probabilities
                result.add(log_probabilities, expected, of_first)
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "--engine_dir", type=Path, nargs="+", required=True, metavar="DIR",
        help="engines to measure; the others are compared with the first",
    )  # fmt: skip
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="text to read, in UTF-8")
    parser.add_argument(
        "--window", type=int, default=DEFAULT_WINDOW, metavar="N", help="tokens of a window (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line for each engine."""
    if args.window < 2:
        raise ConfigError(f"window is {args.window}; it must be at least 2")
    token_ids = _tokens_of(args.text, args.engine_dir)
    width = max(len(str(engine)) for engine in args.engine_dir)
    for engine, quality in zip(args.engine_dir, measure(args.engine_dir, token_ids, args.window), strict=True):
        line = f"{engine!s:<{width}}  perplexity {quality.perplexity:.4f} over {quality.tokens} tokens"
        if engine != args.engine_dir[0]:
            line += (
                f", divergence {quality.divergence / quality.tokens:.5f} nats a token, the same choice for "
                f"{quality.same_choices / quality.tokens:.2%}"
            )
        print(line)
    return 0


def _check_window(tokens: int, executors: Sequence[Executor], engines: Sequence[Path]) -> None:
    """Refuses windows that some engine does not take as a prompt, beside the one token that a request asks for."""
    for engine, executor in zip(engines, executors, strict=True):
        build = executor.engine.config.build_config
        assert build.max_input_len is not None
        assert build.max_seq_len is not None
        limit = min(build.max_input_len, build.max_seq_len - 1)
        if tokens > limit:
            raise ConfigError(
                f"windows of {tokens} tokens are too long for {engine}, with max_input_len {build.max_input_len} and "
                f"max_seq_len {build.max_seq_len}; accepted: window 2 to {limit}"
            )


def _tokens_of(text: Path, engines: Sequence[Path]) -> list[int]:
    """The text as tokens of the engines, which must agree about them."""
    tokenizers = {engine: engine / TOKENIZER_FILE for engine in engines}
    missing = [str(engine) for engine in engines if not engine.is_dir()]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: is no directory")
    missing = [str(path) for path in tokenizers.values() if not path.is_file()]
    if missing:
        raise ConfigError(f"there is no tokenizer: {', '.join(missing)}")
    first = tokenizers[engines[0]]
    differing = [str(path) for path in tokenizers.values() if path.read_bytes() != first.read_bytes()]
    if differing:
        raise ConfigError(f"{', '.join(differing)}: differs from {first}; engines are compared on the same tokens")
    try:
        content = text.read_text(encoding="utf-8")
    except OSError as reason:
        raise ConfigError(f"{text}: cannot be read: {reason.strerror}") from None
    except UnicodeDecodeError as reason:
        raise ConfigError(f"{text}: cannot be read: {reason}") from None
    ids: list[int] = load_tokenizer(first).encode(content).ids
    if len(ids) < 2:
        raise ConfigError(f"{text}: its tokens are {len(ids)}; at least 2 are needed to predict one")
    return ids


def _log_probabilities(executor: Executor, ids: Sequence[int]) -> Array:
    """float64 [len(ids) - 1, vocabulary] of the tokens after the first."""
    output = OutputConfig(return_context_logits=True)
    request = executor.enqueue_request(Request(list(ids), 1, output_config=output))
    response = executor.await_responses(request)[-1]
    if response.has_error():
        raise RequestError(response.error_msg)
    logits = np.asarray(response.result.context_logits)[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    result: Array = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return result
