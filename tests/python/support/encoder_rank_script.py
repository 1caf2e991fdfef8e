"""Runs batches of requests on engines with an encoder, one after the other, in every process of mpirun: SPECS.

SPECS is JSON: [{engine, model_type, config: fields of ExecutorConfig, batches: lists of {adapter, task, prompt, types,
encoder}, output}]. In a case with `encoder`, `prompt` begins the decoder; the result of other cases is hidden states.
Rank 0 writes each request's results to `output`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import adaptrt

from .rank_script import result_of
from .ranks import mpirun

MAX_TOKENS = 8
Answer = dict[str, np.ndarray]
"""`rows` of hidden states; or `tokens`, `logits` and `encoder_output`."""
Batches = list[list[dict[str, Any]]]

_DECODED = adaptrt.OutputConfig(
    return_context_logits=True,
    return_generation_logits=True,
    exclude_input_from_output=True,
    return_encoder_output=True,
)
_ALL = adaptrt.PoolingParams(adaptrt.PoolingType.ALL)


def _request(case: dict[str, Any], converted: Callable[[int, str], adaptrt.LoraConfig]) -> adaptrt.Request:
    lora = None if case["adapter"] is None else converted(case["task"], case["adapter"])
    if case["encoder"] is None:
        return adaptrt.Request(case["prompt"], 0, pooling_params=_ALL, token_type_ids=case["types"], lora_config=lora)
    return adaptrt.Request(
        case["prompt"],
        MAX_TOKENS,
        encoder_input_token_ids=case["encoder"],
        output_config=_DECODED,
        lora_config=lora,
    )


def _answer(result: adaptrt.Result) -> Answer:
    if result.pooled_output is not None:
        return {"rows": np.asarray(result.pooled_output)}
    logits = [np.asarray(result.context_logits), np.asarray(result.generation_logits)[0][1:]]
    return {
        "tokens": np.array(result.output_token_ids[0]),
        "logits": np.concatenate(logits),
        "encoder_output": np.asarray(result.encoder_output),
    }


def answer_batches(executor: adaptrt.Executor, batches: Batches) -> list[list[Answer]]:
    """Runs the batches one after the other."""
    # An adapter is converted once for all batches.
    converted = functools.cache(lambda task, adapter: adaptrt.LoraConfig.from_peft(task, adapter, executor.engine))
    answers = []
    for batch in batches:
        requests = executor.enqueue_requests([_request(case, converted) for case in batch])
        answers.append([_answer(result_of(executor, request)) for request in requests])
    return answers


def answers_of_engines(
    ranks: int, engines: Sequence[tuple[Path, str, Batches]], place: Path, **config: Any
) -> list[list[list[Answer]]]:
    """Runs this script in leader mode and returns its results. engines: with their model types and batches. place:
    directory for files.

    The same processes run all engines, because starting processes takes longer than the work.
    """
    specs = [
        {
            "engine": str(engine),
            "model_type": model_type,
            "config": config,
            "batches": batches,
            "output": str(place / f"answers{number}.npz"),
        }
        for number, (engine, model_type, batches) in enumerate(engines)
    ]
    (place / "specs.json").write_text(json.dumps(specs))
    mpirun(ranks, "-m", "support.encoder_rank_script", place / "specs.json")
    return [_read(np.load(spec["output"]), spec["batches"]) for spec in specs]


def _read(found: Mapping[str, np.ndarray], batches: Batches) -> list[list[Answer]]:
    return [
        [
            {name.split(".")[2]: found[name] for name in found if name.startswith(f"{number}.{at}.")}
            for at in range(len(batch))
        ]
        for number, batch in enumerate(batches)
    ]


def answer(spec: dict[str, Any]) -> None:
    """Runs the batches with one executor."""
    model_type, config = getattr(adaptrt.ModelType, spec["model_type"]), adaptrt.ExecutorConfig(**spec["config"])
    with adaptrt.Executor(spec["engine"], model_type, config) as executor:
        if not executor.can_enqueue_requests():
            return
        arrays = {}
        for number, batch in enumerate(answer_batches(executor, spec["batches"])):
            for at, found in enumerate(batch):
                arrays.update({f"{number}.{at}.{name}": values for name, values in found.items()})
        np.savez(spec["output"], **arrays)


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        answer(one)
