"""OpenVINO GenAI: its LLMPipeline on paged attention, activations in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker import (
    ADAPTER_OF_ONE,
    BATCH,
    MIXED_TOKENS,
    STEP_TOKENS,
    Metrics,
    Peer,
    Row,
    Task,
    base_rows,
    decode_row,
    long_prompt_row,
    main,
    prefill_row,
    seconds_of,
)

ALPHA_PER_RANK = 2.0
"""Alpha of every adapter here; OpenVINO does not read it from the adapter's config."""
EXPORTS = {"bf16": "openvino", "adapters": "openvino", "int8": "openvino-int8", "int4": "openvino-int4"}
"""Directory of each variant. `adapters` is the pipeline with the 16 adapters, which must be known when it is
created."""


class OpenVino:
    """A pipeline."""

    def __init__(self, task: Task, variant: str) -> None:
        self._task = task
        self._configs = []
        if variant == "adapters":
            adapters = [openvino_genai.Adapter(str(path / "adapter_model.safetensors")) for path in task.loras]
            self._pipeline = pipeline(task, variant, adapters=config_of(adapters))
            self._configs = [openvino_genai.AdapterConfig(adapter, ALPHA_PER_RANK) for adapter in adapters]
        else:
            self._pipeline = pipeline(task, variant)

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, adapters: Sequence[int] | None = None
    ) -> list[list[int]]:
        """One batch without adapters; with `adapters` (one per prompt), one prompt after another."""
        if adapters is None:
            return self._run(prompts, new_tokens, None)
        return [
            self._run([prompt], new_tokens, self._configs[adapter])[0]
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]

    def _run(self, prompts: Sequence[list[int]], new_tokens: int, adapter: Any) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos, config.do_sample = True, False
        if adapter is not None:
            config.adapters = adapter
        tokens = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens)))
        return [list(answer) for answer in self._pipeline.generate(inputs, config).tokens]

    def load_adapter(self) -> Metrics:
        """Creates a pipeline for an adapter."""
        path = str(self._task.loras[ADAPTER_OF_ONE] / "adapter_model.safetensors")
        return {
            "value": seconds_of(
                lambda: pipeline(self._task, "adapters", adapters=config_of([openvino_genai.Adapter(path)]))
            )
        }

    def close(self) -> None:
        """Does nothing: it ends with the process."""


def config_of(adapters: Sequence[Any]) -> Any:
    """Adapter config of a pipeline: it lists all adapters that requests may use."""
    config = openvino_genai.AdapterConfig(mode=openvino_genai.AdapterConfig.Mode.MODE_AUTO)
    for adapter in adapters:
        config.add(adapter, ALPHA_PER_RANK)
    return config


def pipeline(task: Task, variant: str, **options: Any) -> Any:
    """Makes a pipeline without prefix caching, because prompts repeat. All other settings are OpenVINO's defaults, even
    dynamic quantisation.
    """
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.max_num_seqs = BATCH
    return openvino_genai.LLMPipeline(
        str(task.root / EXPORTS[variant]),
        "CPU",
        scheduler_config=scheduler,
        INFERENCE_NUM_THREADS=task.threads,
        INFERENCE_PRECISION_HINT="bf16",
        PERFORMANCE_HINT="LATENCY",
        **options,
    )


def make(task: Task) -> Peer:
    """A pipeline for each kind of weights, and one for the adapters."""
    no_dora = "OpenVINO GenAI ignores the magnitudes of a DoRA adapter, so it computes another adapter"
    sequential = "one request after another: a batch runs with the first request's adapter for all"
    return Peer(
        versions={"openvino": openvino.__version__, "openvino_genai": openvino_genai.__version__},
        load=lambda variant: OpenVino(task, variant),
        rows={
            **base_rows(task, "bf16"),
            **long_prompt_row(task, "bf16"),
            "prefill-512-lora": prefill_row("adapters", task.long, adapters=[ADAPTER_OF_ONE]),
            "decode-1-lora": decode_row("adapters", task.alone, adapters=[ADAPTER_OF_ONE]),
            "mixed-16": decode_row("adapters", task.batch, most_tokens=MIXED_TOKENS, adapters=range(BATCH)),
            "adapter-load": Row("adapters", lambda loaded, new_tokens: loaded.load_adapter()),
            **base_rows(task, "int8", "int8-"),
            **base_rows(task, "int4", "int4-"),
        },
        refused={"decode-1-dora": no_dora, "mixed-16-dora": no_dora},
        notes={
            "mixed-16": sequential,
            "adapter-load": "creates the pipeline again, because it takes adapters only when it is created",
            "int8-decode-1": "int8 per channel, asymmetric; activations quantised by OpenVINO's default",
            "int4-decode-1": "u4, groups of 128, asymmetric; embedding and lm_head int8",
        },
    )


if __name__ == "__main__":
    main(make)
