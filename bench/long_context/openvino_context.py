"""openvino_context.py MODEL LENGTH TOKENS THREADS: prints [seconds of a prefill, seconds of a token after it].

Runs in OpenVINO's virtual environment.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import openvino
import openvino_genai

BLOCK = 2048
CACHE_GB = 4
WARM_UP = 512


def main(model: str, length: int, new_tokens: int, threads: int) -> None:
    """Measures a request, with the times that the pipeline reports."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_batched_tokens = BLOCK
    scheduler.max_num_seqs = 1
    pipeline = openvino_genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, **settings(threads))
    config = openvino_genai.GenerationConfig()
    config.ignore_eos, config.do_sample = True, False
    config.max_new_tokens = config.min_new_tokens = 2
    pipeline.generate(prompt_of(min(length, WARM_UP)), config)
    config.max_new_tokens = config.min_new_tokens = 1 + new_tokens
    metrics = pipeline.generate(prompt_of(length), config).perf_metrics
    print(json.dumps([metrics.get_ttft().mean / 1e3, metrics.get_tpot().mean / 1e3]))


def settings(threads: int) -> dict[str, int | str]:
    """Settings for OpenVINO. Models exported in bfloat16 request keys in float16, unlike the default for CPUs."""
    return {
        "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16", "PERFORMANCE_HINT": "LATENCY",
        "KV_CACHE_PRECISION": "u8",
    }  # fmt: skip


def prompt_of(length: int) -> openvino_genai.TokenizedInputs:
    """A prompt of random tokens."""
    tokens = np.random.default_rng(length).integers(100, 20000, (1, length)).astype(np.int64)
    return openvino_genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens)))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
