"""The rows of the benchmark: which samples are taken, how often, and what they are held against."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..._core import ExecutorConfig, LoraConfig, MachineLimits, ModelType, PeftCacheConfig
from ...runtime.executor import Executor
from .measure import (
    DECODE_TOKENS,
    PREFILL_TOKENS,
    PROMPT_TOKENS,
    DecodeSample,
    decode,
    random_prompt,
    time_to_first_token,
    without_reuse,
)
from .model import BenchModel, adapter_bytes, random_adapter

BATCH = 16
RANK = 16
BYTES_PER_WEIGHT = 2
COLD_TASK_ID = 1000


@dataclass(frozen=True)
class Row:
    """One figure: the median of its samples, their spread, and the share of a limit where there is one."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    samples: int
    share: float | None = None
    of: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the report's JSON file."""
        return asdict(self)


def make_row(name: str, unit: str, values: Iterable[float], share: float | None = None, of: str = "") -> Row:
    """A row of the samples `values`."""
    samples = list(values)
    return Row(name, unit, statistics.median(samples), min(samples), max(samples), len(samples), share, of)


class Scenarios:
    """Runs every row on one engine of `model`."""

    def __init__(
        self, model: BenchModel, engine: Path, limits: MachineLimits, repeats: int, num_threads: int | None
    ) -> None:
        self._model = model
        self._engine = engine
        self._limits = limits
        self._repeats = repeats
        self._num_threads = num_threads
        self._prompts = [random_prompt(PROMPT_TOKENS, model.vocab_size, seed) for seed in range(BATCH)]
        self._adapters = [LoraConfig(task, *random_adapter(model, RANK, task)) for task in range(BATCH)]

    def run(self, progress: Callable[[str], None]) -> list[Row]:
        """All rows; `progress` is told the name of each group as it begins."""
        rows: list[Row] = []
        with self._executor() as executor:
            progress("prefill")
            rows.append(self._prefill(executor))
            progress("decode")
            rows.extend(self._decodes(executor))
            progress("time to first token")
            rows.extend(self._first_tokens(executor))
        return rows

    def _executor(self) -> Executor:
        adapters = adapter_bytes(self._model, RANK)
        config = ExecutorConfig(
            kv_cache_config=without_reuse(),
            peft_cache_config=PeftCacheConfig(optimal_adapter_size=RANK, host_cache_size=4 * BATCH * adapters),
            num_threads=self._num_threads,
            iter_stats_max_iterations=4 * DECODE_TOKENS,
        )
        return Executor(self._engine, ModelType.DECODER_ONLY, config)

    def _prefill(self, executor: Executor) -> Row:
        prompt = random_prompt(PREFILL_TOKENS, self._model.vocab_size, BATCH)
        time_to_first_token(executor, prompt)
        rates = [PREFILL_TOKENS / time_to_first_token(executor, prompt) for _ in range(self._repeats)]
        body = self._model.linear_parameters - self._model.vocab_size * self._model.hidden_size
        flops = 2 * body * statistics.median(rates)
        return make_row(
            f"prefill, {PREFILL_TOKENS} tokens",
            "tok/s",
            rates,
            flops / self._limits.bfloat16_flops,
            "bf16 peak",
        )

    def _decodes(self, executor: Executor) -> list[Row]:
        """The batches in turn, again and again, so that a drift of the machine's speed meets all of them."""
        batches: dict[str, list[LoraConfig | None]] = {
            "decode, 1 request": [None],
            "decode, 1 request, rank-16 adapter": [self._adapters[0]],
            f"decode, {BATCH} requests": [None] * BATCH,
            f"decode, {BATCH} requests, one adapter": [self._adapters[0]] * BATCH,
            f"decode, {BATCH} requests, {BATCH} adapters": list(self._adapters),
        }
        for adapters in batches.values():
            decode(executor, self._prompts[: len(adapters)], adapters)
        samples: dict[str, list[DecodeSample]] = {name: [] for name in batches}
        for _ in range(self._repeats):
            for name, adapters in batches.items():
                samples[name].append(decode(executor, self._prompts[: len(adapters)], adapters))
        medians = {name: statistics.median(s.step_seconds for s in taken) for name, taken in samples.items()}
        rows = []
        for name, taken in samples.items():
            size = len(batches[name])
            share, of = self._decode_share(name, size, medians)
            rows.append(make_row(name, "tok/s", (size / sample.step_seconds for sample in taken), share, of))
        overheads = [100 * sample.overhead for sample in samples[f"decode, {BATCH} requests"]]
        rows.append(make_row(f"executor outside the engine, {BATCH} requests", "%", overheads))
        return rows

    def _decode_share(self, name: str, size: int, medians: dict[str, float]) -> tuple[float | None, str]:
        if name == "decode, 1 request":
            weights = BYTES_PER_WEIGHT * self._model.linear_parameters
            return weights / medians[name] / self._limits.read_bandwidth, "read bandwidth"
        base = "decode, 1 request" if size == 1 else f"decode, {BATCH} requests"
        return (None, "") if name == base else (medians[base] / medians[name], "the base alone")

    def _first_tokens(self, executor: Executor) -> list[Row]:
        prompt = random_prompt(PREFILL_TOKENS, self._model.vocab_size, BATCH + 1)
        weights, config = random_adapter(self._model, RANK, COLD_TASK_ID)
        warm, cold = [], []
        for repeat in range(self._repeats):
            adapter = LoraConfig(COLD_TASK_ID + repeat, weights, config)
            cold.append(1e3 * time_to_first_token(executor, prompt, adapter))
            warm.append(1e3 * time_to_first_token(executor, prompt, LoraConfig(COLD_TASK_ID + repeat)))
            executor.unload_adapter(COLD_TASK_ID + repeat)
        ratio = statistics.median(cold) / statistics.median(warm)
        return [
            make_row(f"first token, {PREFILL_TOKENS}-token prompt, warm adapter", "ms", warm),
            make_row(f"first token, {PREFILL_TOKENS}-token prompt, cold adapter", "ms", cold, ratio, "warm"),
        ]
