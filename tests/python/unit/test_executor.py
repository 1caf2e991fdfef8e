"""The executor from Python, with a small random engine: threads, waiting, adapters by name and from disk, bad input."""

from __future__ import annotations

import datetime
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adaptrt
from adaptrt import _core
from adaptrt.runtime.named_adapter import FIRST_NAMED_TASK_ID
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine

SPEC = ModelSpec()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("executor")
    model = save_model(SPEC, root / "model")
    adapters = {name: save_adapter(model, root / name, seed, r=4) for seed, name in enumerate(["first", "second"])}
    adapters["dora"] = save_adapter(model, root / "dora", 5, r=4, use_dora=True)
    return {"model": model, **adapters, "engine": build_engine(model, root, lora_dir=adapters["first"])}


@pytest.fixture(scope="module")
def engine(directories: dict[str, Path]) -> adaptrt.LoadedEngine:
    return adaptrt.load_engine(directories["engine"])


@pytest.fixture
def executor(engine: adaptrt.LoadedEngine) -> Iterator[adaptrt.Executor]:
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(num_threads=1)) as made:
        yield made


def ask(executor: adaptrt.Executor, prompt: list[int], max_tokens: int = 4, **fields: Any) -> list[int]:
    output = adaptrt.OutputConfig(exclude_input_from_output=True)
    adapter = fields.pop("adapter", None)
    request = adaptrt.Request(prompt, max_tokens, output_config=output, **fields)
    return tokens_of(executor, executor.enqueue_request(request, adapter=adapter))


def tokens_of(executor: adaptrt.Executor, request_id: int) -> list[int]:
    return executor.await_responses(request_id)[-1].result.output_token_ids[0]


def test_two_executors_at_once(executor: adaptrt.Executor, directories: dict[str, Path]) -> None:
    with adaptrt.Executor(directories["engine"]) as other:
        ids = [each.enqueue_request(adaptrt.Request([3, 4, 5], 8)) for each in (executor, other)]
        assert tokens_of(executor, ids[0]) == tokens_of(other, ids[1])


def test_an_engine_has_one_executor_and_runs_no_steps_of_others(engine: adaptrt.LoadedEngine) -> None:
    config = adaptrt.ExecutorConfig(num_threads=1)
    native = engine.start(config)
    with pytest.raises(adaptrt.ConfigError, match="max_batch_size is 9"):
        _core.Executor(native, adaptrt.ExecutorConfig(max_batch_size=9), 1 << 28)
    executor = _core.Executor(native, config, 1 << 28)
    try:
        with pytest.raises(adaptrt.ConfigError, match=r"^the engine has an executor; expected an engine of its own"):
            _core.Executor(native, config, 1 << 28)
        with pytest.raises(_core.StepError, match=r"^the engine has an executor; expected an engine without one"):
            native.allocate_kv_blocks(4)
        of_none = np.zeros(0, np.int32)
        step = {"token_ids": of_none, "positions": of_none, "prompt_lengths": of_none, "logit_rows": of_none}
        with pytest.raises(_core.StepError, match=r"^the engine has an executor"):
            native.step(sequence_offsets=np.zeros(1, np.int32), block_tables=np.zeros((0, 1), np.int32), **step)
        response = executor.await_responses(executor.enqueue_request(adaptrt.Request([3, 4], 2)))[-1]
        assert response.result.is_final
    finally:
        executor.shutdown()
    with pytest.raises(_core.StepError, match=r"^the engine has an executor"):
        native.allocate_kv_blocks(4)


def test_a_draft_engine_is_another_engine(engine: adaptrt.LoadedEngine) -> None:
    config = adaptrt.ExecutorConfig(num_threads=1)
    config.draft_target_decoding_config = adaptrt.DraftTargetDecodingConfig(max_draft_len=2)
    native = engine.start(config)
    with pytest.raises(adaptrt.ConfigError, match=r"^the engine has an executor; expected an engine of its own"):
        _core.Executor(native, config, 1 << 28, native)


def test_another_thread_goes_on_while_one_waits(executor: adaptrt.Executor) -> None:
    waiting = threading.Thread(target=executor.await_responses, args=(0.5,))
    waiting.start()
    count = 0
    while waiting.is_alive():
        count += 1
    assert count > 1000


def test_many_threads_wait(executor: adaptrt.Executor) -> None:
    prompts = [[i, 2, 3] for i in range(2, 18)]
    expected = [ask(executor, prompt) for prompt in prompts]
    answers: dict[int, list[int]] = {}

    def run(index: int) -> None:
        answers[index] = ask(executor, prompts[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(prompts))] == expected


@pytest.mark.parametrize("timeout", [0, 0.01, datetime.timedelta(milliseconds=10)])
def test_waiting_in_vain(executor: adaptrt.Executor, timeout: Any) -> None:
    assert executor.await_responses(timeout=timeout) == []


def test_waiting_for_several(executor: adaptrt.Executor) -> None:
    ids = executor.enqueue_requests([adaptrt.Request([i], 2) for i in (2, 3, 4)])
    answers = executor.await_responses(ids, datetime.timedelta(minutes=1))
    assert [[response.request_id for response in responses] for responses in answers] == [[i] for i in ids]


def ended(request_id: int) -> str:
    return f"ReqId {request_id} has already been processed and was terminated."


def test_waiting_for_a_live_and_an_ended_request_loses_nothing(executor: adaptrt.Executor) -> None:
    expected = ask(executor, [4], 3)
    over = executor.enqueue_request(adaptrt.Request([3], 1))
    assert executor.await_responses(over)[-1].result.is_final
    live = executor.enqueue_request(adaptrt.Request([4], 3))
    (of_live,), (of_over,) = executor.await_responses([live, over])
    assert of_live.result.output_token_ids[0][1:] == expected
    assert (of_over.request_id, of_over.has_error(), of_over.error_msg) == (over, True, ended(over))
    for request_id in (live, over):
        (response,) = executor.await_responses(request_id)
        assert response.error_msg == ended(request_id)
        assert executor.get_num_responses_ready(request_id) == 0


def test_an_unknown_id_among_several_takes_nothing(executor: adaptrt.Executor) -> None:
    request_id = executor.enqueue_request(adaptrt.Request([3], 2))
    with pytest.raises(adaptrt.RequestError, match="request 99 is unknown"):
        executor.await_responses([request_id, 99])
    assert executor.await_responses(request_id)[-1].result.is_final


def test_a_signal_ends_the_wait(executor: adaptrt.Executor) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            executor.await_responses()
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_shutdown_wakes_those_who_wait(engine: adaptrt.LoadedEngine) -> None:
    executor = adaptrt.Executor(engine)
    returned: list[list[adaptrt.Response]] = []
    waiting = threading.Thread(target=lambda: returned.append(executor.await_responses()))
    waiting.start()
    time.sleep(0.1)
    assert executor.can_enqueue_requests()
    executor.shutdown()
    waiting.join()
    assert returned == [[]]
    assert not executor.is_alive
    assert not executor.can_enqueue_requests()
    for call in (
        lambda: executor.enqueue_request(adaptrt.Request([1], 1)),
        executor.await_responses,
        lambda: executor.await_responses(1),
        lambda: executor.await_responses([1]),
        lambda: executor.cancel_request(1),
        executor.get_latest_iteration_stats,
        executor.get_latest_debug_tensors,
        executor.list_adapters,
    ):
        with pytest.raises(adaptrt.ExecutorClosedError, match="executor was shut down"):
            call()
    executor.shutdown()


def test_logits_are_read_only_arrays(executor: adaptrt.Executor) -> None:
    output = adaptrt.OutputConfig(return_context_logits=True, return_generation_logits=True, return_log_probs=True)
    request_id = executor.enqueue_request(adaptrt.Request([3, 4, 5], 2, output_config=output))
    response = executor.await_responses(request_id)[0]
    result = response.result
    del response
    assert result.output_token_ids[0][:3] == [3, 4, 5]
    assert result.context_logits is not None
    assert result.context_logits.shape == (3, SPEC.vocab_size)
    assert result.context_logits.dtype == np.float32
    assert not result.context_logits.flags.writeable
    assert result.generation_logits is not None
    assert result.generation_logits.shape == (1, 2, SPEC.vocab_size)
    assert result.log_probs is not None
    assert result.cum_log_probs is not None
    assert result.cum_log_probs[0] == pytest.approx(sum(result.log_probs[0]))


def test_the_prompts_logits_come_with_every_sequence(executor: adaptrt.Executor) -> None:
    output = adaptrt.OutputConfig(return_context_logits=True)
    request = adaptrt.Request([3, 4, 5], 4, output_config=output, num_return_sequences=2)
    request_id = executor.enqueue_request(request)
    responses = executor.await_responses(request_id)
    if len(responses) < 2:  # The sequences may end in different steps.
        responses += executor.await_responses(request_id)
    first, second = sorted((response.result for response in responses), key=lambda result: result.sequence_index)
    np.testing.assert_array_equal(np.asarray(first.context_logits), np.asarray(second.context_logits))
    assert np.asarray(first.context_logits).shape == (3, SPEC.vocab_size)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the log softmax of each row, float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def check_most_likely(rows: list[list[tuple[int, float]]], logits: np.ndarray, count: int) -> None:
    expected = log_softmax(logits)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    assert [[token_id for token_id, _ in row] for row in rows] == order.tolist()
    actual = np.array([[log_prob for _, log_prob in row] for row in rows])
    np.testing.assert_allclose(actual, np.take_along_axis(expected, order, axis=1), atol=2e-6)


def test_log_probs_are_the_log_softmax_of_the_logits(executor: adaptrt.Executor) -> None:
    prompt = [3, 4, 5, 41, 4, 17, 2]
    output = adaptrt.OutputConfig(
        return_log_probs=True, return_context_logits=True, return_generation_logits=True,
        exclude_input_from_output=True, top_log_probs=4, return_prompt_log_probs=True,
    )  # fmt: skip
    sampling = adaptrt.SamplingConfig(top_k=3, seed=2, repetition_penalty=1.5)
    request = adaptrt.Request(prompt, 6, output_config=output, sampling_config=sampling)
    result = executor.await_responses(executor.enqueue_request(request))[0].result
    assert result.context_logits is not None
    assert result.generation_logits is not None
    assert result.log_probs is not None
    assert result.top_log_probs is not None
    assert result.prompt_log_probs is not None
    assert result.prompt_top_log_probs is not None
    before = log_softmax(result.context_logits[:-1])
    np.testing.assert_allclose(result.prompt_log_probs, before[np.arange(6), prompt[1:]], atol=2e-6)
    check_most_likely(result.prompt_top_log_probs, result.context_logits[:-1], 4)
    check_most_likely(result.top_log_probs[0], result.generation_logits[0], 4)
    for token_id, log_prob, row in zip(
        result.output_token_ids[0], result.log_probs[0], result.top_log_probs[0], strict=True
    ):
        assert dict(row).get(token_id, log_prob) == log_prob
    for token_id, log_prob, row in zip(prompt[1:], result.prompt_log_probs, result.prompt_top_log_probs, strict=True):
        assert dict(row).get(token_id, log_prob) == log_prob

    # The same request without logits, and after pickling.
    output.return_context_logits = output.return_generation_logits = False
    request.output_config = output
    alone = executor.await_responses(executor.enqueue_request(request))[0].result
    assert alone.context_logits is None
    for same in (alone, pickle.loads(pickle.dumps(alone))):
        assert same.top_log_probs == result.top_log_probs
        assert same.prompt_log_probs == result.prompt_log_probs
        assert same.prompt_top_log_probs == result.prompt_top_log_probs


def test_a_failed_response_has_no_result(engine: adaptrt.LoadedEngine) -> None:
    with adaptrt.Executor(engine) as executor:
        request_id = executor.enqueue_request(adaptrt.Request([3], 600))
        responses: list[adaptrt.Response] = []
        waiting = threading.Thread(target=lambda: responses.extend(executor.await_responses(request_id)))
        waiting.start()
        time.sleep(0.02)
        executor.shutdown()
        waiting.join()
    response = responses[-1]
    if response.has_error():
        assert response.error_msg == "executor was shut down"
        with pytest.raises(adaptrt.RequestError, match="executor was shut down"):
            _ = response.result


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_token_ids": []}, "input_token_ids is empty"),
        ({"input_token_ids": [1] * 641}, "max_input_len is 640"),
        ({"input_token_ids": [61]}, r"input_token_ids\[0\] is 61; the vocabulary is 0 to 60"),
        ({"input_token_ids": [-1]}, r"input_token_ids\[0\] is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 704}, "max_seq_len is 704"),
        ({"position_ids": [0]}, "position_ids is given"),
        (
            {"prompt_tuning_config": adaptrt.PromptTuningConfig(np.zeros((1, 3), np.float32))},
            r"prompt_tuning_config.embedding_table is \[1, 3\]",
        ),
        ({"num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"sampling_config": adaptrt.SamplingConfig(beam_width=2)}, "sampling_config.beam_width"),
        ({"embedding_bias": [float("nan")] * 61}, r"embedding_bias\[0\] is NaN"),
        ({"sampling_config": adaptrt.SamplingConfig(top_p_decay=0.5)}, "sampling_config.top_p_decay is 0.5"),
        ({"priority": 2.0}, "priority is 2"),
        (
            {"output_config": adaptrt.OutputConfig(top_log_probs=21)},
            "output_config.top_log_probs is 21; accepted: 0 to 20",
        ),
        ({"output_config": adaptrt.OutputConfig(top_log_probs=-1)}, "output_config.top_log_probs is -1"),
    ],
)
def test_bad_requests(executor: adaptrt.Executor, fields: dict[str, Any], message: str) -> None:
    request = adaptrt.Request(**{"input_token_ids": [1], "max_tokens": 1, **fields})
    with pytest.raises(adaptrt.RequestError, match=message):
        executor.enqueue_request(request)
    assert executor.get_num_responses_ready() == 0


@pytest.mark.parametrize("shape", [(1,), (60,), (1, 61), ()])
def test_a_bias_of_another_shape_is_the_responses_error(executor: adaptrt.Executor, shape: tuple[int, ...]) -> None:
    request = adaptrt.Request([3], 1, embedding_bias=np.zeros(shape, np.float32), client_id=5)
    (response,) = executor.await_responses(executor.enqueue_request(request))
    assert response.error_msg.startswith("embedding bias shape is not as expected: embedding_bias is [")
    assert response.client_id == 5
    request.embedding_bias = np.zeros(SPEC.vocab_size)
    assert executor.await_responses(executor.enqueue_request(request))[0].result.is_final


def test_unknown_ids(executor: adaptrt.Executor) -> None:
    with pytest.raises(adaptrt.RequestError, match="request 99 is unknown"):
        executor.await_responses(99)
    with pytest.raises(adaptrt.RequestError, match="there is no request 99"):
        executor.cancel_request(99)


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        (adaptrt.ModelType.ENCODER_ONLY, adaptrt.ExecutorConfig(), "model_type is ENCODER_ONLY"),
        (adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(max_beam_width=2), "max_beam_width is 2"),
        (adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(max_batch_size=9), "max_batch_size is 9"),
    ],
)
def test_bad_configurations(engine: adaptrt.LoadedEngine, model_type: Any, config: Any, message: str) -> None:
    with pytest.raises(adaptrt.ConfigError, match=message):
        adaptrt.Executor(engine, model_type, config)


def test_the_engines_adapters_are_served_by_name(
    executor: adaptrt.Executor, engine: adaptrt.LoadedEngine, directories: dict[str, Path]
) -> None:
    (name,) = executor.adapters.names
    by_name = ask(executor, [3, 4, 5], adapter=name)
    assert [entry.task_id for entry in executor.list_adapters()] == [FIRST_NAMED_TASK_ID]
    lora = adaptrt.LoraConfig.from_peft(1, directories["first"], engine)
    assert by_name == ask(executor, [3, 4, 5], lora_config=lora)
    _core.Executor.unload_adapter(executor, FIRST_NAMED_TASK_ID)  # as if the cache had evicted it
    assert ask(executor, [3, 4, 5], adapter=name) == by_name
    with pytest.raises(adaptrt.AdapterError, match=f"no adapter named 'other'; it has: '{name}'"):
        ask(executor, [3], adapter="other")
    with pytest.raises(adaptrt.RequestError, match="has a lora_config"):
        ask(executor, [3], adapter=name, lora_config=lora)


def test_ids_of_named_adapters_are_refused_where_a_caller_gives_one(
    executor: adaptrt.Executor, engine: adaptrt.LoadedEngine, directories: dict[str, Path]
) -> None:
    (name,) = executor.adapters.names
    expected = ask(executor, [3, 4, 5], adapter=name)
    theirs = adaptrt.LoraConfig.from_peft(FIRST_NAMED_TASK_ID, directories["second"], engine, replace=True)
    largest = adaptrt.LoraConfig.from_peft(FIRST_NAMED_TASK_ID - 1, directories["second"], engine)
    by_id = adaptrt.Request([3, 4, 5], 4, lora_config=adaptrt.LoraConfig(FIRST_NAMED_TASK_ID))
    with_weights = adaptrt.Request([3, 4, 5], 4, lora_config=theirs)
    of_drafts = adaptrt.Request([3, 4, 5], 4, draft_lora_config=theirs)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("lora_config.task_id", lambda: executor.enqueue_request(by_id)),
        ("lora_config.task_id", lambda: executor.enqueue_request(with_weights)),
        ("draft_lora_config.task_id", lambda: executor.enqueue_request(of_drafts)),
        ("draft_lora_config.task_id", lambda: executor.enqueue_request(of_drafts, adapter=name)),
        (r"requests\[1\].lora_config.task_id", lambda: executor.enqueue_requests([adaptrt.Request([3], 1), by_id])),
        ("lora_config.task_id", lambda: executor.put_adapter(theirs)),
        ("task_id", lambda: executor.pin_adapter(FIRST_NAMED_TASK_ID)),
        ("task_id", lambda: executor.unpin_adapter(2**64 - 1)),
        ("task_id", lambda: executor.unload_adapter(FIRST_NAMED_TASK_ID)),
        ("task_id", lambda: executor.set_adapter_outdated(FIRST_NAMED_TASK_ID, True)),
    ]
    before = executor.list_adapters()
    for field, call in calls:
        with pytest.raises(adaptrt.AdapterError, match=rf"^{field} is \d+; expected less than {FIRST_NAMED_TASK_ID}: "):
            call()
    assert executor.list_adapters() == before
    assert ask(executor, [3, 4, 5], adapter=name) == expected
    executor.put_adapter(largest)
    executor.pin_adapter(FIRST_NAMED_TASK_ID - 1)
    assert ask(executor, [3, 4, 5], lora_config=adaptrt.LoraConfig(FIRST_NAMED_TASK_ID - 1)) != expected


def test_an_adapter_is_pinned_by_its_name(executor: adaptrt.Executor) -> None:
    (name,) = executor.adapters.names
    executor.pin_named_adapter(name)
    (entry,) = executor.list_adapters()
    assert (entry.task_id, entry.pinned, entry.on_device) == (FIRST_NAMED_TASK_ID, True, True)


def test_adapters_are_added_replaced_and_removed_by_name(
    executor: adaptrt.Executor, engine: adaptrt.LoadedEngine, directories: dict[str, Path]
) -> None:
    wanted = {}
    for task_id, name in enumerate(["second", "dora"], 1):
        lora = adaptrt.LoraConfig.from_peft(task_id, directories[name], engine)
        wanted[name] = ask(executor, [3, 4, 5], 8, lora_config=lora)
    assert wanted["second"] != wanted["dora"]
    added = executor.add_adapter("new", directories["second"])
    assert added.task_id > FIRST_NAMED_TASK_ID  # the engine's own adapter has the first id
    assert ask(executor, [3, 4, 5], 8, adapter="new") == wanted["second"]
    with pytest.raises(adaptrt.AdapterError, match=r"adapter 'new' is .*second already"):
        executor.add_adapter("new", directories["dora"])
    replaced = executor.add_adapter("new", directories["dora"], replace=True)
    assert replaced.task_id > added.task_id
    assert ask(executor, [3, 4, 5], 8, adapter="new") == wanted["dora"]
    executor.remove_adapter("new")
    with pytest.raises(adaptrt.AdapterError, match="no adapter named 'new'"):
        ask(executor, [3], adapter="new")
    assert executor.add_adapter("new", directories["second"]).task_id > added.task_id


def test_an_unknown_task_is_refused(executor: adaptrt.Executor) -> None:
    with pytest.raises(adaptrt.PeftTaskNotCachedError, match="LoRA task 5 not found in cache"):
        ask(executor, [3], lora_config=adaptrt.LoraConfig(5))


def test_prefetching(engine: adaptrt.LoadedEngine, directories: dict[str, Path], tmp_path: Path) -> None:
    expected = {}
    for task_id, name in ((3, "first"), (12, "dora")):
        lora = adaptrt.LoraConfig.from_peft(task_id, directories[name], engine)
        folder = tmp_path / str(task_id)
        folder.mkdir()
        np.save(folder / "model.lora_weights.npy", lora.weights)
        np.save(folder / "model.lora_config.npy", lora.config)
        with adaptrt.Executor(engine) as executor:
            expected[task_id] = ask(executor, [7, 8, 9], lora_config=lora)
    config = adaptrt.ExecutorConfig(peft_cache_config=adaptrt.PeftCacheConfig(lora_prefetch_dir=str(tmp_path)))
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        assert [entry.task_id for entry in executor.list_adapters()] == [3, 12]
        for task_id, tokens in expected.items():
            assert ask(executor, [7, 8, 9], lora_config=adaptrt.LoraConfig(task_id)) == tokens


def test_a_failed_prefetch_ends_the_executor_and_its_workers(engine: adaptrt.LoadedEngine, tmp_path: Path) -> None:
    alive: list[bool] = []

    class Watched(adaptrt.Executor):
        def _stop_workers(self) -> None:
            alive.append(self.is_alive)
            super()._stop_workers()

    cache = adaptrt.PeftCacheConfig(lora_prefetch_dir=str(tmp_path / "nowhere"))
    config = adaptrt.ExecutorConfig(peft_cache_config=cache)
    with pytest.raises(adaptrt.AdapterError, match="nowhere'; expected a directory"):
        Watched(engine, executor_config=config)
    assert alive == [False]


def _no_directory(path: Path) -> None:
    path.rmdir()


def _folder_of_another_name(path: Path) -> None:
    (path / "three").mkdir()


def _no_weights(path: Path) -> None:
    (path / "3").mkdir()


def _pickled_weights(path: Path) -> None:
    (path / "3").mkdir()
    np.save(path / "3" / "model.lora_weights.npy", np.array([{}], object), allow_pickle=True)


def _weights_of_another_shape(path: Path) -> None:
    (path / "3").mkdir()
    np.save(path / "3" / "model.lora_weights.npy", np.zeros((1, 4), np.float32))
    np.save(path / "3" / "model.lora_config.npy", np.array([[1, 0, 4]], np.int32))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_directory, "expected a directory"),
        (_folder_of_another_name, "three is not a folder named by the digits"),
        (_no_weights, r"3/model\.lora_weights\.npy: cannot be read"),
        (_pickled_weights, r"3/model\.lora_weights\.npy: cannot be read"),
        (_weights_of_another_shape, r"prefetch/3: "),
    ],
)
def test_bad_prefetch_directories(engine: adaptrt.LoadedEngine, tmp_path: Path, damage: Any, message: str) -> None:
    prefetch = tmp_path / "prefetch"
    prefetch.mkdir()
    damage(prefetch)
    config = adaptrt.ExecutorConfig(peft_cache_config=adaptrt.PeftCacheConfig(lora_prefetch_dir=str(prefetch)))
    with pytest.raises(adaptrt.AdapterError, match=message):
        adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config)


def test_statistics(executor: adaptrt.Executor) -> None:
    ask(executor, [3, 4, 5])
    ask(executor, [3])
    stats = executor.get_latest_iteration_stats()
    assert stats[0].inflight_batching_stats is not None
    assert stats[0].inflight_batching_stats.num_ctx_tokens == 3
    assert stats[0].lora_cache_stats is not None


@pytest.mark.parametrize("field", ["num_device_module_layer", None])
def test_a_batch_that_waits_for_room_for_adapters_says_so_once(
    field: str | None, directories: dict[str, Path], engine: adaptrt.LoadedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    cache = adaptrt.PeftCacheConfig(max_adapter_size=4, optimal_adapter_size=4)
    if field is not None:
        setattr(cache, field, 1)  # One page, for one adapter.
    config = adaptrt.ExecutorConfig(num_threads=1, peft_cache_config=cache)
    adapters = [
        adaptrt.LoraConfig.from_peft(task_id, directories[name], engine)
        for task_id, name in enumerate(["first", "second", "dora"], 1)
    ]
    with (
        caplog.at_level("WARNING", "adaptrt"),
        adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor,
    ):
        for _ in range(2):
            requests = [adaptrt.Request([3, 4, 5], 8, lora_config=adapter) for adapter in adapters]
            for request_id in executor.enqueue_requests(requests):
                assert len(tokens_of(executor, request_id)) == 11
        stats = executor.lora_cache_stats()
    told = [record.getMessage() for record in caplog.records if "device level has no room" in record.getMessage()]
    if field is None:
        assert (stats.steps_waiting_for_adapters, stats.device_adapters, told) == (0, 3, [])
    else:
        assert stats.device_pages_total == 1
        assert stats.steps_waiting_for_adapters >= 8
        assert len(told) == 1
        assert f"a larger PeftCacheConfig.{field} makes room" in told[0]
