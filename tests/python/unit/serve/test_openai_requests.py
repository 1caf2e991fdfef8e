"""The executor's request for a request's fields and for the model's recommended sampling."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from adaptrt import ConfigError, GuidedDecodingParams, RequestError
from adaptrt.runtime.adapter_tokenizers import TextTokenizer, Truncation
from adaptrt.runtime.sampling_defaults import GENERATION_CONFIG_FILE, SamplingDefaults
from adaptrt.runtime.text_requests import bad_word_tokens
from adaptrt.serve.errors import ApiError
from adaptrt.serve.generation import TextRequest
from adaptrt.serve.http import parse_json
from adaptrt.serve.openai_fields import CompletionRequest, ModelFields, TruncationFields
from adaptrt.serve.openai_requests import (
    adapter_of,
    check_answer_limits,
    embedding_bias_of,
    text_request,
    truncation_of,
)
from adaptrt.serve.options import ServerLimits
from adaptrt.serve.service import Service
from support.tokenizers import byte_level

TOKENIZER = byte_level()


def asked(
    recommended: SamplingDefaults | None = None,
    guide: GuidedDecodingParams | None = None,
    *,
    of_server: bool = False,
    **fields: Any,
) -> TextRequest:
    service = SimpleNamespace(
        sampling_defaults=recommended or SamplingDefaults(),
        engine_info=SimpleNamespace(max_batch_size=3, max_beam_width=2),
        options=SimpleNamespace(include_eos=of_server),
    )
    parsed = parse_json(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest, ServerLimits())
    return text_request(
        cast(Service, service),
        parsed,
        prompt=[2],
        adapter=None,
        own=cast(TextTokenizer, SimpleNamespace(tokenizer=TOKENIZER)),
        embedding_bias=embedding_bias_of(parsed, 4),
        max_tokens=parsed.max_tokens,
        top_log_probs=None,
        guide=guide,
    )


def test_without_fields_tokens_are_drawn_from_the_whole_distribution() -> None:
    sampling = asked().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert sampling.seed != asked().sampling.seed


def test_the_models_recommendations_hold_where_a_request_says_nothing(tmp_path: Path) -> None:
    (tmp_path / GENERATION_CONFIG_FILE).write_text(
        json.dumps({"temperature": 0.7, "top_k": 20, "top_p": None, "repetition_penalty": 1.1, "do_sample": True})
    )
    sampling = asked(SamplingDefaults.load(tmp_path), top_k=-1).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (0.7, 0, 1.0, 1.1)
    assert SamplingDefaults.load(tmp_path / "none") == SamplingDefaults()


def test_a_recommendation_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / GENERATION_CONFIG_FILE).write_text('{"top_p": 2}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p is 2; expected more than 0, at most 1"):
        SamplingDefaults.load(tmp_path)


def test_fields_become_the_executors() -> None:
    request = asked(seed=-1, priority=-100, logit_bias={"2": 1.5}, stop="x", stop_token_ids=[3], cache_salt="a")
    assert request.sampling.seed == 2**64 - 1
    assert request.priority == 1.0
    assert asked(priority=100).priority == 0.0
    assert asked().priority == 0.5
    assert request.embedding_bias is not None
    assert request.embedding_bias.tolist() == [0.0, 0.0, 1.5, 0.0]
    assert (request.stop, request.stop_token_ids) == (("x",), (3,))
    assert request.cache_salt_id == asked(cache_salt="a").cache_salt_id != asked(cache_salt="b").cache_salt_id
    assert asked().cache_salt_id is None


def test_fields_that_the_model_decides_are_refused_by_name() -> None:
    with pytest.raises(ApiError, match="logit_bias has token 4; the vocabulary is 0 to 3"):
        asked(logit_bias={"4": 1})


@pytest.mark.parametrize("of_server", [False, True])
def test_the_server_says_if_the_end_token_counts_unless_a_request_does(of_server: bool) -> None:
    assert asked(of_server=of_server).include_end is of_server
    for include_eos in (False, True):
        assert asked(of_server=of_server, include_eos=include_eos).include_end is include_eos


def test_allowed_tokens_are_a_bias() -> None:
    bias = asked(allowed_token_ids=[1, 3], logit_bias={"3": 2}).embedding_bias
    assert bias is not None
    assert bias.tolist() == [-np.inf, 0.0, -np.inf, 2.0]
    with pytest.raises(ApiError, match="allowed_token_ids has token 4; the vocabulary is 0 to 3") as refused:
        asked(allowed_token_ids=[1, 4])
    assert refused.value.param == "allowed_token_ids"


def test_bad_words_are_sequences_of_tokens() -> None:
    assert asked(bad_words=["ab"]).bad_words == tuple(tuple(TOKENIZER.encode(text).ids) for text in ("ab", " ab"))
    nothing = SimpleNamespace(encode=lambda *_, **__: SimpleNamespace(ids=[]))
    with pytest.raises(RequestError, match="bad_words has 'x', which has no tokens"):
        bad_word_tokens(cast(TextTokenizer, SimpleNamespace(tokenizer=nothing)), ["x"])


def test_beams() -> None:
    sampling = asked(
        SamplingDefaults(top_k=20, temperature=0.7), use_beam_search=True, n=2, length_penalty=0.5
    ).sampling
    assert (sampling.beam_width, sampling.length_penalty, sampling.early_stopping) == (2, 0.5, 2)
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (None, None, None)
    assert asked(use_beam_search=True, n=2, early_stopping=True).sampling.early_stopping == 1
    assert asked(use_beam_search=True, n=2, temperature=0.5).sampling.temperature == 0.5
    assert asked(use_beam_search=True, n=2, temperature=0).sampling.temperature is None
    one = asked(use_beam_search=True, length_penalty=2).sampling
    assert (one.beam_width, one.length_penalty, one.top_p) == (1, None, None)  # greedy decoding
    with pytest.raises(ApiError, match=r"n is 3 with use_beam_search; .* at most 2 beams \(--max-beam-width\)"):
        asked(use_beam_search=True, n=3)
    with pytest.raises(ApiError, match="use_beam_search is true with a guide") as refused:
        asked(use_beam_search=True, n=2, guide=GuidedDecodingParams(GuidedDecodingParams.GuideType.JSON))
    assert refused.value.param == "use_beam_search"


def test_how_prompts_are_cut() -> None:
    def cut(**fields: Any) -> Truncation | None:
        return truncation_of(TruncationFields.model_validate(fields), 9, "left")

    assert cut() is None
    assert cut(truncate_prompt_tokens=-1) == Truncation(9, "left")
    assert cut(truncate_prompt_tokens=9, truncation_side="right") == Truncation(9, "right")
    with pytest.raises(ApiError, match="truncate_prompt_tokens is 10; expected at most 9") as refused:
        cut(truncate_prompt_tokens=10)
    assert refused.value.param == "truncate_prompt_tokens"
    assert Truncation(2, "left").cut([1, 2, 3]) == [2, 3]
    assert Truncation(2, "right").cut([1, 2, 3]) == [1, 2]


def test_min_tokens_holds_for_every_token_that_ends_an_answer() -> None:
    request = asked(min_tokens=2, stop_token_ids=[3])
    assert (request.sampling.min_tokens, request.stop_token_ids) == (2, (3,))


class Adapters:
    """Knows the adapter "a", and records which adapters are loaded."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, str]] = []

    async def find(self, name: str) -> bool:
        return name == "a" or name in dict(self.loaded)

    async def current_version(self, name: str) -> str | None:
        return name if await self.find(name) else None

    def is_from(self, name: str, path: str) -> bool:
        return (name, path) == ("a", "/adapters/a")

    async def resolve(self, name: str, path: str, *, replace: bool) -> str:
        return path

    async def load(self, name: str, path: str) -> None:
        self.loaded.append((name, path))


def adapter(adapters: Adapters, *, enable_lora_loading: bool = True, **lora_request: Any) -> str | None:
    service = SimpleNamespace(adapters=adapters, options=SimpleNamespace(enable_lora_loading=enable_lora_loading))
    fields = ModelFields.model_validate({"lora_request": lora_request})
    return asyncio.run(adapter_of(cast(Service, service), fields))


def test_a_lora_request_names_an_adapter_and_may_load_it() -> None:
    adapters = Adapters()
    assert adapter(adapters, lora_name="a", lora_int_id=3) == "a"
    assert adapter(adapters, lora_name="a", lora_path="/adapters/a") == "a"
    with pytest.raises(ApiError, match="lora_path is '/other', but the adapter 'a' was loaded from another directory"):
        adapter(adapters, lora_name="a", lora_path="/other")
    assert adapters.loaded == []
    assert adapter(adapters, lora_name="b", lora_path="/adapters/b") == "b"
    assert adapters.loaded == [("b", "/adapters/b")]


@pytest.mark.parametrize(
    ("fields", "is_enabled"), [({}, True), ({"lora_path": "/adapters/c"}, False), ({"lora_path": ""}, True)]
)
def test_a_lora_request_for_an_unknown_adapter_is_answered_with_404(fields: dict[str, str], is_enabled: bool) -> None:
    adapters = Adapters()
    with pytest.raises(ApiError, match="The adapter 'c' does not exist") as refused:
        adapter(adapters, lora_name="c", enable_lora_loading=is_enabled, **fields)
    assert (refused.value.status, refused.value.param) == (404, "lora_request.lora_name")
    assert adapters.loaded == []


def test_answers_to_one_request_are_bounded() -> None:
    limits = ServerLimits(max_answers=6, max_log_probs=120, max_prompt_log_probs=30)

    def check(n: int, prompts: list[int], tokens: int, top: int | None = None, *, echo: bool = False) -> None:
        check_answer_limits(limits, n, prompts, [tokens] * len(prompts), top, top if echo else None)

    check(2, [9, 9, 9], 1000)
    with pytest.raises(ApiError, match=r"n is 2, which makes 8 answers with 4 prompts; .* 6 .* --max-answers"):
        check(2, [9] * 4, 1)
    check(2, [9, 9, 9], 5, 3)
    with pytest.raises(ApiError, match=r"may have 144 log probs, with 4 for .* 120 .* --max-log-probs"):
        check(2, [9, 9, 9], 6, 3)
    check(1, [9], 10_000, 20)  # a single answer may fill the engine's context
    with pytest.raises(ApiError, match="--max-log-probs"):
        check(2, [9], 30, 2)
    check(1, [10, 7], 1, 2, echo=True)
    check(1, [11, 7], 1, 2)
    with pytest.raises(ApiError, match=r"has 11 tokens, which is 33 .* expected at most 30 .* --max-prompt-log-probs"):
        check(1, [7, 11], 1, 2, echo=True)
    with pytest.raises(ApiError, match=r"may have 123 log probs, with 3 for each .* and 3 for each"):
        check(1, [10, 10, 10, 7], 1, 2, echo=True)
