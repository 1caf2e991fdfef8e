"""AdaptRT, by the same rules as its peers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from worker import ADAPTER_OF_ONE, BATCH, Metrics, Peer, Task, decode_rate, main, prefill_rate, seconds_of, whole_rate

import adaptrt
from adaptrt import Executor, ExecutorConfig, KvCacheConfig, LoraConfig, OutputConfig, PeftCacheConfig, Request
from adaptrt.runtime.memory import available_memory

ADAPTERS = 32
"""Of the largest rank, that each level of the cache has room for."""
LARGEST_RANK = 64
BYTES_PER_VALUE = 2
COLD_TASKS = 1000


def make(task: Task) -> Peer:
    """One executor for all rows; adapters are cached on the host before the first row."""
    executor = start(task)
    adapters = {path.name: LoraConfig.from_peft(number, path, executor.engine)
                for number, path in enumerate(task.loras + task.doras)}  # fmt: skip
    for adapter in adapters.values():
        executor.put_adapter(adapter)
    known = {name: LoraConfig(adapter.task_id) for name, adapter in adapters.items()}
    del adapters
    loras = [known[path.name] for path in task.loras]
    mixed = [known[path.name] for path in (*task.loras[: BATCH // 2], *task.doras)]
    cold = itertools.count(COLD_TASKS)

    def generate(
        prompts: Sequence[list[int]], new_tokens: int, adapters: Sequence[LoraConfig | None] | None = None
    ) -> list[list[int]]:
        output = OutputConfig(exclude_input_from_output=True)
        ids = executor.enqueue_requests(
            [
                Request(prompt, new_tokens, output_config=output, lora_config=adapter)
                for prompt, adapter in zip(prompts, adapters or [None] * len(prompts), strict=True)
            ]
        )
        answers = []
        for request_id in ids:
            (response,) = executor.await_responses(request_id)
            if response.has_error():
                raise RuntimeError(response.error_msg)
            answers.append(list(response.result.output_token_ids[0]))
        return answers

    def load() -> Metrics:
        task_id = next(cold)
        seconds = seconds_of(
            lambda: executor.put_adapter(LoraConfig.from_peft(task_id, task.loras[ADAPTER_OF_ONE], executor.engine))
        )
        executor.unload_adapter(task_id)
        return {"value": seconds}

    new = task.new_tokens
    one = partial(generate, adapters=[loras[ADAPTER_OF_ONE]])
    return Peer(
        versions={"adaptrt": adaptrt.__version__},
        rows={
            "prefill-512": lambda: prefill_rate(generate, task.long),
            "decode-1": lambda: decode_rate(generate, task.alone, new),
            "decode-16": lambda: decode_rate(generate, task.batch, new),
            "decode-1-lora": lambda: decode_rate(one, task.alone, new),
            "mixed-16": lambda: whole_rate(partial(generate, adapters=loras), task.batch, task.mixed_tokens),
            "adapter-load": load,
            "decode-1-dora": lambda: decode_rate(partial(generate, adapters=[mixed[-1]]), task.alone, new),
            "mixed-16-dora": lambda: whole_rate(partial(generate, adapters=mixed), task.batch, task.mixed_tokens),
        },
        notes={"mixed-16": "one in-flight batch", "mixed-16-dora": "one in-flight batch"},
        close=executor.shutdown,
    )


def start(task: Task) -> Executor:
    """An executor with room for every adapter, without prefix reuse: prompts repeat."""
    engine = adaptrt.load_engine(task.root / "adaptrt-engine")
    layout = engine.lora
    widths = sum(site.in_size * len(site.parts) + sum(part.out_size for part in site.parts) for site in layout.sites)
    level = BYTES_PER_VALUE * LARGEST_RANK * widths * ADAPTERS
    config = ExecutorConfig(
        kv_cache_config=KvCacheConfig(enable_block_reuse=False),
        peft_cache_config=PeftCacheConfig(
            device_cache_percent=min(1.0, level / available_memory()), host_cache_size=2 * level
        ),
        num_threads=task.threads,
    )
    return Executor(engine, executor_config=config)


if __name__ == "__main__":
    main(make)
