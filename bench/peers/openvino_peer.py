"""OpenVINO GenAI: its LLMPipeline on paged attention, bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker import ADAPTER_OF_ONE, BATCH, Metrics, Peer, Task, decode_rate, main, prefill_rate, seconds_of, whole_rate

ALPHA_PER_RANK = 2.0
"""Of every adapter here; OpenVINO does not read it from the adapter's config."""


def make(task: Task) -> Peer:
    """Two pipelines: the base, and one with the 16 adapters, which must be known when it is made."""
    base = pipeline(task)
    adapters = [openvino_genai.Adapter(str(path / "adapter_model.safetensors")) for path in task.loras]
    known = openvino_genai.AdapterConfig(mode=openvino_genai.AdapterConfig.Mode.MODE_AUTO)
    for adapter in adapters:
        known.add(adapter, ALPHA_PER_RANK)
    with_adapters = pipeline(task, adapters=known)
    configs = [openvino_genai.AdapterConfig(adapter, ALPHA_PER_RANK) for adapter in adapters]

    def generate(
        prompts: Sequence[list[int]], new_tokens: int, pipe: Any = base, adapter: Any = None
    ) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos, config.do_sample = True, False
        if adapter is not None:
            config.adapters = adapter
        tokens = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens)))
        return [list(answer) for answer in pipe.generate(inputs, config).tokens]

    def one_after_another(prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        return [
            generate([prompt], new_tokens, pipe=with_adapters, adapter=config)[0]
            for prompt, config in zip(prompts, configs, strict=True)
        ]

    def load() -> Metrics:
        path = str(task.loras[ADAPTER_OF_ONE] / "adapter_model.safetensors")

        def rebuild() -> None:
            config = openvino_genai.AdapterConfig(mode=openvino_genai.AdapterConfig.Mode.MODE_AUTO)
            config.add(openvino_genai.Adapter(path), ALPHA_PER_RANK)
            pipeline(task, adapters=config)

        return {"value": seconds_of(rebuild)}

    new = task.new_tokens
    one = partial(generate, pipe=with_adapters, adapter=configs[ADAPTER_OF_ONE])
    no_dora = "OpenVINO GenAI reads a DoRA adapter without its magnitudes, as another adapter than it is"
    return Peer(
        versions={"openvino": openvino.__version__, "openvino_genai": openvino_genai.__version__},
        rows={
            "prefill-512": lambda: prefill_rate(generate, task.long),
            "decode-1": lambda: decode_rate(generate, task.alone, new),
            "decode-16": lambda: decode_rate(generate, task.batch, new),
            "decode-1-lora": lambda: decode_rate(one, task.alone, new),
            "mixed-16": lambda: whole_rate(one_after_another, task.batch[:BATCH], task.mixed_tokens),
            "adapter-load": load,
        },
        refused={"decode-1-dora": no_dora, "mixed-16-dora": no_dora},
        notes={
            "mixed-16": "one request after another: a batch runs with the first request's adapter for all",
            "adapter-load": "makes the pipeline anew, which takes its adapters when it is made",
        },
    )


def pipeline(task: Task, **options: Any) -> Any:
    """Without prefix caching, because prompts repeat."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = 1024
    scheduler.max_num_seqs = BATCH
    return openvino_genai.LLMPipeline(
        str(task.root / "openvino"),
        "CPU",
        scheduler_config=scheduler,
        INFERENCE_NUM_THREADS=task.threads,
        INFERENCE_PRECISION_HINT="bf16",
        PERFORMANCE_HINT="LATENCY",
        **options,
    )


if __name__ == "__main__":
    main(make)
