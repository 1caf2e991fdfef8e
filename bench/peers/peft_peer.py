"""transformers + PEFT: an eager loop with a KV cache, without generate()'s overhead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import peft
import torch
import transformers
from worker import ADAPTER_OF_ONE, Metrics, Peer, Task, decode_rate, main, prefill_rate, seconds_of, whole_rate

DORA_TOKENS = 16
"""New tokens with a DoRA adapter: a rate after the first token does not depend on it, and each takes long."""


def make(task: Task) -> Peer:
    """The model in bfloat16, the adapters unmerged."""
    torch.set_num_threads(task.threads)
    transformers.logging.set_verbosity_error()
    base = transformers.AutoModelForCausalLM.from_pretrained(
        task.base, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    model = peft.PeftModel.from_pretrained(
        base, task.loras[0], adapter_name=task.loras[0].name, autocast_adapter_dtype=False
    )
    for path in (*task.loras[1:], *task.doras):
        model.load_adapter(path, adapter_name=path.name, autocast_adapter_dtype=False)
    model = model.to(torch.bfloat16).eval()

    def generate(prompts: Sequence[list[int]], new_tokens: int, **options: Any) -> list[list[int]]:
        with torch.inference_mode():
            tokens, cache, answers = torch.tensor(prompts), transformers.DynamicCache(config=base.config), []
            for _ in range(new_tokens):
                output = model(
                    input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1, **options
                )  # fmt: skip
                tokens = output.logits[:, -1].argmax(-1, keepdim=True)
                answers.append(tokens)
            return torch.cat(answers, dim=1).tolist()

    @contextmanager
    def adapter(name: str | None) -> Iterator[None]:
        if name is None:
            with model.disable_adapter():
                yield
        else:
            model.set_adapter(name)
            yield

    def with_adapter(name: str | None, rate: Any, prompts: Any, *tokens: int) -> Metrics:
        with adapter(name):
            result: Metrics = rate(generate, prompts, *tokens)
            return result

    def load() -> Metrics:
        path = task.loras[ADAPTER_OF_ONE]
        seconds = seconds_of(lambda: model.load_adapter(path, adapter_name="cold", autocast_adapter_dtype=False))
        model.delete_adapter("cold")
        return {"value": seconds}

    def mixed(names: list[str]) -> Metrics:
        model.set_adapter(names[0])
        return whole_rate(partial(generate, adapter_names=names), task.batch, task.mixed_tokens)

    new = task.new_tokens
    return Peer(
        versions={"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__},
        rows={
            "prefill-512": lambda: with_adapter(None, prefill_rate, task.long),
            "decode-1": lambda: with_adapter(None, decode_rate, task.alone, new),
            "decode-16": lambda: with_adapter(None, decode_rate, task.batch, new),
            "decode-1-lora": lambda: with_adapter(task.loras[ADAPTER_OF_ONE].name, decode_rate, task.alone, new),
            "mixed-16": lambda: mixed([path.name for path in task.loras]),
            "adapter-load": load,
            "decode-1-dora": lambda: with_adapter(task.doras[-1].name, decode_rate, task.alone, min(DORA_TOKENS, new)),
        },
        refused={"mixed-16-dora": "PEFT takes no DoRA adapters in a batch with several adapters"},
        notes={
            "mixed-16": "one batch with adapter_names",
            "decode-1-dora": "recomputes the norm of W + BA in every step",
        },
    )


if __name__ == "__main__":
    main(make)
