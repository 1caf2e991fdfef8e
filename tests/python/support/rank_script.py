"""Runs batches of requests on engines, one after the other, in every process of mpirun: SPECS.

SPECS is JSON: [{engine, config: fields of ExecutorConfig, batches: [[{adapter, task, prompt, tokens}]], output}]. Rank
0 writes each request's tokens and logits to `output`, but only the tokens of cases with `tokens_alone`. `lora_storage`
in the config is that of PeftCacheConfig.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import adaptrt

OUTPUT = adaptrt.OutputConfig(return_context_logits=True, return_generation_logits=True, exclude_input_from_output=True)
TOKENS_ALONE = adaptrt.OutputConfig(exclude_input_from_output=True)


def result_of(executor: adaptrt.Executor, request_id: int) -> adaptrt.Result:
    """Returns the last result of a request that does not stream."""
    while True:
        response = executor.await_responses(request_id)[-1]
        assert not response.has_error(), response.error_msg
        if response.result.is_final:
            return response.result


def answer_batches(executor: adaptrt.Executor, batches: list[list[dict[str, Any]]]) -> dict[str, np.ndarray]:
    """Runs the batches one after the other. Returns tokens and logits by batch and request for answers_of().

    `task_alone` in a case names an adapter that was sent before.
    """
    # An adapter is converted once for all batches.
    converted = functools.cache(lambda task, adapter: adaptrt.LoraConfig.from_peft(task, adapter, executor.engine))
    arrays = {}
    for number, batch in enumerate(batches):
        requests = []
        for case in batch:
            lora = None
            if case["adapter"] is not None and case.get("task_alone"):
                lora = adaptrt.LoraConfig(case["task"])
            elif case["adapter"] is not None:
                lora = converted(case["task"], case["adapter"])
            wanted = TOKENS_ALONE if case.get("tokens_alone") else OUTPUT
            requests.append(adaptrt.Request(case["prompt"], case["tokens"], output_config=wanted, lora_config=lora))
        for at, request in enumerate(executor.enqueue_requests(requests)):
            found = result_of(executor, request)
            arrays[f"{number}.{at}.tokens"] = np.array(found.output_token_ids[0])
            if not case.get("tokens_alone"):
                arrays[f"{number}.{at}.context"] = found.context_logits
                arrays[f"{number}.{at}.generation"] = found.generation_logits[0]
    return arrays


def answer(spec: dict[str, Any]) -> None:
    """Runs the batches with one executor."""
    fields = dict(spec["config"])
    cache = adaptrt.PeftCacheConfig(lora_storage=fields.pop("lora_storage", "exact"))
    config = adaptrt.ExecutorConfig(peft_cache_config=cache, **fields)
    with adaptrt.Executor(spec["engine"], adaptrt.ModelType.DECODER_ONLY, config) as executor:
        if executor.can_enqueue_requests():
            np.savez(spec["output"], **answer_batches(executor, spec["batches"]))


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        answer(one)
