"""Adapters that add tokens or shift norms on backend cuda, on an emulated device, against transformers + PEFT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.adapters import edit_tensors
from support.emulated_cuda import emulate
from support.families import LLAMA, Family, save_family
from support.kinds import save_kind
from support.models import Reference
from support.serving import Answer, collect, make_request

# See test_cuda_families.py.
TOLERANCE = 0.006
MOST = 9
CONFIG = BuildConfig(
    max_batch_size=5,
    max_num_tokens=24,
    max_seq_len=64,
    tokens_per_block=16,
    backend="cuda",
    lora_config=LoraBuildConfig(max_lora_rank=8, max_extra_tokens=MOST),
    plugin_config=PluginConfig(lora_plugin="auto"),
)
SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 56, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
VOCABULARY = {"granite": 104, "gemma2": 97, "gpt2": 97, "gpt-neox": 96}
FAMILIES = {
    # Scaled embeddings and logits.
    "granite": Family(
        transformers.GraniteConfig, LLAMA,
        {**{name: value for name, value in SIZES.items() if name != "head_dim"}, "hidden_size": 64, "vocab_size": 104,
         "embedding_multiplier": 2.0, "logits_scaling": 3.0, "tie_word_embeddings": False},
    ),
    # A tied lm_head with a soft cap.
    "gemma2": Family(
        transformers.Gemma2Config, LLAMA,
        {**SIZES, "vocab_size": 97, "query_pre_attn_scalar": 24, "final_logit_softcapping": 4.0},
    ),
    # Positions are added to embeddings, and norms have biases.
    "gpt2": Family(
        transformers.GPT2Config, ["c_attn", "c_proj", "c_fc"],
        {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 64, "n_inner": 56,
         "bos_token_id": 0, "eos_token_id": 1},
    ),
    # Norms of layers whose attention and MLP are parallel.
    "gpt-neox": Family(
        transformers.GPTNeoXConfig, ["query_key_value", "dense"],
        {**{name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")},
         "hidden_size": 64, "vocab_size": 96},
    ),
}  # fmt: skip


REPEATED = {"gemma2", "gpt-neox"}
"""Models that differ from the others only in row-wise ops."""


@dataclass(frozen=True)
class Kind:
    """An adapter, and the number of tokens that it adds."""

    fields: dict[str, Any]
    extra: int = 0


def kinds_of(name: str) -> dict[str, Kind]:
    family, vocabulary = FAMILIES[name], VOCABULARY[name]
    lora = {"r": 2, "target_modules": family.targets[:1], "fan_in_fan_out": name == "gpt2"}
    of_norms = {"biases": Kind({**lora, "bias": "all"})}
    if name == "gpt-neox":
        return of_norms
    trained = [5, vocabulary, vocabulary + 1]
    new = {"resized": Kind(lora, MOST), "tokens": Kind({**lora, "trainable_token_indices": trained}, 2)}
    return new | (of_norms if name == "gpt2" else {"plain": Kind(lora)})


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.nightly) if name in REPEATED else name for name in FAMILIES]
)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_logits_are_those_of_peft_and_bits_those_of_each_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch with the base model, with prompts in chunks. Tokens are the same if no logits cross to the host."""
    emulate(monkeypatch)
    vocabulary, kinds = VOCABULARY[name], kinds_of(name)
    model = save_family(FAMILIES[name], tmp_path / "model", dtype=torch.float16)
    for seed, (kind, made) in enumerate(kinds.items()):
        config = peft.LoraConfig(task_type="CAUSAL_LM", **made.fields)
        save_kind(model, tmp_path / kind, config, seed, made.extra)
    build(Checkpoint.of_model(model), CONFIG, tmp_path / "engine")
    rng = np.random.default_rng(3)
    prompts: dict[str | None, list[int]] = {}
    for length, kind in enumerate((*kinds, None)):
        extra = 0 if kind is None else kinds[kind].extra
        prompts[kind] = [
            *rng.integers(2, vocabulary, 7 + 4 * length).tolist(),
            *range(vocabulary, vocabulary + extra),
            4,
        ]

    def answers(asked: dict[str | None, list[int]], **fields: Any) -> dict[str | None, Answer]:
        executor_config = adaptrt.ExecutorConfig(enable_chunked_context=True)
        with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, executor_config) as executor:
            loras = {
                kind: adaptrt.LoraConfig.from_peft(number, tmp_path / kind, executor.engine)
                for number, kind in enumerate(kinds)
            }
            ids = {
                kind: executor.enqueue_request(make_request(prompt, 3, loras.get(kind), **fields))
                for kind, prompt in asked.items()
            }
            return {kind: collect(executor, request_id) for kind, request_id in ids.items()}

    together = answers(prompts)
    base = Reference(model)
    for kind, answer in together.items():
        extra = 0 if kind is None else kinds[kind].extra
        reference = base if kind is None else Reference(model, tmp_path / kind, extra)
        expected = reference.logits(prompts[kind], answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        assert actual.shape == expected.shape == (len(prompts[kind]) + 2, vocabulary + extra), kind
        assert difference(actual, expected) <= TOLERANCE, kind
        if kind is not None and not extra:
            unchanged = base.logits(prompts[kind], answer.tokens).numpy()
            assert difference(unchanged, expected) > 2 * TOLERANCE, kind
        assert answers({kind: prompts[kind]})[kind].same_bits(answer), kind
    for kind, answer in answers(prompts, with_logits=False).items():
        assert answer.same_log_probs(together[kind]), kind
    if name == "granite":
        # Logits of new tokens that an earlier request left behind in the same row.
        edit_tensors(
            tmp_path / "resized",
            lambda tensors: {
                key: np.concatenate([value[:vocabulary], 50 * value[vocabulary:]]) for key, value in tensors.items()
            },
        )
        output = adaptrt.OutputConfig(exclude_input_from_output=True)
        with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY) as executor:

            def best_tokens(prompt: list[int], lora: adaptrt.LoraConfig | None) -> list[int]:
                request = adaptrt.Request(prompt, 3, lora_config=lora, output_config=output)
                (response,) = executor.await_responses(executor.enqueue_request(request))
                return list(response.result.output_token_ids[0])

            loud = adaptrt.LoraConfig.from_peft(0, tmp_path / "resized", executor.engine)
            assert max(best_tokens(prompts["resized"], loud)) >= vocabulary
            assert best_tokens(prompts[None], None) == together[None].tokens


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the maximum difference relative to the range of the expected values."""
    return float(np.abs(actual - expected).max() / (expected.max() - expected.min()))
