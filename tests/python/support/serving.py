"""Engines built with the command line, and requests to the executor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

import adaptrt
from adaptrt.builder.cli import main as command_line
from support.models import ModelSpec, save_model

LORA_MODULES = ["attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h"]


def run_command(*arguments: object) -> None:
    """Runs `adaptrt ...` in this process. Any failure fails the test."""
    assert command_line([str(argument) for argument in arguments]) == 0


def build_engine(model_directory: Path, directory: Path, dtype: str = "float32", **flags: object) -> Path:
    """Converts a Hugging Face directory and compiles it with LoRA and DoRA on every module; returns the engine."""
    run_command(
        "convert-checkpoint",
        "--model_dir",
        model_directory,
        "--output_dir",
        directory / "checkpoint",
        "--dtype",
        dtype,
    )
    settings: dict[str, object] = {
        "max_batch_size": 8,
        "max_input_len": 640,
        "max_seq_len": 704,
        "max_num_tokens": 1024,
        "max_lora_rank": 32,
        "lora_plugin": "auto",
        "dora_plugin": "enable",
        **flags,
    }
    arguments = [argument for name, value in settings.items() for argument in (f"--{name}", value)]
    engine = directory / "engine"
    run_command(
        "build", "--checkpoint_dir", directory / "checkpoint", "--output_dir", engine, *arguments,
        *(() if settings["lora_plugin"] == "disable" else ("--lora_target_modules", *LORA_MODULES)),
    )  # fmt: skip
    return engine


def build_random_engine(spec: ModelSpec, directory: Path, dtype: str = "float32", **flags: object) -> tuple[Path, Path]:
    """Returns (model directory, engine directory) of a random model."""
    model = save_model(spec, directory / "model")
    return model, build_engine(model, directory, dtype, **flags)


def crowd_fields(policy: str, kv_tokens: int, reuse: bool, **fields: Any) -> dict[str, Any]:
    """Returns fields of ExecutorConfig for crowds whose results must not depend on them."""
    return {
        "enable_chunked_context": True,
        "scheduler_config": adaptrt.SchedulerConfig(getattr(adaptrt.CapacitySchedulerPolicy, policy)),
        "kv_cache_config": adaptrt.KvCacheConfig(enable_block_reuse=reuse, max_tokens=kv_tokens),
        **fields,
    }


@dataclasses.dataclass
class LogProbs:
    """Log probs of generated tokens and of the prompt: each token's own, and those of the most likely tokens."""

    generated: list[float]
    generated_top: list[list[tuple[int, float]]]
    prompt: list[float] | None
    prompt_top: list[list[tuple[int, float]]] | None


@dataclasses.dataclass
class Answer:
    """Answer to one request; arrays are empty without logits."""

    tokens: list[int]
    context_logits: np.ndarray
    generation_logits: np.ndarray
    finish_reason: adaptrt.FinishReason
    log_probs: LogProbs

    def without_prompt_log_probs(self) -> Answer:
        """Returns the answer as a later sequence of the request has it: only the first has the prompt's log probs."""
        return dataclasses.replace(self, log_probs=dataclasses.replace(self.log_probs, prompt=None, prompt_top=None))

    def same_bits(self, other: Answer) -> bool:
        """True if tokens, logits and log probs are equal bit for bit."""
        return (
            self.same_log_probs(other)
            and self.context_logits.tobytes() == other.context_logits.tobytes()
            and self.generation_logits.tobytes() == other.generation_logits.tobytes()
        )

    def same_log_probs(self, other: Answer) -> bool:
        """True if tokens and log probs are equal bit for bit."""
        return self.tokens == other.tokens and self.log_probs == other.log_probs


def make_request(
    prompt: list[int],
    max_tokens: int,
    lora: adaptrt.LoraConfig | None = None,
    with_logits: bool = True,
    **fields: Any,
) -> Any:
    """Makes a greedy request that returns all of its log probs and logits."""
    output = adaptrt.OutputConfig(
        return_log_probs=True,
        return_context_logits=with_logits,
        return_generation_logits=with_logits,
        exclude_input_from_output=True,
        top_log_probs=4,
        return_prompt_log_probs=True,
    )
    return adaptrt.Request(prompt, max_tokens, output_config=output, lora_config=lora, **fields)


def collect(executor: adaptrt.Executor, request_id: int) -> Answer:
    """Waits for the end of a request of one sequence."""
    (answer,) = collect_sequences(executor, request_id)
    return answer


def collect_sequences(executor: adaptrt.Executor, request_id: int) -> list[Answer]:
    """Waits for a request's end; returns each sequence's last response."""
    last: dict[int, adaptrt.Result] = {}
    is_final = False
    while not is_final:
        for response in executor.await_responses(request_id):
            assert not response.has_error(), response.error_msg
            last[response.result.sequence_index] = response.result
            is_final = response.result.is_final
    assert sorted(last) == list(range(len(last)))
    assert all(result.is_sequence_final for result in last.values())
    return [_answer(last[index]) for index in range(len(last))]


def _answer(result: adaptrt.Result) -> Answer:
    nothing = np.empty((1, 0), np.float32)
    return Answer(
        list(result.output_token_ids[0]),
        nothing if result.context_logits is None else np.asarray(result.context_logits),
        (nothing if result.generation_logits is None else np.asarray(result.generation_logits))[0],
        result.finish_reasons[0],
        LogProbs(result.log_probs[0], result.top_log_probs[0], result.prompt_log_probs, result.prompt_top_log_probs),
    )
