"""Request options against transformers' logits: log probabilities, logits, penalties, words, sampling, streaming, end
conditions."""

from __future__ import annotations

import datetime
import itertools
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import adaptrt
from support.models import ModelSpec, Reference, save_adapter
from support.serving import build_random_engine

SPEC = ModelSpec(num_key_value_heads=3)
PROMPT = [3, 44, 5, 60, 7, 3, 3, 12]
# Tolerance relative to the range of the logits: float32 sums in different orders.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[adaptrt.Executor, Reference]]:
    """Yields an executor whose steps hold fewer tokens than the prompt, and its reference."""
    directory = tmp_path_factory.mktemp("generation")
    model, engine = build_random_engine(SPEC, directory, tokens_per_block=4)
    config = adaptrt.ExecutorConfig(enable_chunked_context=True, max_num_tokens=5, max_batch_size=4, num_threads=1)
    adapter = save_adapter(model, directory / "adapter", 3, r=4)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        executor.put_adapter(adaptrt.LoraConfig.from_peft(1, adapter, executor.engine))
        yield executor, Reference(model)


def run(executor: adaptrt.Executor, max_tokens: int = 12, **fields: Any) -> list[adaptrt.Result]:
    """Returns the results of all responses to one request."""
    output = fields.pop("output_config", adaptrt.OutputConfig(exclude_input_from_output=True))
    request = adaptrt.Request(fields.pop("prompt", PROMPT), max_tokens, output_config=output, **fields)
    request_id = executor.enqueue_request(request)
    results: list[adaptrt.Result] = []
    while not results or not results[-1].is_final:
        for response in executor.await_responses(request_id, 60.0):
            assert not response.has_error(), response.error_msg
            results.append(response.result)
    return results


def tokens(executor: adaptrt.Executor, **fields: Any) -> list[int]:
    return run(executor, **fields)[-1].output_token_ids[0]


def joined(results: list[adaptrt.Result]) -> list[int]:
    return [token for result in results for token in result.output_token_ids[0]]


def sampling(**fields: Any) -> adaptrt.SamplingConfig:
    return adaptrt.SamplingConfig(**fields)


EVERYTHING = adaptrt.OutputConfig(
    return_log_probs=True, return_context_logits=True, return_generation_logits=True, exclude_input_from_output=True
)


@pytest.mark.parametrize("config", [{}, {"top_k": 8, "temperature": 1.7, "seed": 5}])
def test_log_probs_and_logits_are_the_models(served, config: dict[str, Any]) -> None:
    executor, reference = served
    # The second time the prompt's prefix is in the KV cache; its logits must be returned anyway.
    for _ in range(2):
        (result,) = run(executor, output_config=EVERYTHING, sampling_config=sampling(**config))
        generated = result.output_token_ids[0]
        expected = reference.logits(PROMPT, generated)
        scale = float(expected.max() - expected.min())
        assert result.context_logits.shape == (len(PROMPT), SPEC.vocab_size)
        assert result.generation_logits.shape == (1, len(generated), SPEC.vocab_size)
        actual = np.concatenate([result.context_logits[:-1], result.generation_logits[0]])
        assert np.abs(actual - expected.numpy()).max() <= TOLERANCE * scale
        rows = torch.log_softmax(expected[len(PROMPT) - 1 :].double(), dim=1)
        log_probs = [float(row[token]) for row, token in zip(rows, generated, strict=True)]
        np.testing.assert_allclose(result.log_probs[0], log_probs, atol=TOLERANCE * scale)
        assert result.cum_log_probs[0] == pytest.approx(sum(log_probs), abs=len(generated) * TOLERANCE * scale)


LOG_PROBS = adaptrt.OutputConfig(
    return_log_probs=True, exclude_input_from_output=True, top_log_probs=5, return_prompt_log_probs=True
)


@pytest.mark.parametrize("config", [{}, {"top_k": 8, "temperature": 1.7, "seed": 5}])
def test_log_probs_of_prompts_and_of_other_tokens_are_the_models(served, config: dict[str, Any]) -> None:
    executor, reference = served
    # The second time the prompt's prefix is in the KV cache.
    for _ in range(2):
        (result,) = run(executor, output_config=LOG_PROBS, sampling_config=sampling(**config))
        generated = result.output_token_ids[0]
        logits = reference.logits(PROMPT, generated).double()
        tolerance = TOLERANCE * float(logits.max() - logits.min())
        expected = torch.log_softmax(logits, dim=1).numpy()
        log_probs = [*result.prompt_log_probs, *result.log_probs[0]]
        followers = [*PROMPT[1:], *generated]
        np.testing.assert_allclose(log_probs, expected[np.arange(len(followers)), followers], atol=tolerance)
        top_log_probs = [*result.prompt_top_log_probs, *result.top_log_probs[0]]
        for row, likeliest in zip(expected, top_log_probs, strict=True):
            token_ids, actual = zip(*likeliest, strict=True)
            assert len(set(token_ids)) == 5
            np.testing.assert_allclose(actual, row[list(token_ids)], atol=tolerance)
            np.testing.assert_allclose(actual, np.sort(row)[:-6:-1], atol=tolerance)


def test_streams_have_each_tokens_most_likely_ones_once(served) -> None:
    executor, _ = served
    (whole,) = run(executor, output_config=LOG_PROBS)
    streamed = run(executor, output_config=LOG_PROBS, streaming=True)
    assert [row for result in streamed for row in result.top_log_probs[0]] == whole.top_log_probs[0]
    assert all(len(result.top_log_probs[0]) == len(result.output_token_ids[0]) for result in streamed)
    assert streamed[0].prompt_log_probs == whole.prompt_log_probs
    assert streamed[0].prompt_top_log_probs == whole.prompt_top_log_probs
    assert all(result.prompt_log_probs is result.prompt_top_log_probs is None for result in streamed[1:])
    growing = run(executor, output_config=LOG_PROBS, streaming=True, return_all_generated_tokens=True)
    assert [result.top_log_probs[0] for result in growing] == [whole.top_log_probs[0][: i + 1] for i in range(12)]


def test_prompts_in_and_out_of_the_output(served) -> None:
    executor, _ = served
    whole = adaptrt.OutputConfig()
    assert tokens(executor, output_config=whole) == PROMPT + tokens(executor)
    for output in (whole, adaptrt.OutputConfig(exclude_input_from_output=True)):
        streamed = run(executor, output_config=output, streaming=True)
        assert [len(result.output_token_ids[0]) for result in streamed] == [1] * 12
        assert joined(streamed) == tokens(executor)
        assert [result.finish_reasons[0] for result in streamed] == [adaptrt.FinishReason.NOT_FINISHED] * 11 + [
            adaptrt.FinishReason.LENGTH
        ]
    growing = run(executor, streaming=True, return_all_generated_tokens=True)
    assert [result.output_token_ids[0] for result in growing] == [tokens(executor)[: i + 1] for i in range(12)]


def test_streams_have_each_row_of_logits_once(served) -> None:
    executor, _ = served
    (whole,) = run(executor, output_config=EVERYTHING)
    streamed = run(executor, output_config=EVERYTHING, streaming=True)
    rows = np.concatenate([result.generation_logits[:, 0] for result in streamed])
    np.testing.assert_array_equal(rows, whole.generation_logits[0])
    assert streamed[-1].log_probs == whole.log_probs


def greedy_with(reference: Reference, change: Any, max_tokens: int = 12) -> list[int]:
    """Decodes greedily with a plain loop: takes the model's logits, changes them, and picks the first maximum."""
    generated: list[int] = []
    for _ in range(max_tokens):
        logits = reference.logits([*PROMPT, *generated])[-1].double().numpy().copy()
        generated.append(int(np.argmax(change(logits, generated))))
    return generated


def _repetition(logits: np.ndarray, generated: list[int]) -> np.ndarray:
    for token in {*PROMPT, *generated}:
        logits[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
    return logits


def _presence(logits: np.ndarray, generated: list[int]) -> np.ndarray:
    for token in set(generated):
        logits[token] -= 1.25
    return logits


def _frequency(logits: np.ndarray, generated: list[int]) -> np.ndarray:
    for token in generated:
        logits[token] -= 0.75
    return logits


@pytest.mark.parametrize(
    ("config", "change"),
    [
        ({"repetition_penalty": 1.5}, _repetition),
        ({"presence_penalty": 1.25}, _presence),
        ({"frequency_penalty": 0.75}, _frequency),
    ],
)
def test_penalties_follow_their_definitions(served, config: dict[str, float], change: Any) -> None:
    executor, reference = served
    assert tokens(executor, sampling_config=sampling(**config)) == greedy_with(reference, change)


def test_a_bias_is_added(served) -> None:
    executor, reference = served
    bias = np.random.default_rng(1).normal(0, 2, SPEC.vocab_size).astype(np.float32)
    assert tokens(executor, embedding_bias=bias) == greedy_with(reference, lambda logits, _: logits + bias)


def test_bad_words_are_not_generated(served) -> None:
    executor, _ = served
    plain = tokens(executor)
    word = plain[2:4]
    without = tokens(executor, bad_words=[word])
    assert without[:3] == plain[:3]
    assert word not in [without[i : i + 2] for i in range(len(without))]
    assert plain[0] not in tokens(executor, bad_words=[[plain[0]]])


def test_no_sequence_comes_twice(served) -> None:
    executor, _ = served
    text = PROMPT + tokens(executor, max_tokens=40, sampling_config=sampling(no_repeat_ngram_size=2))
    pairs = list(itertools.pairwise(text))
    new = pairs[len(PROMPT) - 1 :]
    assert len(set(new)) == len(new)
    assert not set(new) & set(pairs[: len(PROMPT) - 1])


def test_the_ends_and_their_reasons(served) -> None:
    executor, _ = served
    plain = tokens(executor)
    position = next(i for i in range(2, 12) if plain[i] not in plain[:i])
    end = plain[position]

    (ended,) = run(executor, end_id=end)
    assert (ended.output_token_ids[0], ended.finish_reasons) == (plain[:position], [adaptrt.FinishReason.END_ID])
    (later,) = run(executor, end_id=end, sampling_config=sampling(min_tokens=position + 2))
    assert end not in later.output_token_ids[0][: position + 2]
    assert later.output_token_ids[0][:position] == plain[:position]
    # A stop word of one token ends a text; a stop word of several tokens does not end it at its first token.
    words = [[end], [plain[0], 60]]
    (later_by_word,) = run(executor, stop_words=words, sampling_config=sampling(min_tokens=position + 2))
    assert later_by_word.output_token_ids[0][: position + 2] == later.output_token_ids[0][: position + 2]
    (stopped,) = run(executor, stop_words=[[60, 60], plain[position - 1 : position + 1]])
    assert stopped.output_token_ids[0] == plain[: position + 1]
    assert stopped.finish_reasons == [adaptrt.FinishReason.STOP_WORDS]
    (full,) = run(executor, end_id=-1)
    assert (full.output_token_ids[0], full.finish_reasons) == (plain, [adaptrt.FinishReason.LENGTH])


def test_time_is_up(served) -> None:
    executor, _ = served
    # Each step takes five tokens, so long prompts keep the executor busy for longer than the request's time limit.
    others = executor.enqueue_requests([adaptrt.Request([2] * 600, 100) for _ in range(8)])
    (result,) = run(executor, max_tokens=600, allotted_time_ms=datetime.timedelta(milliseconds=1))
    assert result.finish_reasons == [adaptrt.FinishReason.TIMED_OUT]
    assert result.output_token_ids[0] == tokens(executor, max_tokens=600)[: len(result.output_token_ids[0])]
    for request_id in others:
        executor.cancel_request(request_id)
        executor.await_responses(request_id)


def test_a_cancelled_request_gives_what_it_has(served) -> None:
    executor, _ = served
    output = adaptrt.OutputConfig(exclude_input_from_output=True)
    request_id = executor.enqueue_request(adaptrt.Request(PROMPT, 600, streaming=True, output_config=output))
    received = executor.await_responses(request_id)
    executor.cancel_request(request_id)
    while not received[-1].result.is_final:
        received += executor.await_responses(request_id)
    assert received[-1].result.finish_reasons[0] in (adaptrt.FinishReason.CANCELLED, adaptrt.FinishReason.LENGTH)
    generated = joined([response.result for response in received])
    assert generated == tokens(executor, max_tokens=600)[: len(generated)]


def test_a_seed_gives_the_same_tokens_in_any_company(served) -> None:
    executor, _ = served
    config = sampling(top_p=0.95, temperature=1.5, seed=7)
    alone = tokens(executor, sampling_config=config)
    assert tokens(executor, sampling_config=config) == alone
    assert tokens(executor, sampling_config=sampling(top_p=0.95, temperature=1.5, seed=8)) != alone
    company = [
        adaptrt.Request([9] * i, 20, sampling_config=sampling(top_k=5, seed=i), lora_config=adaptrt.LoraConfig(1))
        for i in range(1, 7)
    ]
    ids = executor.enqueue_requests(company)
    assert tokens(executor, sampling_config=config) == alone
    for request_id in ids:
        executor.await_responses(request_id)


def test_draws_have_the_models_distribution(served) -> None:
    executor, reference = served
    draws = 1500
    config = {"temperature": 2.0, "top_k": 6}
    output = adaptrt.OutputConfig(exclude_input_from_output=True)
    ids = executor.enqueue_requests(
        [
            adaptrt.Request(PROMPT, 1, sampling_config=sampling(**config, seed=seed), output_config=output)
            for seed in range(draws)
        ]
    )
    drawn = [executor.await_responses(i)[-1].result.output_token_ids[0][0] for i in ids]
    best = torch.topk(reference.logits(PROMPT)[-1] / 2.0, 6)
    expected = torch.softmax(best.values, 0).numpy()
    counts = np.array([drawn.count(int(token)) for token in best.indices])
    assert counts.sum() == draws
    # Pearson's statistic with five degrees of freedom exceeds 30 with a probability of 1.5e-5; seeds are fixed.
    assert (((counts - draws * expected) ** 2) / (draws * expected)).sum() < 30


def test_higher_priority_goes_first_and_the_queue_is_limited(served) -> None:
    executor, _ = served
    config = adaptrt.ExecutorConfig(max_batch_size=1, max_queue_size=3, num_threads=1, request_stats_max_iterations=100)
    with adaptrt.Executor(executor.engine, adaptrt.ModelType.DECODER_ONLY, config) as small:
        with pytest.raises(adaptrt.QueueFullError, match="max_queue_size is 3; there is no room for 4 more"):
            small.enqueue_requests([adaptrt.Request([3], 1)] * 4)
        ids = small.enqueue_requests([adaptrt.Request([3], 2, priority=priority) for priority in (0.1, 0.5, 0.9)])
        small.await_responses(ids)
        steps = small.get_latest_request_stats()
        order = [stats.id for step in steps for stats in step.request_stats if stats.scheduled]
        assert order == [ids[2], ids[2], ids[1], ids[1], ids[0], ids[0]]


def test_the_last_step_is_in_the_statistics_when_its_response_is_there(served) -> None:
    executor, _ = served
    for _ in range(20):
        executor.get_latest_iteration_stats()
        run(executor, max_tokens=1, prompt=[5, 6], lora_config=adaptrt.LoraConfig(1))
        assert sum(stats.num_completed_requests for stats in executor.get_latest_iteration_stats()) == 1
        assert [entry.users for entry in executor.list_adapters()] == [0]


def test_adapters_are_replaced_and_unloaded_under_running_requests(served) -> None:
    executor, _ = served
    output = adaptrt.OutputConfig(exclude_input_from_output=True)
    rows = np.array([[1, 0, 2], [4, 1, 2]], np.int32)
    size = 2 * (SPEC.hidden_size + SPEC.num_attention_heads * SPEC.head_dim)
    versions = [np.random.default_rng(seed).normal(0, 0.3, (2, size)).astype(np.float32) for seed in range(3)]
    ids = [
        executor.enqueue_request(
            adaptrt.Request(
                PROMPT, 200, lora_config=adaptrt.LoraConfig(5, weights, rows, replace=True), output_config=output
            )
        )
        for weights in versions
    ]
    executor.unload_adapter(5)
    with pytest.raises(adaptrt.PeftTaskNotCachedError, match="LoRA task 5 not found in cache"):
        tokens(executor, lora_config=adaptrt.LoraConfig(5))
    answers = [executor.await_responses(i)[-1].result.output_token_ids[0] for i in ids]
    for index, weights in enumerate(versions):
        lora = adaptrt.LoraConfig(100 + index, weights, rows)
        assert tokens(executor, max_tokens=200, lora_config=lora) == answers[index]
    assert len({tuple(answer) for answer in answers}) == 3


@pytest.mark.parametrize("streaming", [False, True])
def test_each_response_goes_to_one_of_those_who_wait(served, streaming: bool) -> None:
    executor, _ = served
    output = adaptrt.OutputConfig(exclude_input_from_output=True)
    request_id = executor.enqueue_request(adaptrt.Request(PROMPT, 300, streaming=streaming, output_config=output))
    received: list[adaptrt.Response] = []
    ends: list[str] = []

    def wait() -> None:
        while True:
            for response in executor.await_responses(request_id, 60.0):
                if response.has_error():
                    ends.append(response.error_msg)
                    return
                received.append(response)

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [f"ReqId {request_id} has already been processed and was terminated."] * len(threads)
    assert sum(len(response.result.output_token_ids[0]) for response in received) == 300


def test_results_are_pickled(served) -> None:
    executor, _ = served
    for response in executor.await_responses(
        executor.enqueue_request(adaptrt.Request(PROMPT, 3, output_config=EVERYTHING, client_id=8))
    ):
        again = pickle.loads(pickle.dumps(response))
        assert (again.request_id, again.client_id, again.has_error()) == (response.request_id, 8, False)
        assert again.result.output_token_ids == response.result.output_token_ids
        assert again.result.finish_reasons == response.result.finish_reasons
        np.testing.assert_array_equal(again.result.context_logits, response.result.context_logits)
        np.testing.assert_array_equal(again.result.generation_logits, response.result.generation_logits)
