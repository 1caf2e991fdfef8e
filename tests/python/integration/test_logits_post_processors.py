"""Functions of the caller that change logits, called as TensorRT-LLM calls them: once per step."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import adaptrt
from support.models import ModelSpec
from support.serving import build_random_engine

SPEC = ModelSpec()
PROMPT = [1, 2, 3, 4]
INFINITY = float("inf")


def only_42(_request_id: int, logits: Any, _ids: list[list[int]], _stream: int, _client_id: int | None) -> None:
    logits[:] = -INFINITY
    logits[..., 42] = 0


def only_42_of_all(ids: list[int], logits: list[Any], tokens: Any, _stream: int, client_ids: list[Any]) -> None:
    assert len(ids) == len(logits) == len(tokens) == len(client_ids)
    for row in logits:
        only_42(0, row, [], 0, None)


def broken(*_arguments: Any) -> None:
    raise ValueError("no such thing")


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[adaptrt.Executor]:
    _, engine = build_random_engine(SPEC, tmp_path_factory.mktemp("processors"))
    config = adaptrt.ExecutorConfig(
        num_threads=1,
        logits_post_processor_config=adaptrt.LogitsPostProcessorConfig(
            {"42": only_42, "broken": broken, "none": None}, only_42_of_all
        ),
    )
    with adaptrt.Executor(engine, executor_config=config) as executor:
        yield executor


def request(max_tokens: int = 5, **fields: Any) -> adaptrt.Request:
    output = adaptrt.OutputConfig(exclude_input_from_output=True)
    return adaptrt.Request(PROMPT, max_tokens, output_config=output, **fields)


def tokens(executor: adaptrt.Executor, request_id: int) -> list[int]:
    (response,) = executor.await_responses(request_id)
    assert not response.has_error(), response.error_msg
    return response.result.output_token_ids[0]


def test_by_name_batched_and_by_request(executor: adaptrt.Executor) -> None:
    batched = request(logits_post_processor_name=adaptrt.Request.BATCHED_POST_PROCESSOR_NAME)
    requests = [
        request(),
        request(logits_post_processor_name="42", client_id=7),
        batched,
        request(logits_post_processor=only_42),
        batched,
    ]
    plain, *changed = [tokens(executor, request_id) for request_id in executor.enqueue_requests(requests)]
    assert changed == [[42] * 5] * 4
    assert plain == tokens(executor, executor.enqueue_request(request()))


@pytest.mark.parametrize("with_torch", [True, False])
def test_arguments_of_the_post_processor(
    executor: adaptrt.Executor, monkeypatch: pytest.MonkeyPatch, with_torch: bool
) -> None:
    calls: list[Any] = []

    def note(*arguments: Any) -> None:
        calls.append(arguments)
        arguments[1][0, 0, 9] += 1000

    if not with_torch:
        monkeypatch.delitem(sys.modules, "torch")
    asked = request(3, logits_post_processor=note, client_id=123)
    asked.output_config.return_generation_logits = True
    request_id = executor.enqueue_request(asked)
    (response,) = executor.await_responses(request_id)
    assert response.result.output_token_ids == [[9, 9, 9]]
    assert [call[0] for call in calls] == [request_id] * 3
    assert all(isinstance(call[1], torch.Tensor if with_torch else np.ndarray) for call in calls)
    assert [tuple(call[1].shape) for call in calls] == [(1, 1, SPEC.vocab_size)] * 3
    assert [call[2] for call in calls] == [[PROMPT], [[*PROMPT, 9]], [[*PROMPT, 9, 9]]]
    assert [call[3:] for call in calls] == [(0, 123)] * 3
    # The result holds the model's own logits, and arrays that the function kept are not written again.
    for call, row in zip(calls, response.result.generation_logits[0], strict=True):
        kept = np.asarray(call[1])[0, 0].copy()
        kept[9] = row[9]
        np.testing.assert_array_equal(kept, row)


def test_an_exception_fails_its_request_alone(executor: adaptrt.Executor) -> None:
    ids = executor.enqueue_requests([request(), request(logits_post_processor_name="broken"), request()])
    assert executor.await_responses(ids[1])[0].error_msg == "logits post-processor: ValueError: no such thing"
    assert tokens(executor, ids[0]) == tokens(executor, ids[2])
    for wrong in (lambda: None, lambda *_: 1 / 0):
        (response,) = executor.await_responses(executor.enqueue_request(request(logits_post_processor=wrong)))
        assert response.error_msg.startswith("logits post-processor: ")

    def spoil(_id: int, logits: Any, *_: Any) -> None:
        logits[...] = float("nan")

    (response,) = executor.await_responses(executor.enqueue_request(request(logits_post_processor=spoil)))
    assert "post-processor have made logits NaN" in response.error_msg


def test_it_may_call_the_executor(executor: adaptrt.Executor) -> None:
    def cancel(request_id: int, *_: Any) -> None:
        executor.cancel_request(request_id)

    (response,) = executor.await_responses(executor.enqueue_request(request(60, logits_post_processor=cancel)))
    assert response.result.finish_reasons == [adaptrt.FinishReason.CANCELLED]
    assert len(response.result.output_token_ids[0]) < 60


def test_names_are_checked(executor: adaptrt.Executor) -> None:
    for name in ("other", "none"):
        with pytest.raises(adaptrt.RequestError, match=f"logits_post_processor_name is '{name}', which"):
            executor.enqueue_request(request(logits_post_processor_name=name))
    with pytest.raises(adaptrt.RequestError, match="are both given"):
        executor.enqueue_request(request(logits_post_processor_name="42", logits_post_processor=only_42))
    with pytest.raises(TypeError, match=r"^Request\.logits_post_processor is .*; accepted: None, function"):
        request(logits_post_processor="only_42")
    with pytest.raises(TypeError, match=r"^LogitsPostProcessorConfig\.processor_map is .*; accepted: None, dict"):
        adaptrt.LogitsPostProcessorConfig({"a": 1})
    config = adaptrt.ExecutorConfig(
        logits_post_processor_config=adaptrt.LogitsPostProcessorConfig({"batched": only_42})
    )
    assert any("processor_map has 'batched'" in problem for problem in config.validate())


def test_configurations_are_values() -> None:
    config = adaptrt.LogitsPostProcessorConfig({"42": only_42}, only_42_of_all, False)
    assert config.processor_map == {"42": only_42}
    assert config.processor_batched is only_42_of_all
    again = pickle.loads(pickle.dumps(config))
    assert again == config != adaptrt.LogitsPostProcessorConfig({"42": broken}, only_42_of_all, False)
    asked = pickle.loads(pickle.dumps(request(logits_post_processor=only_42)))
    assert asked.logits_post_processor is only_42
