"""AdaptRT, measured by the same rules as its peers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from worker import (
    ADAPTER_OF_ONE,
    BATCH,
    GGUF,
    MIXED_TOKENS,
    Metrics,
    Peer,
    Row,
    Task,
    base_rows,
    decode_row,
    gguf_rows,
    long_decode_row,
    long_prompt_row,
    main,
    prefill_row,
    seconds_of,
)

import adaptrt
from adaptrt import Executor, ExecutorConfig, KvCacheConfig, LoraConfig, OutputConfig, PeftCacheConfig, Request
from adaptrt.common.byte_size import ALL_WEIGHTS
from adaptrt.runtime.memory import available_memory

ADAPTERS = 32
"""Number of adapters of the maximum rank that fit in each cache level."""
LARGEST_RANK = 64
BYTES_PER_VALUE = 2
COLD_TASKS = 1000
ALL_ADAPTERS, ONE_ADAPTER, KEEPS_PROMPTS = "adapters", "compressed-adapter", "keeps-prompts"
ENGINES_OF = {ALL_ADAPTERS: "bf16", ONE_ADAPTER: "compressed", **{f"{kind}-{ALL_ADAPTERS}": kind for kind in GGUF}}
"""Engines of the variants that have adapters in host memory: ADAPTER_OF_ONE, or all adapters."""


class AdaptRt:
    """An executor with the engine adaptrt-<variant>, or with the one in ENGINES_OF."""

    def __init__(self, task: Task, variant: str) -> None:
        self._task = task
        has_all = variant in ENGINES_OF and variant != ONE_ADAPTER
        keeps = variant == KEEPS_PROMPTS
        engine = "bf16" if keeps else ENGINES_OF.get(variant, variant)
        self._executor = start(task, engine, all_adapters=has_all, keeps_prompts=keeps)
        self._cold = itertools.count(COLD_TASKS)
        if variant in ENGINES_OF:
            paths = dict(enumerate(task.loras + task.doras))
            for number in paths if has_all else [ADAPTER_OF_ONE]:
                self._executor.put_adapter(LoraConfig.from_peft(number, paths[number], self._executor.engine))

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, adapters: Sequence[int] | None = None
    ) -> list[list[int]]:
        """One in-flight batch; `adapters` has a task_id for each prompt."""
        output = OutputConfig(exclude_input_from_output=True)
        configs = [None] * len(prompts) if adapters is None else [LoraConfig(task_id) for task_id in adapters]
        ids = self._executor.enqueue_requests(
            [
                Request(prompt, new_tokens, output_config=output, lora_config=config)
                for prompt, config in zip(prompts, configs, strict=True)
            ]
        )
        answers = []
        for request_id in ids:
            (response,) = self._executor.await_responses(request_id)
            if response.has_error():
                raise RuntimeError(response.error_msg)
            answers.append(list(response.result.output_token_ids[0]))
        return answers

    def load_adapter(self) -> Metrics:
        """Loads an adapter from its PEFT directory to the host level of the cache."""
        task_id, path = next(self._cold), self._task.loras[ADAPTER_OF_ONE]
        seconds = seconds_of(
            lambda: self._executor.put_adapter(LoraConfig.from_peft(task_id, path, self._executor.engine))
        )
        self._executor.unload_adapter(task_id)
        return {"value": seconds}

    def close(self) -> None:
        """Ends the executor."""
        self._executor.shutdown()


def start(task: Task, name: str, *, all_adapters: bool, keeps_prompts: bool) -> Executor:
    """Makes an executor. Prompts repeat, so prefixes are reused only with `keeps_prompts`.

    With `all_adapters`, its cache holds all adapters.
    """
    # Weights are read into the process's memory, as peers do. A mapped file's page layout would change over time.
    engine = adaptrt.load_engine(task.root / f"adaptrt-{name}", weight_memory=ALL_WEIGHTS)
    config = ExecutorConfig(
        kv_cache_config=KvCacheConfig(enable_block_reuse=keeps_prompts), enable_chunked_context=True,
        num_threads=task.threads, weight_memory=ALL_WEIGHTS,
    )  # fmt: skip
    if all_adapters:
        sites = engine.lora.sites
        widths = sum(site.in_size * len(site.parts) + sum(part.out_size for part in site.parts) for site in sites)
        level = BYTES_PER_VALUE * LARGEST_RANK * widths * ADAPTERS
        config.peft_cache_config = PeftCacheConfig(
            device_cache_percent=min(1.0, level / available_memory()), host_cache_size=2 * level
        )
    return Executor(engine, executor_config=config)


def make(task: Task) -> Peer:
    """Engines of several kinds of weights, all with LoRA enabled."""
    loras = list(range(BATCH))
    mixed = [*loras[: BATCH // 2], *range(BATCH, BATCH + len(task.doras))]
    batch = "one in-flight batch"
    return Peer(
        versions={"adaptrt": adaptrt.__version__},
        load=lambda variant: AdaptRt(task, variant),
        rows={
            **base_rows(task, "bf16"),
            **long_prompt_row(task, "bf16"),
            **long_decode_row(task, KEEPS_PROMPTS),
            **base_rows(task, "compressed", "compressed-"),
            "prefill-512-lora": prefill_row(ALL_ADAPTERS, task.long, adapters=[loras[ADAPTER_OF_ONE]]),
            "decode-1-lora": decode_row(ALL_ADAPTERS, task.alone, adapters=[loras[ADAPTER_OF_ONE]]),
            "compressed-decode-1-lora": decode_row(ONE_ADAPTER, task.alone, adapters=[loras[ADAPTER_OF_ONE]]),
            "mixed-16": decode_row(ALL_ADAPTERS, task.batch, most_tokens=MIXED_TOKENS, adapters=loras),
            "adapter-load": Row(ALL_ADAPTERS, lambda loaded, new_tokens: loaded.load_adapter()),
            "decode-1-dora": decode_row(ALL_ADAPTERS, task.alone, adapters=[mixed[-1]]),
            "mixed-16-dora": decode_row(ALL_ADAPTERS, task.batch, most_tokens=MIXED_TOKENS, adapters=mixed),
            **base_rows(task, "w8a8", "int8-"),
            **base_rows(task, "w8a16", "w8a16-"),
            **base_rows(task, "w4a16", "int4-"),
            **gguf_rows(task),
        },
        notes={"mixed-16": batch, "mixed-16-dora": batch, "int8-decode-1": "W8A8", "int4-decode-1": "W4A16"},
    )


if __name__ == "__main__":
    main(make)
