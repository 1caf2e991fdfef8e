"""Bad input, one test each: an error that names it, no change, and the same answer to a good request afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adaptrt
from support.models import ModelSpec
from support.serving import build_random_engine, run_command

SPEC = ModelSpec()
MAX_RANK = 4
Q, K, V, DENSE = 1, 2, 3, 4
HIDDEN, QUERY = SPEC.hidden_size, SPEC.num_attention_heads * SPEC.head_dim


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> adaptrt.LoadedEngine:
    """An engine with LoRA and without DoRA, on q, k and v of two layers."""
    directory = tmp_path_factory.mktemp("bad-input")
    _, engine = build_random_engine(
        SPEC, directory, max_lora_rank=MAX_RANK, dora_plugin="disable", max_input_len=40, max_seq_len=48
    )
    return adaptrt.load_engine(engine)


@pytest.fixture(scope="module")
def executor(engine: adaptrt.LoadedEngine) -> Iterator[adaptrt.Executor]:
    config = adaptrt.ExecutorConfig(
        num_threads=1, peft_cache_config=adaptrt.PeftCacheConfig(host_cache_size=100_000, max_adapter_size=MAX_RANK)
    )
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as made:
        made.put_adapter(lora(1))
        yield made


def tensors(rank: int = 2, layer: int = 0, module: int = Q, columns: int = 3) -> tuple[np.ndarray, np.ndarray]:
    weights = np.full((1, rank * (HIDDEN + QUERY)), 0.125, np.float32)
    return weights, np.array([[module, layer, rank, 0][:columns]], np.int32)


def lora(task_id: int, **where: Any) -> adaptrt.LoraConfig:
    return adaptrt.LoraConfig(task_id, *tensors(**where))


def retention_of_priority(priority: int) -> adaptrt.KvCacheRetentionConfig:
    """Returns a config with this priority for generated tokens, set after the constructor, which would refuse it."""
    config = adaptrt.KvCacheRetentionConfig()
    config.decode_retention_priority = priority
    return config


def answer(executor: adaptrt.Executor, **fields: Any) -> list[int]:
    request = adaptrt.Request(**{"input_token_ids": [3, 4, 5], "max_tokens": 5, **fields})
    response = executor.await_responses(executor.enqueue_request(request))[-1]
    return response.result.output_token_ids[0]


@pytest.fixture
def unchanged(executor: adaptrt.Executor) -> Iterator[adaptrt.Executor]:
    """Yields the executor; after the test, checks that its adapters, statistics and answers are the same as before."""
    expected = [answer(executor), answer(executor, lora_config=adaptrt.LoraConfig(1))]
    adapters, stats = executor.list_adapters(), executor.lora_cache_stats()
    yield executor
    assert executor.list_adapters() == adapters
    after = executor.lora_cache_stats()
    after.host_misses = stats.host_misses  # the lookup of a missing task counts as a miss
    assert after == stats
    assert executor.get_num_responses_ready() == 0
    assert executor.can_enqueue_requests()
    assert [answer(executor), answer(executor, lora_config=adaptrt.LoraConfig(1))] == expected


BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"input_token_ids": []}, "input_token_ids is empty"),
    "prompt too long": ({"input_token_ids": [1] * 41}, "input_token_ids has 41 tokens; .* max_input_len is 40"),
    "token above the vocabulary": ({"input_token_ids": [1, 61]}, r"input_token_ids\[1\] is 61; the vocabulary is 0"),
    "negative token": ({"input_token_ids": [-1]}, r"input_token_ids\[0\] is -1"),
    "no tokens wanted": ({"max_tokens": 0}, "max_tokens is 0"),
    "negative max_tokens": ({"max_tokens": -3}, "max_tokens is -3"),
    "prompt and output too long": ({"max_tokens": 46}, "max_tokens 46 make 49 tokens; .* max_seq_len is 48"),
    "largest max_tokens": ({"max_tokens": 2**31 - 1}, "max_tokens 2147483647"),
    "end_id outside": ({"end_id": 61}, "end_id is 61"),
    "end_id below none": ({"end_id": -2}, "end_id is -2"),
    "pad_id outside": ({"pad_id": 99}, "pad_id is 99"),
    "stop word outside": ({"stop_words": [[1], [2, 61]]}, r"stop_words\[1\]\[1\] is 61"),
    "empty stop word": ({"stop_words": [[]]}, r"stop_words\[0\] is empty"),
    "bad word outside": ({"bad_words": [[61]]}, r"bad_words\[0\] has token 61"),
    "empty bad word": ({"bad_words": [[1], []]}, r"bad_words\[1\] is empty"),
    "bias of another length": ({"embedding_bias": [0.0] * 60}, r"embedding_bias is \[60\]; accepted: \[61\]"),
    "bias of two dimensions": ({"embedding_bias": np.zeros((1, 61))}, r"embedding_bias is \[1, 61\]"),
    "bias with NaN": ({"embedding_bias": [0.0] * 60 + [float("nan")]}, r"embedding_bias\[60\] is NaN"),
    "priority too high": ({"priority": 1.5}, "priority is 1.5"),
    "priority NaN": ({"priority": float("nan")}, "priority is nan"),
    "no time": ({"allotted_time_ms": 0}, "allotted_time_ms is 0"),
    "negative time": ({"allotted_time_ms": -1}, "allotted_time_ms is -1"),
    "retention priority": (
        {"kv_cache_retention_config": retention_of_priority(101)},
        "kv_cache_retention_config.decode_retention_priority is 101",
    ),
    "no sequences": ({"num_return_sequences": 0}, "num_return_sequences is 0; accepted: 1 or more"),
    "more sequences than run at once": (
        {"num_return_sequences": 9}, "a request of 9 sequences; accepted: 1 to max_batch_size = 8"
    ),
    "two numbers of sequences": (
        {"num_return_sequences": 2, "sampling_config": adaptrt.SamplingConfig(num_return_sequences=3)},
        "num_return_sequences is 2, and that of sampling_config is 3",
    ),
    **{
        f"unsupported {name}": ({name: value}, f"{name} is given; accepted: None")
        for name, value in {
            "position_ids": [0, 1, 2], "encoder_input_token_ids": [1],
        }.items()
    },
    "no drafts": (
        {"external_draft_tokens_config": adaptrt.ExternalDraftTokensConfig([])},
        "external_draft_tokens_config.tokens is empty",
    ),
    "draft outside": (
        {"external_draft_tokens_config": adaptrt.ExternalDraftTokensConfig([1, 61])},
        r"external_draft_tokens_config.tokens\[1\] is 61",
    ),
    "logits of drafts": (
        {"external_draft_tokens_config": adaptrt.ExternalDraftTokensConfig([1], np.zeros((1, 61)))},
        "external_draft_tokens_config.logits is given; accepted: None",
    ),
    "inexact drafts": (
        {"external_draft_tokens_config": adaptrt.ExternalDraftTokensConfig([1], acceptance_threshold=0.5)},
        "external_draft_tokens_config.acceptance_threshold is given; accepted: None",
    ),
    "window without n-grams": (
        {"lookahead_config": adaptrt.LookaheadDecodingConfig(4, 1, 0)},
        "lookahead_config.max_window_size is 4 and max_ngram_size 1",
    ),
    "unknown post-processor": ({"logits_post_processor_name": "name"}, "logits_post_processor_name is 'name', which"),
    **{
        f"sampling {name}={value}": (
            {"sampling_config": adaptrt.SamplingConfig(**{name: value})}, rf"sampling_config\.{name} is"
        )
        for name, value in [
            ("beam_width", 2), ("beam_width", 0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5),
            ("top_p", float("nan")), ("top_p_min", 0.0), ("top_p_reset_ids", -2),
            ("top_p_decay", 0.5), ("temperature", -1.0),
            ("temperature", float("inf")), ("min_tokens", -1),
            ("repetition_penalty", 0.0), ("presence_penalty", float("nan")), ("frequency_penalty", float("inf")),
            ("no_repeat_ngram_size", -1), ("num_return_sequences", 0),
            ("min_p", 2.0), ("beam_width_array", [2]),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_value_out_of_range(unchanged: adaptrt.Executor, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(adaptrt.RequestError, match=message):
        answer(unchanged, **fields)


def test_a_bias_of_another_length(unchanged: adaptrt.Executor) -> None:
    for length in (0, 1, 60, 62):
        request = adaptrt.Request([1], 1, embedding_bias=[0.0] * length)
        (response,) = unchanged.await_responses(unchanged.enqueue_request(request))
        assert response.error_msg.startswith(f"embedding bias shape is not as expected: embedding_bias is [{length}]")


WRONG_TYPES: dict[str, Any] = {
    "input_token_ids": ["abc", b"abc", None, [1.5], [None], [[1]], {1, 2}, [2**31], [2**70], np.array([0.5]),
                        np.array([1.0], np.float32), np.array([[1]]), np.array(["1"])],
    "max_tokens": [None, "1", 1.5, 2**31], "streaming": ["yes"], "sampling_config": [None, 1], "output_config": [None],
    "end_id": ["</s>", 1.0, 2**31], "pad_id": ["</s>"], "kv_cache_retention_config": [1, "keep"],
    "position_ids": ["a"], "bad_words": [[1], "word"],
    "stop_words": [[1], {1}], "embedding_bias": ["a", ["1"], {1.0}, [1j], [[1], [2, 3]]], "lora_config": [1, "name"],
    "logits_post_processor_name": [1], "logits_post_processor": [1, "name"],
    "encoder_input_token_ids": [1], "client_id": [-1, 2**64, "me"],
    "guided_decoding_params": ["json", object(), {}], "lookahead_config": [object(), (4, 3, 4)],
    "external_draft_tokens_config": [object(), [1]],
    "return_all_generated_tokens": ["all"], "priority": ["high"], "num_return_sequences": [None],
    "allotted_time_ms": ["1", float("nan"), True], "cache_salt_id": [-1],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG_TYPES.items() for value in values])
def test_a_field_of_a_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^Request\.{name} is (.|\n)*; accepted: "):
        adaptrt.Request(**{"input_token_ids": [1], "max_tokens": 1, name: value})
    request = adaptrt.Request([1], 1)
    with pytest.raises(TypeError, match=rf"^Request\.{name} is (.|\n)*; accepted: "):
        setattr(request, name, value)


def test_an_unknown_field() -> None:
    with pytest.raises(TypeError, match="new_tokens"):
        adaptrt.Request([1], 1, new_tokens=1)
    with pytest.raises(AttributeError):
        adaptrt.Request([1], 1).new_tokens = 1


@pytest.mark.parametrize("value", [None, 1, "request"])
def test_values_that_are_no_requests_are_refused(unchanged: adaptrt.Executor, value: Any) -> None:
    with pytest.raises(TypeError, match="enqueue_request"):
        unchanged.enqueue_request(value)


def test_one_bad_request_among_good_ones_queues_none(unchanged: adaptrt.Executor) -> None:
    good, bad = adaptrt.Request([1], 1), adaptrt.Request([], 1)
    with pytest.raises(adaptrt.RequestError, match=r"requests\[1\]\.input_token_ids is empty") as caught:
        unchanged.enqueue_requests([good, bad, adaptrt.Request([99], 1)])
    assert r"requests[2].input_token_ids[0] is 99" in str(caught.value)


def test_an_unknown_task_among_good_requests_queues_none(unchanged: adaptrt.Executor) -> None:
    good, unknown = adaptrt.Request([1], 1), adaptrt.Request([1], 1, lora_config=adaptrt.LoraConfig(77))
    with pytest.raises(
        adaptrt.PeftTaskNotCachedError, match=r"LoRA task 77 not found in cache\. Please send LoRA weights"
    ):
        unchanged.enqueue_requests([good, unknown])


def test_all_problems_of_a_request_are_told(unchanged: adaptrt.Executor) -> None:
    with pytest.raises(adaptrt.RequestError) as caught:
        answer(unchanged, input_token_ids=[61], max_tokens=0, end_id=99, position_ids=[1])
    for problem in ("input_token_ids[0] is 61", "max_tokens is 0", "end_id is 99", "position_ids"):
        assert problem in str(caught.value)


def _changed(weights: Any = None, config: Any = None, **where: Any) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        good = tensors(**where)
        return good[0] if weights is None else weights(good[0]), good[1] if config is None else config(good[1])

    return make


def _with(array: np.ndarray, index: Any, value: float) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


BAD_ADAPTERS: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "weights alone": (lambda: (tensors()[0], None), "weights came without config"),
    "config alone": (lambda: (None, tensors()[1]), "config came without weights"),
    "config of int64": (_changed(config=lambda c: c.astype(np.int64)), "config is of type int64; accepted: int32"),
    "config of float32": (_changed(config=lambda c: c.astype(np.float32)), "config is of type float32"),
    "weights of float64": (_changed(lambda w: w.astype(np.float64)), "weights is of type float64"),
    "weights of int8": (_changed(lambda w: w.astype(np.int8)), "weights is of type int8"),
    "weights of four dimensions": (_changed(lambda w: w[None, None]), r"weights has shape \[1, 1, 1, 144\]"),
    "weights of one dimension": (_changed(lambda w: w[0]), r"weights has shape \[144\]"),
    "two adapters at once": (_changed(lambda w: np.stack([w, w])), r"weights has shape \[2, 1, 144\]"),
    "config of one dimension": (_changed(config=lambda c: c[0]), r"config has shape \[3\]"),
    "two columns": (_changed(columns=2), "config has 2 columns"),
    "five columns": (_changed(config=lambda c: np.hstack([c, c])[:, :5]), "config has 5 columns"),
    "other numbers of rows": (_changed(config=lambda c: np.vstack([c, c])), "weights has 1 rows and config has 2"),
    "no rows": (_changed(lambda w: w[:0], lambda c: c[:0]), "config has no rows"),
    "negative layer": (_changed(layer=-1), r"row 0: layer -1 of attn_q is out of range"),
    "layer too high": (_changed(layer=2), r"layer 2 of attn_q is out of range; accepted: 0 to 1"),
    "rank of nought": (_changed(config=lambda c: _with(c, (0, 2), 0)), "rank 0 is out of range"),
    "negative rank": (_changed(config=lambda c: _with(c, (0, 2), -1)), "rank -1 is out of range"),
    "rank above max_lora_rank": (_changed(rank=5), "rank 5 is out of range; .* max_lora_rank 4"),
    "largest rank": (_changed(config=lambda c: _with(c, (0, 2), 2**31 - 1)), "rank 2147483647 is out of range"),
    "module not known": (_changed(module=99), "module_id 99 is unknown"),
    "negative module": (_changed(module=-1), "module_id -1 is unknown"),
    "module of no decoder layer": (_changed(module=8), r"module_id 8 \(cross_attn_qkv\) is not part of"),
    "row too short": (_changed(lambda w: w[:, :-1]), r"has 143 columns, but A\[2, 36\] and B\[36, 2\] need 144"),
    "row of no columns": (_changed(lambda w: w[:, :0]), "weights has 0 columns"),
    "padding that is not zero": (_changed(lambda w: np.pad(w, ((0, 0), (0, 1)), constant_values=1.0)), "must be zero"),
    "NaN": (_changed(lambda w: _with(w, (0, 3), np.nan)), r"element 3, A\[0, 3\], is nan"),
    "infinity": (_changed(lambda w: _with(w, (0, 73), -np.inf)), r"element 73, B\[0, 1\], is -inf"),
    "DoRA": (_changed(config=lambda c: _with(c, (0, 3), 1), columns=4), "this engine was built without DoRA"),
    "vectors of four": (_changed(config=lambda c: _with(c, (0, 3), 4), columns=4), "vectors is 4"),
    "a row twice": (_changed(lambda w: np.vstack([w, w]), lambda c: np.vstack([c, c])), "row 1 .* repeats row 0"),
    "rows without end": (
        lambda: (np.zeros((10**5, 1), np.float32), np.zeros((10**5, 4), np.int32)), "config has 100000 rows, more than",
    ),
    "a huge declared size": (
        lambda: (np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (1, 2**40), (0, 0)), tensors()[1]),
        "weights is a view that repeats elements",
    ),
    "an array of objects": (lambda: (np.array([[None]]), tensors()[1]), "weights is of type object"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD_ADAPTERS.values(), ids=BAD_ADAPTERS)
def test_a_bad_adapter(unchanged: adaptrt.Executor, make: Any, message: str) -> None:
    with pytest.raises(adaptrt.AdapterError, match=message):
        answer(unchanged, lora_config=adaptrt.LoraConfig(9, *make()))


@pytest.mark.parametrize("task_id", [None, -1, 2**64, "name", 1.5])
def test_a_task_id_of_a_wrong_type(task_id: Any) -> None:
    with pytest.raises(TypeError, match=r"^LoraConfig\.task_id is .*; accepted: int from 0 to 18446744073709551615"):
        adaptrt.LoraConfig(task_id)


@pytest.mark.parametrize("weights", [[[0.5]], "file", 3])
def test_weights_that_are_no_array(weights: Any) -> None:
    with pytest.raises(TypeError, match="weights must be a NumPy array"):
        adaptrt.LoraConfig(1, weights, tensors()[1])


def test_other_weights_under_a_cached_id(unchanged: adaptrt.Executor) -> None:
    with pytest.raises(adaptrt.AdapterError, match=r"LoRA task 1: is cached with other weights; .* replace=True"):
        answer(unchanged, lora_config=lora(1, rank=3))


def test_an_engine_without_lora(tmp_path: Path) -> None:
    _, directory = build_random_engine(SPEC, tmp_path, lora_plugin="disable", dora_plugin="disable")
    with adaptrt.Executor(directory) as executor:
        with pytest.raises(adaptrt.AdapterError, match="the engine was built without LoRA"):
            answer(executor, lora_config=lora(1))
        with pytest.raises(adaptrt.AdapterError, match="the engine was built without LoRA"):
            executor.list_adapters()
        assert len(answer(executor)) == 8


def test_a_module_that_is_not_enabled(engine: adaptrt.LoadedEngine, tmp_path: Path) -> None:
    run_command(
        "build", "--checkpoint_dir", engine.directory.parent / "checkpoint", "--output_dir", tmp_path / "queries",
        "--lora_plugin", "auto", "--lora_target_modules", "attn_q", "--max_lora_rank", MAX_RANK,
    )  # fmt: skip
    with adaptrt.Executor(tmp_path / "queries") as executor:
        with pytest.raises(adaptrt.AdapterError, match=r"module_id 2 \(attn_k\) is not enabled .* are attn_q$"):
            answer(executor, lora_config=lora(1, module=K))
        assert executor.list_adapters() == []
        assert len(answer(executor, lora_config=lora(1))) == 8


def test_an_adapter_that_can_never_fit(engine: adaptrt.LoadedEngine) -> None:
    # The host level has room for an adapter of rank 1 on every module. This adapter, of rank 4 on four modules, has
    # 7680 bytes.
    sizes = adaptrt.PeftCacheConfig(host_cache_size=5000, max_adapter_size=1)
    config = adaptrt.ExecutorConfig(num_threads=1, peft_cache_config=sizes)
    rows = [(module, layer, MAX_RANK) for module in (Q, K, V, DENSE) for layer in (0, 1)]
    weights = np.zeros((8, MAX_RANK * (HIDDEN + QUERY)), np.float32)
    for number, (module, _, rank) in enumerate(rows):  # no B is zero, and no A is that of another row
        weights[number, 0] = 1 + number
        weights[number, rank * (QUERY if module == DENSE else HIDDEN)] = 1
    large = adaptrt.LoraConfig(4, weights, np.array(rows, np.int32))
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        before = executor.lora_cache_stats()
        text = "PEFT Cache is full. Could not store taskId=4: needs 7680 bytes, but the host level has 5000 in all"
        with pytest.raises(adaptrt.LoraCacheFullError, match=text):
            answer(executor, lora_config=large)
        assert executor.lora_cache_stats() == before
        assert len(answer(executor)) == 8


def test_a_host_level_full_of_adapters_in_use(engine: adaptrt.LoadedEngine) -> None:
    # Room for three adapters of 1152 bytes.
    sizes = adaptrt.PeftCacheConfig(host_cache_size=4500, max_adapter_size=1)
    config = adaptrt.ExecutorConfig(num_threads=1, peft_cache_config=sizes)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        for task_id in (1, 2, 3):
            executor.put_adapter(lora(task_id, rank=4))
            executor.pin_adapter(task_id)
        before = executor.list_adapters()
        text = r"Could not store taskId=4: needs 1152 bytes, but requests and pinned adapters keep 3456 of .* 4500"
        with pytest.raises(adaptrt.LoraCacheFullError, match=text):
            answer(executor, lora_config=lora(4, rank=4))
        assert executor.list_adapters() == before
        executor.unpin_adapter(1)
        assert len(answer(executor, lora_config=lora(4, rank=4))) == 8
        assert [entry.task_id for entry in executor.list_adapters()] == [2, 3, 4]


@pytest.mark.parametrize("call", ["pin_adapter", "unpin_adapter", "unload_adapter"])
def test_a_task_that_is_not_cached(unchanged: adaptrt.Executor, call: str) -> None:
    with pytest.raises(adaptrt.PeftTaskNotCachedError, match="LoRA task 55 not found in cache"):
        getattr(unchanged, call)(55)


@pytest.mark.parametrize("request_id", [0, -1, 10**6, 2**64, -(2**70)])
def test_an_id_of_no_request(unchanged: adaptrt.Executor, request_id: int) -> None:
    for call in (unchanged.await_responses, unchanged.cancel_request, unchanged.get_num_responses_ready):
        with pytest.raises(adaptrt.RequestError, match=f"request {request_id}"):
            call(request_id)


def test_a_request_that_was_answered(unchanged: adaptrt.Executor) -> None:
    request_id = unchanged.enqueue_request(adaptrt.Request([3], 2))
    assert unchanged.await_responses(request_id)[-1].result.is_final
    (response,) = unchanged.await_responses(request_id)
    assert response.error_msg == f"ReqId {request_id} has already been processed and was terminated."
    assert unchanged.get_num_responses_ready(request_id) == 0
    unchanged.cancel_request(request_id)


@pytest.mark.parametrize("timeout", [float("nan"), "soon", True])
def test_a_timeout_of_a_wrong_type(unchanged: adaptrt.Executor, timeout: Any) -> None:
    with pytest.raises(TypeError, match="await_responses"):
        unchanged.await_responses(timeout=timeout)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_threads": 2**31 - 1}, "num_threads is 2147483647; accepted: 1 to 1024"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_num_tokens": 2**31 - 1}, "max_num_tokens is 2147483647; the engine was built for"),
        ({"kv_cache_config": adaptrt.KvCacheConfig(max_tokens=1)}, "max_tokens is 1, less than one block"),
        (
            {"peft_cache_config": adaptrt.PeftCacheConfig(num_device_module_layer=2**31 - 1)},
            "num_device_module_layer gives the device level .* are free",
        ),
        ({"iter_stats_max_iterations": -1}, "iter_stats_max_iterations is -1"),
        ({"batching_type": adaptrt.BatchingType.STATIC}, "batching_type is STATIC"),
        ({"normalize_log_probs": False}, "normalize_log_probs is False"),
        ({"gpu_weights_percent": 0.5}, "gpu_weights_percent is 0.5"),
        (
            {"kv_cache_config": adaptrt.KvCacheConfig(max_attention_window=[8])},
            "kv_cache_config.max_attention_window has 8; accepted: None, the windows that the model has, and those",
        ),
        ({"spec_dec_config": object()}, "spec_dec_config is given"),
    ],
)
def test_a_bad_configuration(engine: adaptrt.LoadedEngine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(adaptrt.ConfigError, match=message):
        adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(**fields))


@pytest.mark.parametrize("arguments", [("DECODER_ONLY",), (0,), (adaptrt.ModelType.DECODER_ONLY, 5)])
def test_a_configuration_of_a_wrong_type(engine: adaptrt.LoadedEngine, arguments: Any) -> None:
    with pytest.raises(TypeError, match=r"(model_type|executor_config) is .*; accepted: "):
        adaptrt.Executor(engine, *arguments)


def test_a_closed_executor(engine: adaptrt.LoadedEngine) -> None:
    executor = adaptrt.Executor(engine)
    executor.shutdown()
    executor.shutdown()
    for call in (
        lambda: executor.enqueue_request(adaptrt.Request([1], 1)),
        lambda: executor.enqueue_requests([]),
        lambda: executor.put_adapter(lora(1)),
        executor.await_responses,
        executor.lora_cache_stats,
        executor.get_num_responses_ready,
    ):
        with pytest.raises(adaptrt.ExecutorClosedError, match="executor was shut down"):
            call()


def test_two_executors_do_not_share_adapters_or_requests(
    unchanged: adaptrt.Executor, engine: adaptrt.LoadedEngine
) -> None:
    with adaptrt.Executor(engine) as other:
        with pytest.raises(adaptrt.PeftTaskNotCachedError):
            answer(other, lora_config=adaptrt.LoraConfig(1))
        assert answer(other) == answer(unchanged)
        with pytest.raises(adaptrt.RequestError):
            other.await_responses(2)


def test_logits_that_overflow_end_their_own_request(executor: adaptrt.Executor) -> None:
    alone = answer(executor)
    rank, sizes = 1, HIDDEN + QUERY
    rows = np.array([[module, layer, rank] for module in (Q, DENSE) for layer in (0, 1)], np.int32)
    wild = adaptrt.LoraConfig(8, np.full((4, sizes), 3e38, np.float32), rows)
    requests = [adaptrt.Request([3, 4, 5], 5), adaptrt.Request([3, 4, 5], 5, lora_config=wild)]
    good, bad = (executor.await_responses(i)[-1] for i in executor.enqueue_requests(requests))
    assert bad.has_error()
    assert bad.error_msg == "the engine's logits have NaN or infinity"
    assert good.result.output_token_ids[0] == alone
    executor.unload_adapter(8)
    assert answer(executor) == alone
