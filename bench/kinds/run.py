"""Measures the cost of each kind of adapter in a generating batch of 16, compared with plain LoRA or the base model.

    python bench/kinds/run.py ENGINE PLAIN [--pairs 8] [--tokens 24] [--threads N]

ENGINE supports everything that adapters may have (--lora_plugin auto --dora_plugin enable --max_lora_rank 64
--max_extra_tokens 64 --long_lora_scaling_factors 2). PLAIN is an engine of the same model without LoRA. Weights may be
random. Each request has its own adapter. A run's value is the median time of its steps in which all 16 requests
generate. Runs alternate in pairs; a row's value is the median ratio of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

import adaptrt
from adaptrt._core import LoraLayout, dtype_name, lora_modules
from adaptrt.formats.engine.build_config import DEFAULT_TARGET_MODULES

BATCH: Final = 16
PROMPT: Final = 64
MAGNITUDE, SHIFT = 1, 2
IDS: Final = {info.name: info.id for info in lora_modules()}
Run = Callable[[], float]


@dataclass(frozen=True)
class Kind:
    """Adapters of one kind, as rows. Random values cost the same as trained ones."""

    title: str
    rank: int
    vectors: int = 0
    modules: tuple[str, ...] = DEFAULT_TARGET_MODULES
    lm_head: bool = False
    rotary_factor: int = 1
    virtual_tokens: int = 0

    def tensors(self, layout: LoraLayout, vocab_size: int) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int32]]:
        """Returns (weights [rows, width], config [rows, 4])."""
        rows = [(IDS[name], layer) for layer in range(layout.num_layers) for name in self.modules]
        if self.lm_head:
            rows += [(IDS["lm_head"], piece) for piece in range(-(-vocab_size // adaptrt._core.VOCABULARY_SLICE))]
        sized = [(module, layer, found) for module, layer in rows if (found := layout.sizes_of(layer, module))]
        sizes = [self.rank * (of.in_size + of.out_size) + of.out_size * self.vectors.bit_count() for *_, of in sized]
        made = np.zeros((len(sized) + (self.rotary_factor > 1), max(sizes)), np.float32)
        generator = np.random.default_rng(7)
        for row, size, (_, _, of) in zip(made, sizes, sized, strict=False):
            row[:size] = generator.standard_normal(size, np.float32) * np.float32(0.01)
            # All rows of lm_head share one A.
            row[: self.rank * of.in_size] = np.float32(0.01)
        config = [(module, layer, self.rank, self.vectors) for module, layer, _ in sized]
        if self.rotary_factor > 1:
            config.append((IDS["rotary_scaling"], 0, self.rotary_factor, 0))
        dtype = ml_dtypes.bfloat16 if dtype_name(layout.dtype) == "bfloat16" else dtype_name(layout.dtype)
        return made.astype(dtype), np.array(config, np.int32)


LORA: Final = Kind("LoRA of rank 16", 16)
OVER_LORA: Final = (
    Kind("DoRA of rank 16", 16, MAGNITUDE),
    Kind("lora_bias, or trained biases: LoRA of rank 16 with a shift", 16, SHIFT),
    Kind("positions divided by 2, LoRA of rank 16", 16, rotary_factor=2),
    Kind("LoRA of rank 16 on lm_head as well", 16, lm_head=True),
    Kind("IA3 on k, v and up", 1, MAGNITUDE, ("attn_k", "attn_v", "mlp_gate")),
    Kind("VeRA, LoHa, LoKr: LoRA of rank 64", 64),
)
OVER_BASE: Final = (LORA, Kind("prompt tuning, 16 virtual tokens", 0, virtual_tokens=16))


def main() -> None:
    """Prints a row for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("plain", type=Path)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    config = adaptrt.ExecutorConfig(
        num_threads=options.threads,
        kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=False, max_tokens=4096),
        peft_cache_config=adaptrt.PeftCacheConfig(host_cache_size=6 << 30, device_cache_percent=0.25),
    )
    without_adapters = adaptrt.ExecutorConfig(num_threads=options.threads, kv_cache_config=config.kv_cache_config)
    with (
        adaptrt.Executor(options.engine, executor_config=config) as executor,
        adaptrt.Executor(options.plain, executor_config=without_adapters) as plain,
    ):
        tasks = {kind: _put(executor, kind) for kind in (LORA, *OVER_LORA)}

        def run(of: adaptrt.Executor, kind: Kind | None = None) -> Run:
            return lambda: _seconds_a_step(
                of, [None] * BATCH if kind is None else tasks.get(kind), kind, options.tokens
            )

        rows = [("the base, everything enabled", "the base, engine without LoRA", run(executor), run(plain))]
        rows += [(kind.title, "the base", run(executor, kind), run(executor)) for kind in OVER_BASE]
        rows += [(kind.title, LORA.title, run(executor, kind), run(executor, LORA)) for kind in OVER_LORA]
        for title, beside, row, base in rows:
            low, middle, high = _ratios(row, base, options.pairs)
            print(f"{title}, beside {beside}: {middle:.3f} as long a step ({low:.3f} to {high:.3f})", flush=True)


def _put(executor: adaptrt.Executor, kind: Kind) -> list[int]:
    """Registers BATCH adapters of a kind, which share their values; returns their task ids."""
    info = executor.engine_info
    weights, config = kind.tensors(info.lora, info.vocab_size)
    first = 1 + BATCH * ([LORA, *OVER_LORA].index(kind))
    for task_id in range(first, first + BATCH):
        executor.put_adapter(adaptrt.LoraConfig(task_id, weights, config))
    return list(range(first, first + BATCH))


def _ratios(row: Run, base: Run, pairs: int) -> list[float]:
    """Quartiles of row / base. The first pair is the warm-up."""
    found = []
    for number in range(pairs + 1):
        if number % 2:
            theirs, ours = base(), row()
        else:
            ours, theirs = row(), base()
        found.append(ours / theirs)
    return statistics.quantiles(found[1:], n=4)


def _seconds_a_step(
    executor: adaptrt.Executor, tasks: Sequence[int | None] | None, kind: Kind | None, num_tokens: int
) -> float:
    info = executor.engine_info
    generator = np.random.default_rng(3)
    virtual = kind.virtual_tokens if kind else 0
    table = generator.standard_normal((virtual, info.given_embedding_size)).astype(np.float32) if virtual else None
    requests = []
    for task_id in tasks or [None] * BATCH:
        prompt = [*range(info.vocab_size, info.vocab_size + virtual), *generator.integers(3, 1000, PROMPT).tolist()]
        requests.append(
            adaptrt.Request(
                prompt,
                num_tokens,
                streaming=True,
                lora_config=None if task_id is None else adaptrt.LoraConfig(task_id),
                prompt_tuning_config=None if table is None else adaptrt.PromptTuningConfig(table),
            )
        )
    ids = executor.enqueue_requests(requests)
    times = []
    for responses in iter(lambda: executor.await_responses(ids[-1]), None):
        for response in responses:
            assert not response.has_error(), response.error_msg
        times.append(time.perf_counter())
        if responses[-1].result.is_final:
            break
    for request_id in ids[:-1]:
        while not executor.await_responses(request_id)[-1].result.is_final:
            pass
    return statistics.median(np.diff(times[2:]).tolist())


if __name__ == "__main__":
    main()
