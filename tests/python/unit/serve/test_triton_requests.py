"""Conversion of tensors to requests: the meaning of each input, and rejected inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from adaptrt.runtime.adapter_tokenizers import TextTokenizer
from adaptrt.runtime.text_bound import TextTooLongError, longest_token
from adaptrt.runtime.vocabulary import Vocabulary
from adaptrt.serve.errors import ApiError
from adaptrt.serve.triton_requests import ACCEPTED, TritonRequest, make_request
from adaptrt.serve.triton_tensors import tensor_of_value

MAX_PROMPT_TOKENS = 6
WORDS = ["a", "b", "c", "d", "e", "f"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def make(tokenizer: Tokenizer, outputs: list[str] | None = None, **values: Any) -> TritonRequest:
    given = {"request_output_len": 4, **values}
    arrays = {name: tensor_of_value(name, value, ACCEPTED) for name, value in given.items() if value is not None}
    own = TextTokenizer(Vocabulary(tokenizer), (5, 4), longest_token(tokenizer))
    return make_request(arrays, outputs, own=own, max_prompt_tokens=MAX_PROMPT_TOKENS, limit_ms=None)


def test_each_input_reaches_the_request(tokenizer: Tokenizer) -> None:
    asked = make(
        tokenizer, input_ids=[1, 2, 3, 0, 0], input_lengths=3, end_id=5, pad_id=0, temperature=0.5, runtime_top_k=7,
        runtime_top_p=0.25, random_seed=2**64 - 1, repetition_penalty=1.5, presence_penalty=-0.5,
        frequency_penalty=0.75, min_length=2, len_penalty=1.0, beam_width=1,
        stop_words_list=[[1, 2, 3, 0], [2, 3, -1, -1]], bad_words_list=[[[4, 0], [1, -1]]],
        embedding_bias=[0.5] * 6, exclude_input_in_output=True, streaming=True,
        return_log_probs=True, return_context_logits=True, return_generation_logits=True,
    )  # fmt: skip
    request, sampling, output = asked.request, asked.request.sampling_config, asked.request.output_config
    assert request.input_token_ids == [1, 2, 3]
    assert (request.max_tokens, request.end_id, request.pad_id) == (4, 5, 0)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 7, 0.25, 2**64 - 1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -0.5, 0.75)
    assert (sampling.min_tokens, sampling.beam_width, sampling.length_penalty) == (2, 1, None)
    assert request.stop_words == [[1, 2], [3]]
    assert request.bad_words == [[4]]
    assert request.embedding_bias is not None
    assert request.embedding_bias.tolist() == [0.5] * 6
    assert (output.return_log_probs, output.return_context_logits, output.return_generation_logits) == (
        True,
        True,
        True,
    )
    assert (asked.streaming, asked.exclude_input, asked.lora) == (True, True, None)
    assert asked.outputs == (
        "output_ids", "sequence_length", "cum_log_probs", "output_log_probs", "context_logits", "generation_logits"
    )  # fmt: skip


def test_a_text_ends_where_the_models_texts_end(tokenizer: Tokenizer) -> None:
    asked = make(tokenizer, text_input="b c", stop_words=["", "e"])
    assert asked.request.input_token_ids == [1, 2]
    assert (asked.request.end_id, asked.request.stop_words) == (5, [[4]])
    assert (asked.outputs, asked.stop, asked.end_ids) == (("text_output",), ("e",), (5, 4))
    assert make(tokenizer, text_input="b", end_id=2).request.end_id == 2
    ids = make(tokenizer, input_ids=[1, 2]).request
    assert (ids.end_id, ids.stop_words) == (None, None)


def test_outputs_are_those_that_are_listed(tokenizer: Tokenizer) -> None:
    asked = make(tokenizer, ["cum_log_probs", "text_output"], input_ids=[1], return_context_logits=True)
    assert asked.outputs == ("cum_log_probs", "text_output")
    assert asked.request.output_config.return_log_probs
    assert not asked.request.output_config.return_context_logits


def test_the_names_of_the_text_level_model_are_understood(tokenizer: Tokenizer) -> None:
    asked = make(
        tokenizer, request_output_len=None, input_ids=[1], max_tokens=3, top_k=2, top_p=0, seed=9, min_tokens=1,
        stream=False,
    )  # fmt: skip
    sampling = asked.request.sampling_config
    assert (asked.request.max_tokens, sampling.top_k, sampling.top_p) == (3, 2, None)
    assert (sampling.seed, sampling.min_tokens, asked.streaming) == (9, 1, False)


def test_an_adapter_is_a_task_with_its_weights_or_without(tokenizer: Tokenizer) -> None:
    lora = {"lora_weights": [[[1.0, 2.0]]], "lora_config": [[1, 0, 1, 0]]}
    first = make(tokenizer, input_ids=[1], lora_task_id=2**63 - 1, **lora).lora
    assert first is not None
    assert first.task_id == 2**63 - 1
    np.testing.assert_array_equal(first.weights, np.array([[1, 2]], np.float32))
    later = make(tokenizer, input_ids=[1], lora_task_id=0).lora
    assert later is not None
    assert (later.task_id, later.weights) == (0, None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "'input_ids' and 'text_input' is needed"),
        ({"input_ids": [1], "text_input": "a"}, "'input_ids' and 'text_input' is needed, and not both"),
        ({"input_ids": [1], "request_output_len": None}, "'request_output_len' is missing"),
        ({"input_ids": [1], "max_tokens": 1}, "'request_output_len' and 'max_tokens' have the same meaning"),
        ({"input_ids": [1, 2], "input_lengths": 3}, "'input_lengths' is 3; input_ids has 2 tokens"),
        ({"input_ids": [1, 2], "input_lengths": 0}, "'input_lengths' is 0"),
        ({"input_ids": [1, 2], "input_lengths": -1}, "'input_lengths' is -1"),
        ({"text_input": "a", "input_lengths": 1}, "'input_lengths' is given without input_ids"),
        ({"input_ids": [1], "len_penalty": 0.5}, "'len_penalty' is 0.5"),
        ({"input_ids": [1], "bad_words": ["a"]}, "'bad_words' is not supported; send bad_words_list"),
        (
            {"input_ids": [1], "stop_words_list": [[1, 2], [3, -1]]},
            "'stop_words_list': word 0 ends at 3; accepted: 1 to 2",
        ),
        ({"input_ids": [1], "stop_words_list": [[1, 2], [2, 1]]}, "word 1 ends at 1; accepted: 3 to 2"),
        ({"input_ids": [1], "stop_words_list": [[1, 2], [-1, 1]]}, "after a -1"),
        ({"input_ids": [1], "stop_words_list": [[1, 2]]}, "'stop_words_list': shape"),
        ({"input_ids": [1], "lora_task_id": 2**63}, "'lora_task_id' is 9223372036854775808; the ids from"),
        (
            {"input_ids": [1], "lora_task_id": 1, "lora_weights": [[1.0]]},
            "'lora_weights' is given without lora_config",
        ),
        ({"input_ids": [1], "lora_task_id": 1, "lora_config": [[1]]}, "'lora_config' is given without lora_weights"),
        ({"input_ids": [1], "lora_weights": [[1.0]], "lora_config": [[1]]}, "is given without lora_task_id"),
    ],
)
def test_invalid_requests_are_refused_by_name(tokenizer: Tokenizer, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said):
        make(tokenizer, **values)


def test_a_text_that_no_prompt_can_be_is_refused_before_it_is_tokenised(tokenizer: Tokenizer) -> None:
    assert make(tokenizer, text_input="b" * 24).request.input_token_ids == [0]
    with pytest.raises(
        TextTooLongError, match="text_input has 25 characters; expected at most 24, as many as 6"
    ) as raised:
        make(tokenizer, text_input="b" * 25)
    assert raised.value.field == "text_input"


@pytest.mark.parametrize(
    ("outputs", "said"), [(["x"], "output 'x' is not known"), (["output_ids"] * 2, "is given twice")]
)
def test_outputs_that_are_not_there_are_refused(tokenizer: Tokenizer, outputs: list[str], said: str) -> None:
    with pytest.raises(ApiError, match=said):
        make(tokenizer, outputs, input_ids=[1])


def test_an_empty_list_of_words_is_none(tokenizer: Tokenizer) -> None:
    for empty in ([[0], [-1]], [[[0, 0], [-1, -1]]]):
        assert make(tokenizer, input_ids=[1], stop_words_list=empty, bad_words_list=empty).request.stop_words is None
