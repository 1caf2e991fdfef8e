"""Requests that make_references.py and check_references.py send to an engine, and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import adaptrt

MAX_TOKENS = 8
ADAPTERS: Mapping[str, Mapping[str, Any] | None] = {
    "base": None,
    "lora": {"r": 5},
    "rslora": {"r": 16, "use_rslora": True},
    "dora": {"r": 4, "use_dora": True},
}
"""Arguments of peft.LoraConfig."""
USES_C_LIBRARY = "uses-c-library"
"""File in the folder of a family whose engine takes exponentials and logarithms from the C library."""
LENGTHS = (3, 17, 24, 41)
"""Lengths of the prompts, one for each of ADAPTERS."""


@dataclass(frozen=True)
class Answer:
    """A request's tokens, and the logits after each token of its prompt and each of its tokens but the last."""

    tokens: list[int]
    logits: np.ndarray  # float32 [tokens, vocab]

    def same_bits(self, other: Answer) -> bool:
        """True if tokens and logits are equal bit for bit."""
        return self.tokens == other.tokens and self.logits.tobytes() == other.logits.tobytes()


def prompts(vocab_size: int) -> list[list[int]]:
    """Returns a prompt of random tokens for each of ADAPTERS."""
    return [
        np.random.default_rng((seed, length)).integers(2, vocab_size, length).tolist()
        for seed, length in enumerate(LENGTHS)
    ]


def ask(folder: Path, engine: str, vocab_size: int, together: bool, **fields: Any) -> list[Answer]:
    """Sends the prompts, each with its adapter, in one batch or one after the other. `fields` are ExecutorConfig's."""
    config = adaptrt.ExecutorConfig(**fields)
    output = adaptrt.OutputConfig(
        return_context_logits=True, return_generation_logits=True, exclude_input_from_output=True
    )
    requests = []
    for task_id, (name, prompt) in enumerate(zip(ADAPTERS, prompts(vocab_size), strict=True)):
        lora = None if name == "base" else adaptrt.LoraConfig.from_peft(task_id, folder / name, folder / engine)
        requests.append(adaptrt.Request(prompt, MAX_TOKENS, output_config=output, lora_config=lora))
    with adaptrt.Executor(folder / engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        if together:
            return [_wait(executor, request_id) for request_id in executor.enqueue_requests(requests)]
        return [_wait(executor, executor.enqueue_request(request)) for request in requests]


def _wait(executor: adaptrt.Executor, request_id: int) -> Answer:
    while True:
        for response in executor.await_responses(request_id):
            if response.has_error():
                raise RuntimeError(response.error_msg)
            if response.result.is_final:
                result = response.result
                rows = [np.asarray(result.context_logits), np.asarray(result.generation_logits)[0][1:]]
                return Answer(list(result.output_token_ids[0]), np.concatenate(rows))
