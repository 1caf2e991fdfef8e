"""Measures engines on a text: each engine's perplexity, and its difference from the first engine.

The text is cut into windows of tokens. Each token but the first of a window is predicted from the earlier tokens of the
window.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from .._core import (
    ConfigError,
    EngineError,
    ExecutorConfig,
    KvCacheConfig,
    LoraConfig,
    ModelType,
    OutputConfig,
    PeftCacheConfig,
    Request,
    RequestError,
)
from ..formats.adapter.adapter_copy import TOKENIZER_FILE
from ..formats.engine.build_config import BuildConfig
from ..formats.engine.engine_config import EngineConfig
from ..formats.engine.engine_quality import Comparison, EngineQuality
from .adapter_tokenizers import load_tokenizer
from .engine import LoadedEngine, load_engine
from .executor import Executor
from .orchestrator.mode import with_workers

Array = np.ndarray[Any, np.dtype[Any]]

DEFAULT_WINDOW: Final = 512
MIN_TOKENS: Final = 2
"""Minimum number of tokens of a window and of a text: one predicts the other."""
_TASK_ID: Final = 1
_GREATEST_EXPONENT: Final = math.log(sys.float_info.max)
# Number of characters to read per wanted token before trying more.
_CHARACTERS_A_TOKEN: Final = 16
# Number of rows of logits in memory as float64.
_ROWS_AT_ONCE: Final = 64


@dataclass(frozen=True)
class MeasuredEngine:
    """An engine, and the adapter with which it runs a text."""

    engine: LoadedEngine
    adapter: LoraConfig | None = None
    lora_storage: str | None = None
    """PeftCacheConfig.lora_storage; None for its default."""


@dataclass
class Quality:
    """Quality of an engine on a text, summed up piece by piece."""

    tokens: int = 0
    """Number of predicted tokens."""
    negative_log_likelihood: float = 0.0
    divergence: float = 0.0
    """Sum over the tokens of the Kullback-Leibler divergence of this engine's distribution from the first engine's."""
    same_choices: int = 0
    """Number of tokens whose most likely prediction equals the first engine's."""
    log_prob_change: float = 0.0
    """Sum over the text's tokens of the absolute difference of their log probs from the first engine's, in nats."""
    worst_log_prob_change: float = 0.0

    def add(self, log_probabilities: Array, expected: Array, reference: Array) -> None:
        """Adds log probabilities, float64 [tokens, vocabulary], for `expected`. reference: the first engine's."""
        self.tokens += len(expected)
        of_text = np.arange(len(expected)), expected
        self.negative_log_likelihood -= float(log_probabilities[of_text].sum())
        changes = np.abs(log_probabilities[of_text] - reference[of_text])
        self.log_prob_change += float(changes.sum())
        self.worst_log_prob_change = max(self.worst_log_prob_change, float(changes.max()))
        self.divergence += float((np.exp(reference) * (reference - log_probabilities)).sum())
        self.same_choices += int((reference.argmax(axis=1) == log_probabilities.argmax(axis=1)).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log likelihood, at most the largest float."""
        return math.exp(min(self.negative_log_likelihood / self.tokens, _GREATEST_EXPONENT))


def measure(
    engines: Sequence[Path],
    token_ids: Sequence[int],
    window: int,
    *,
    lora_dir: str | None = None,
    lora_storages: Sequence[str] = (),
) -> list[Quality]:
    """Returns each engine's quality on the tokens; divergences and changes are from the first engine.

    lora_dir: adapter that all engines apply, as for find_adapter().
    lora_storages: PeftCacheConfig.lora_storage of each engine; () for its default. An engine may occur more than once.

    Memory holds the engines, their KV caches of one window, and each engine's logits of one window. Raises the errors
    of Executor and of LoraConfig.from_peft, and EngineError for logits that are not finite.
    """
    results = [Quality() for _ in engines]
    window = min(window, len(token_ids))
    loaded = {engine: load_engine(engine) for engine in dict.fromkeys(engines)}
    _check_window(window, [*loaded.values()])
    adapters: dict[Path, LoraConfig] = {}
    if lora_dir is not None:
        adapters = {path: LoraConfig.from_peft(_TASK_ID, lora_dir, engine) for path, engine in loaded.items()}
    storages: Sequence[str | None] = lora_storages or [None] * len(engines)
    measured = [
        MeasuredEngine(loaded[path], adapters.get(path), storage)
        for path, storage in zip(engines, storages, strict=True)
    ]
    for ids, logits in run_windows(measured, token_ids, window):
        for row in range(0, len(ids) - 1, _ROWS_AT_ONCE):
            rows = slice(row, min(row + _ROWS_AT_ONCE, len(ids) - 1))
            expected = np.asarray(ids[1:][rows])
            reference = _log_probabilities(logits[0][rows])
            for result, values in zip(results, logits, strict=True):
                result.add(_log_probabilities(values[rows]), expected, reference)
    return results


def run_windows(
    engines: Sequence[MeasuredEngine], token_ids: Sequence[int], window: int
) -> Iterator[tuple[list[int], list[Array]]]:
    """Runs engines on the tokens, window by window. Yields each window's tokens, and each engine's logits for all but
    the first.

    Raises the errors of Executor, and EngineError for logits that are not finite.
    """
    with ExitStack() as stack:
        executors = [stack.enter_context(_executor(engine, window)) for engine in engines]
        for first in range(0, len(token_ids) - 1, window):
            ids = list(token_ids[first : first + window])
            if len(ids) < MIN_TOKENS:
                break
            logits = [_logits(executor, ids, of.adapter) for executor, of in zip(executors, engines, strict=True)]
            for measured, values in zip(engines, logits, strict=True):
                if not np.isfinite(values).all():
                    raise EngineError(
                        f"{measured.engine.directory}: its logits of the text's tokens from {first} on are not finite"
                    )
            yield ids, logits


def read_tokens(text: Path, tokenizer: Path, limit: int | None = None) -> list[int]:
    """Returns the tokens of a UTF-8 text: the first `limit`, or all.

    Reads no more of a long text than the limit needs. Raises ConfigError for a file that cannot be read, and for a text
    of fewer than two tokens.
    """
    made = load_tokenizer(tokenizer)
    ids: list[int] = []
    try:
        with text.open(encoding="utf-8") as file:
            content = ""
            size = -1 if limit is None else limit * _CHARACTERS_A_TOKEN
            while piece := file.read(size):
                content += piece
                ids = made.encode(content).ids
                # The last token may be incomplete.
                if limit is not None and len(ids) > limit:
                    break
                size = len(content) if limit is not None else -1
    except OSError as reason:
        raise ConfigError(f"{text}: cannot be read: {reason.strerror}") from None
    except UnicodeDecodeError as reason:
        raise ConfigError(f"{text}: cannot be read: {reason}") from None
    if not ids:
        ids = made.encode("").ids
    if len(ids) < MIN_TOKENS:
        raise ConfigError(f"{text}: number of tokens is {len(ids)}; at least {MIN_TOKENS} are needed to predict one")
    return ids[:limit]


def read_text(text: Path, model_dir: Path, limit: int, purpose: str) -> list[int]:
    """Returns the first tokens of the text in a build's flag `PURPOSE_text`, with the tokenizer of a model or
    checkpoint.

    Raises ConfigError for files that cannot be read, and if the limit `PURPOSE_tokens` or the text is too short.
    """
    if limit < MIN_TOKENS:
        raise ConfigError(f"{purpose}_tokens is {limit}; it must be at least {MIN_TOKENS}")
    tokenizer = model_dir / TOKENIZER_FILE
    if not tokenizer.exists():
        raise ConfigError(f"{tokenizer}: there is no tokenizer, which {purpose}_text needs; copy it there")
    return read_tokens(text, tokenizer, limit)


class TextQuality:
    """Measures a build's engines on a text; see builder.engine_quality.QualityMeasure."""

    def __init__(self, text: Path, model_dir: Path, limit: int) -> None:
        """Reads at most `limit` tokens. model_dir: model or checkpoint with the tokenizer.

        Raises ConfigError for files that cannot be read, and for a text that is too short.
        """
        self._text = text
        self._token_ids = read_text(text, model_dir, limit, "quality")

    def problems(self, config: BuildConfig) -> list[str]:
        """Returns the problems of a config whose limits leave no room for a window."""
        return window_problems(config, "quality_text")

    def measure(self, engine: Path, reference: Path | None) -> EngineQuality:
        """Runs both engines and returns the quality."""
        engines = [engine] if reference is None else [reference, engine]
        longest = longest_window(EngineConfig.load(engine).build_config)
        window = min(DEFAULT_WINDOW, len(self._token_ids), longest)
        first, *others = measure(engines, self._token_ids, window)
        measured = others[0] if others else first
        comparison = None
        if reference is not None:
            comparison = Comparison(
                engine=EngineConfig.load(reference).pretrained_config.describe_types(),
                perplexity=first.perplexity,
                divergence=measured.divergence / measured.tokens,
                same_choices=measured.same_choices / measured.tokens,
            )
        return EngineQuality(
            text=self._text.name,
            tokens=len(self._token_ids),
            window=window,
            perplexity=measured.perplexity,
            reference=comparison,
        )


def _executor(measured: MeasuredEngine, window: int) -> Executor:
    """Makes an executor with a KV cache for one window."""
    engine = measured.engine
    block = engine.config.build_config.tokens_per_block
    tokens = -(-(window + 1) // block) * block
    config = ExecutorConfig(enable_chunked_context=True, kv_cache_config=KvCacheConfig(max_tokens=tokens))
    if measured.lora_storage is not None:
        config.peft_cache_config = PeftCacheConfig(lora_storage=measured.lora_storage)
    return Executor(engine, ModelType.DECODER_ONLY, with_workers(config, engine))


def longest_window(config: BuildConfig) -> int:
    """Returns the longest prompt that leaves room for one generated token."""
    assert config.max_input_len is not None
    assert config.max_seq_len is not None
    return min(config.max_input_len, config.max_seq_len - 1)


def window_problems(config: BuildConfig, field: str) -> list[str]:
    """Returns the problems of a config whose limits leave no room for a window of the text in `field`."""
    longest = longest_window(config)
    if longest >= MIN_TOKENS:
        return []
    return [
        f"{field} needs windows of {MIN_TOKENS} tokens; max_input_len {config.max_input_len} and max_seq_len "
        f"{config.max_seq_len} allow {longest}"
    ]


def _check_window(tokens: int, engines: Sequence[LoadedEngine]) -> None:
    """Raises ConfigError if a window is too long for an engine."""
    for engine in engines:
        build = engine.config.build_config
        longest = longest_window(build)
        if tokens > longest:
            raise ConfigError(
                f"windows of {tokens} tokens are too long for {engine.directory}, with max_input_len "
                f"{build.max_input_len} and max_seq_len {build.max_seq_len}; accepted: window {MIN_TOKENS} to {longest}"
            )


def _logits(executor: Executor, ids: Sequence[int], adapter: LoraConfig | None) -> Array:
    """Returns the logits for the tokens after the first, float32 [len(ids) - 1, vocabulary]."""
    output = OutputConfig(return_context_logits=True)
    request = executor.enqueue_request(Request(list(ids), 1, output_config=output, lora_config=adapter))
    response = executor.await_responses(request)[-1]
    if response.has_error():
        raise RequestError(response.error_msg)
    logits: Array = np.asarray(response.result.context_logits)[:-1]
    return logits


def _log_probabilities(logits: Array) -> Array:
    """Returns log probabilities as float64 of the same shape."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
