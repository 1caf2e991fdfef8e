"""Requests whose tokens the host chooses, and drafts of all kinds, to engines of backend cuda on an emulated device."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.emulated_cuda import emulate
from support.guides import ending_bias, regex
from support.models import ALL_MODULES, ModelSpec, save_adapter, save_model
from support.serving import collect, make_request
from support.tokenizers import SPECIAL, byte_level, save_tokenizer

TOKENIZER = byte_level()
SPEC = ModelSpec(
    vocab_size=272, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, intermediate_size=80
)
SIZES = BuildConfig(
    max_batch_size=8,
    max_num_tokens=32,
    max_seq_len=96,
    max_beam_width=2,
    tokens_per_block=16,
    backend="cuda",
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
PROMPT = TOKENIZER.encode("abcabcab").ids
TOKENS = 6
END = SPECIAL.index("</s>")
WANTED = 42
BIAS = np.where(np.arange(SPEC.vocab_size) == WANTED, 100.0, 0.0).astype(np.float32)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("requests")
    model = save_model(SPEC, directory / "model", dtype=torch.bfloat16)
    save_tokenizer(TOKENIZER, model)
    save_adapter(model, directory / "adapter", seed=1, r=4, target_modules=ALL_MODULES)
    build(Checkpoint.of_model(model), SIZES, directory / "engine")
    return directory / "engine"


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One of a request's sequences or beams."""

    tokens: list[int]
    log_probs: list[float]


def sequences(executor: adaptrt.Executor, request_id: int) -> list[Sequence]:
    """Waits for the end of a request."""
    found: dict[int, list[Sequence]] = {}
    is_final = False
    while not is_final:
        for response in executor.await_responses(request_id):
            assert not response.has_error(), response.error_msg
            result = response.result
            pairs = zip(result.output_token_ids, result.log_probs, strict=True)
            found[result.sequence_index] = [Sequence(list(tokens), list(log_probs)) for tokens, log_probs in pairs]
            is_final = result.is_final
    return [sequence for index in sorted(found) for sequence in found[index]]


def executor_of(engine: Path, **fields: Any) -> adaptrt.Executor:
    """Starts an executor that has the adapter."""
    config = adaptrt.ExecutorConfig(**{"enable_chunked_context": True, "max_beam_width": 2, **fields})
    executor = adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config)
    executor.put_adapter(adaptrt.LoraConfig.from_peft(1, engine.parent / "adapter", executor.engine))
    return executor


def served(executor: adaptrt.Executor, requests: Mapping[str, Any]) -> dict[str, list[Sequence]]:
    """Returns the answers to requests that run together."""
    ids = executor.enqueue_requests(list(requests.values()))
    return {name: sequences(executor, number) for name, number in zip(requests, ids, strict=True)}


def request(tokens: int = TOKENS, **fields: Any) -> Any:
    fields.setdefault("lora_config", adaptrt.LoraConfig(1))
    sampling = {name: fields.pop(name) for name in list(fields) if hasattr(adaptrt.SamplingConfig(), name)}
    output = adaptrt.OutputConfig(return_log_probs=True, exclude_input_from_output=True)
    return adaptrt.Request(
        PROMPT, tokens, output_config=output, sampling_config=adaptrt.SamplingConfig(**sampling), **fields
    )


def only_wanted(_id: int, logits: Any, _tokens: Any, _stream: int, _client_id: int | None) -> None:
    logits[..., :] = -1000.0
    logits[..., WANTED] = 0.0


def kinds() -> dict[str, Any]:
    """Requests for each way in which the host chooses tokens, and for ways in which the device finds them."""
    return {
        "greedy": request(),
        "base model": request(lora_config=None),
        "top_p": request(top_p=0.8, temperature=2.0, seed=3),
        "large top_k": request(top_k=200, temperature=2.0, seed=4),
        "small top_k": request(top_k=20, temperature=2.0, seed=5),
        "penalties": request(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25),
        "no repeated pairs": request(12, no_repeat_ngram_size=2),
        "bias": request(embedding_bias=BIAS),
        "biased, without the token": request(embedding_bias=BIAS, bad_words=[[WANTED]]),
        "may not end": request(embedding_bias=BIAS, end_id=WANTED, min_tokens=4),
        "guide": request(
            guided_decoding_params=regex("[0-9]{3}"), end_id=END,
            embedding_bias=ending_bias(TOKENIZER, SPEC.vocab_size, END),
        ),
        "post-processor": request(logits_post_processor=only_wanted),
        "beams": request(beam_width=2),
        "several sequences": request(num_return_sequences=2, top_k=30, temperature=2.0, seed=6),
    }  # fmt: skip


def test_each_kind_is_the_same_alone_and_beside_the_others(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    with executor_of(engine) as executor:
        together = served(executor, kinds())
    with executor_of(engine) as executor:
        for name, one in kinds().items():
            assert served(executor, {name: one})[name] == together[name], name
    tokens = {name: answers[0].tokens for name, answers in together.items()}
    assert tokens["greedy"] != tokens["base model"]
    assert tokens["greedy"] not in (tokens["top_p"], tokens["large top_k"], tokens["small top_k"])
    assert tokens["bias"] == tokens["post-processor"] == [WANTED] * TOKENS
    assert WANTED not in tokens["biased, without the token"]
    pairs = list(
        zip([*PROMPT, *tokens["no repeated pairs"]], [*PROMPT, *tokens["no repeated pairs"]][1:], strict=False)
    )
    assert len(pairs[len(PROMPT) - 1 :]) == len(set(pairs[len(PROMPT) - 1 :]))
    assert len(tokens["may not end"]) == 4
    assert WANTED not in tokens["may not end"]
    assert re.fullmatch("[0-9]{3}", TOKENIZER.decode(tokens["guide"]))
    first, second = together["beams"]
    assert first.tokens != second.tokens
    assert sum(first.log_probs) >= sum(second.log_probs)
    assert together["several sequences"][0].tokens != together["several sequences"][1].tokens


def test_logits_are_those_before_anything_changes_them(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host adds the bias to its own copy."""
    emulate(monkeypatch)
    with executor_of(engine) as executor:
        lora = adaptrt.LoraConfig(1)
        plain = collect(executor, executor.enqueue_request(make_request(PROMPT, 1, lora)))
        biased = collect(executor, executor.enqueue_request(make_request(PROMPT, 1, lora, embedding_bias=BIAS)))
    assert plain.generation_logits.tobytes() == biased.generation_logits.tobytes()
    assert biased.tokens == [WANTED] != plain.tokens


DRAFTED = {
    "greedy": {},
    "base model": {"lora_config": None},
    "small top_k": {"top_k": 20, "temperature": 2.0, "seed": 5},
    "penalty": {"repetition_penalty": 1.3},
    # Its text repeats, so n-grams find drafts that are right.
    "bias": {"embedding_bias": BIAS},
}


@pytest.mark.parametrize("kind", ["n-grams", "given", "draft engine"])
def test_drafts_change_nothing(kind: str, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of drafts are verified beside decodes; both engines of a pair have a device."""
    emulated = emulate(monkeypatch)
    with executor_of(engine) as executor:
        expected = served(executor, {name: request(8, **fields) for name, fields in DRAFTED.items()})
    settings: dict[str, Any] = {}
    drafts: dict[str, dict[str, Any]] = {name: {} for name in DRAFTED}
    if kind == "n-grams":
        lookahead = adaptrt.LookaheadDecodingConfig(4, 2, 4)
        settings["decoding_config"] = adaptrt.DecodingConfig(lookahead_decoding_config=lookahead)
        drafts = {name: {"lookahead_config": lookahead} for name in DRAFTED}
    elif kind == "given":  # the third token is wrong
        for name, (answer,) in expected.items():
            draft = [*answer.tokens[:2], (answer.tokens[2] + 1) % SPEC.vocab_size, answer.tokens[3]]
            drafts[name]["external_draft_tokens_config"] = adaptrt.ExternalDraftTokensConfig(draft)
    else:
        settings["draft_target_decoding_config"] = adaptrt.DraftTargetDecodingConfig(3, str(engine))
    with executor_of(engine, **settings) as executor:
        asked = {name: request(8, **fields, **drafts[name]) for name, fields in DRAFTED.items()}
        assert served(executor, asked) == expected
        assert executor.get_latest_iteration_stats()[-1].speculation_stats.accepted_tokens > 0
    assert len(emulated.devices) == (3 if kind == "draft engine" else 2)
