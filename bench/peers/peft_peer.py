"""transformers + PEFT: an eager loop with a KV cache, without generate()'s overhead."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import peft
import torch
import transformers
from worker import (
    ADAPTER_OF_ONE,
    MIXED_TOKENS,
    Metrics,
    Peer,
    Row,
    Task,
    base_rows,
    decode_rate,
    decode_row,
    long_prompt_row,
    main,
    prefill_row,
    seconds_of,
)

LONG_DECODE_TOKENS = 8
DORA_TOKENS = 4
"""New tokens with a DoRA adapter: the rate does not depend on their number, and each token is slow."""


class Peft:
    """The model in bfloat16; `adapters` has all of them, unmerged."""

    def __init__(self, task: Task, variant: str) -> None:
        self._task = task
        torch.set_num_threads(task.threads)
        transformers.logging.set_verbosity_error()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            task.base, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self._config = model.config
        if variant == "adapters":
            model = peft.PeftModel.from_pretrained(
                model, task.loras[0], adapter_name=task.loras[0].name, autocast_adapter_dtype=False
            )
            for path in (*task.loras[1:], *task.doras):
                model.load_adapter(path, adapter_name=path.name, autocast_adapter_dtype=False)
        self._model = model.to(torch.bfloat16).eval()
        # After loading, the allocator keeps gigabytes of freed memory, and five peers share the machine's memory.
        ctypes.CDLL(None).malloc_trim(0)

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, adapters: Sequence[str] | None = None
    ) -> list[list[int]]:
        """One batch. `adapters` has one adapter for all prompts, or one per prompt; None: the base model."""
        options: dict[str, Any] = {}
        if adapters is not None:
            self._model.set_adapter(adapters[0])
            if len(adapters) > 1:
                options["adapter_names"] = list(adapters)
        with torch.inference_mode():
            tokens, cache, answers = torch.tensor(prompts), transformers.DynamicCache(config=self._config), []
            for _ in range(new_tokens):
                output = self._model(
                    input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1, **options
                )
                tokens = output.logits[:, -1].argmax(-1, keepdim=True)
                answers.append(tokens)
            return torch.cat(answers, dim=1).tolist()

    def generate_after(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """Like generate(), but random keys and values replace those of the prompt, which take minutes to compute."""
        (prompt,) = prompts
        with torch.inference_mode():
            cache = transformers.DynamicCache(config=self._config)
            self._model(input_ids=torch.tensor([prompt[:1]]), past_key_values=cache, use_cache=True)
            for number, layer in enumerate(cache.layers):
                rows = [part.expand(-1, -1, len(prompt) - 2, -1) for part in (layer.keys, layer.values)]
                cache.update(*(torch.rand_like(part) for part in rows), number)
            tokens, answer = torch.tensor([prompt[-1:]]), list[int]()
            for _ in range(new_tokens):
                output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                tokens = output.logits[:, -1].argmax(-1, keepdim=True)
                answer.append(int(tokens))
        return [answer]

    def load_adapter(self) -> Metrics:
        """Loads an adapter from its PEFT directory into the model."""
        path = self._task.loras[ADAPTER_OF_ONE]
        seconds = seconds_of(lambda: self._model.load_adapter(path, adapter_name="cold", autocast_adapter_dtype=False))
        self._model.delete_adapter("cold")
        return {"value": seconds}

    def close(self) -> None:
        """Does nothing: it ends with the process."""


def make(task: Task) -> Peer:
    """The model without and with adapters."""
    loras = [path.name for path in task.loras]
    return Peer(
        versions={"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__},
        load=lambda variant: Peft(task, variant),
        rows={
            **base_rows(task, "bf16"),
            **long_prompt_row(task, "bf16"),
            "decode-8192": Row(
                "bf16",
                lambda loaded, new_tokens: decode_rate(
                    loaded.generate_after, [task.longest], min(LONG_DECODE_TOKENS, new_tokens)
                ),
            ),
            "prefill-512-lora": prefill_row("adapters", task.long, adapters=[loras[ADAPTER_OF_ONE]]),
            "decode-1-lora": decode_row("adapters", task.alone, adapters=[loras[ADAPTER_OF_ONE]]),
            "mixed-16": decode_row("adapters", task.batch, most_tokens=MIXED_TOKENS, adapters=loras),
            "adapter-load": Row("adapters", lambda loaded, new_tokens: loaded.load_adapter()),
            "decode-1-dora": decode_row(
                "adapters", task.alone, most_tokens=DORA_TOKENS, adapters=[task.doras[-1].name]
            ),
        },
        refused={"mixed-16-dora": "PEFT refuses DoRA adapters in a batch with several adapters"},
        notes={
            "mixed-16": "one batch with adapter_names",
            "decode-1-dora": "recomputes the norm of W + BA in every step",
        },
    )  # fmt: skip


if __name__ == "__main__":
    main(make)
