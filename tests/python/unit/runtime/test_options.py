"""Configurations that executors do not support yet: TensorRT-LLM's constructors, checks, equality, pickles."""

from __future__ import annotations

import copy
import datetime
import pickle
import re
from typing import Any

import numpy as np
import pytest

import adaptrt

LOOKAHEAD = adaptrt.LookaheadDecodingConfig(3, 5, 7)
RANGE = adaptrt.KvCacheRetentionConfig.TokenRangeRetentionConfig
Mode = adaptrt.DecodingMode
COS_SIN = np.ones((1, 6), np.float32)

# Positional arguments by field, in TensorRT-LLM's order; then the defaults of the other fields.
CONSTRUCTORS: list[tuple[type, dict[str, Any], dict[str, Any]]] = [
    (
        adaptrt.ExternalDraftTokensConfig,
        {"tokens": [1, 2], "logits": np.ones((2, 3)), "acceptance_threshold": 0.5, "fast_logits": True},
        {"logits": None, "acceptance_threshold": None, "fast_logits": None},
    ),
    (
        adaptrt.AdditionalModelOutput,
        {"name": "topKLogits", "gather_context": True},
        {"gather_context": False},
    ),
    (adaptrt.AdditionalOutput, {"name": "topKLogits", "output": np.ones((1, 4))}, {}),
    (
        adaptrt.RuntimeDefaults,
        {"max_attention_window": [8, 16], "sink_token_length": 4},
        {"max_attention_window": None, "sink_token_length": None},
    ),
    (
        adaptrt.MultimodalInput,
        {"multimodal_hashes": [[1, -2]], "multimodal_positions": [1], "multimodal_lengths": [4]},
        {},
    ),
    (adaptrt.MropeConfig, {"mrope_rotary_cos_sin": COS_SIN, "mrope_position_deltas": -50}, {}),
    (
        adaptrt.ContextPhaseParams,
        {"first_gen_tokens": [1, 2], "req_id": 2**64 - 1, "opaque_state": b"\x00\x01", "draft_tokens": [10, 20]},
        {"opaque_state": None, "draft_tokens": None},
    ),
    (
        adaptrt.LookaheadDecodingConfig,
        {"max_window_size": 3, "max_ngram_size": 5, "max_verification_set_size": 7},
        {},
    ),
    (
        adaptrt.EagleConfig,
        {
            "eagle_choices": [[0, 0], [0, 1, 0]], "greedy_sampling": False, "posterior_threshold": 0.5,
            "use_dynamic_tree": True, "dynamic_tree_max_topK": 3,
        },
        {
            "eagle_choices": None, "greedy_sampling": True, "posterior_threshold": None, "use_dynamic_tree": False,
            "dynamic_tree_max_topK": None,
        },
    ),
    (adaptrt.SpeculativeDecodingConfig, {"fast_logits": True}, {"fast_logits": False}),
    (
        adaptrt.DecodingConfig,
        {"decoding_mode": Mode.TopKTopP()},
        {"decoding_mode": None, "lookahead_decoding_config": None, "medusa_choices": None, "eagle_config": None},
    ),
    (
        adaptrt.LogitsPostProcessorConfig,
        {"processor_map": {"name": None, "length": len}, "processor_batched": len, "replicate": False},
        {"processor_map": None, "processor_batched": None, "replicate": True},
    ),
    (
        adaptrt.OrchestratorConfig,
        {
            "is_orchestrator": False, "worker_executable_path": "worker", "orch_leader_comm": 5,
            "spawn_processes": False,
        },
        {"is_orchestrator": True, "worker_executable_path": "", "orch_leader_comm": None, "spawn_processes": True},
    ),
    (
        adaptrt.ParallelConfig,
        {
            "communication_type": adaptrt.CommunicationType.MPI,
            "communication_mode": adaptrt.CommunicationMode.ORCHESTRATOR, "device_ids": [0, 1],
            "participant_ids": [4, 5], "orchestrator_config": adaptrt.OrchestratorConfig(), "num_nodes": 2,
        },
        {
            "communication_type": adaptrt.CommunicationType.MPI,
            "communication_mode": adaptrt.CommunicationMode.LEADER, "device_ids": None, "participant_ids": None,
            "orchestrator_config": None, "num_nodes": None,
        },
    ),
    (
        adaptrt.DebugConfig,
        {
            "debug_input_tensors": True, "debug_output_tensors": True, "debug_tensor_names": ["a"],
            "debug_tensors_max_iterations": 5,
        },
        {
            "debug_input_tensors": False, "debug_output_tensors": False, "debug_tensor_names": [],
            "debug_tensors_max_iterations": 0,
        },
    ),
    (
        RANGE,
        {"token_start": 0, "token_end": None, "priority": 30, "duration_ms": datetime.timedelta(seconds=1)},
        {"duration_ms": None},
    ),
    (
        adaptrt.KvCacheRetentionConfig,
        {
            "token_range_retention_configs": [RANGE(0, 64, 80), RANGE(64, None, 10)], "decode_retention_priority": 80,
            "decode_duration_ms": datetime.timedelta(milliseconds=5),
        },
        {"decode_retention_priority": 35, "decode_duration_ms": None},
    ),
    (
        adaptrt.GuidedDecodingConfig,
        {
            "backend": adaptrt.GuidedDecodingConfig.GuidedDecodingBackend.XGRAMMAR, "encoded_vocab": ["a"],
            "tokenizer_str": "t", "stop_token_ids": [2],
        },
        {"encoded_vocab": None, "tokenizer_str": None, "stop_token_ids": None},
    ),
    (
        adaptrt.GuidedDecodingParams,
        {"guide_type": adaptrt.GuidedDecodingParams.GuideType.REGEX, "guide": "a+"},
        {},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "fields", "defaults"), CONSTRUCTORS, ids=lambda value: getattr(value, "__name__", ""))
def test_constructors_are_tensorrt_llms(cls: type, fields: dict[str, Any], defaults: dict[str, Any]) -> None:
    made = cls(*fields.values())
    for name, value in fields.items():
        assert getattr(made, name) is value or getattr(made, name) == value
    assert cls(**fields) == made
    required = {name: value for name, value in fields.items() if name not in defaults}
    plain = cls(**required)
    for name, value in defaults.items():
        assert getattr(plain, name) == value
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert again == made
    assert cls.__name__ in repr(made)
    if defaults:
        assert plain != made
    with pytest.raises(AttributeError, match=r"has no (field|attribute) 'nonsense'"):
        made.nonsense = 1
    with pytest.raises(TypeError, match="unhashable"):
        hash(made)


WRONG: list[tuple[Any, str, Any]] = [
    (adaptrt.ExternalDraftTokensConfig([1]), "tokens", [1.5]),
    (adaptrt.ExternalDraftTokensConfig([1]), "tokens", "12"),
    (adaptrt.ExternalDraftTokensConfig([1]), "logits", "logits"),
    (LOOKAHEAD, "max_window_size", True),
    (adaptrt.EagleConfig(), "eagle_choices", [[-1]]),
    (adaptrt.EagleConfig(), "greedy_sampling", 1),
    (adaptrt.EagleConfig(), "posterior_threshold", "high"),
    (adaptrt.DecodingConfig(), "decoding_mode", "TopK"),
    (adaptrt.DecodingConfig(), "eagle_config", LOOKAHEAD),
    (adaptrt.LogitsPostProcessorConfig(), "processor_map", {"name": 1}),
    (adaptrt.LogitsPostProcessorConfig(), "processor_map", {1: None}),
    (adaptrt.LogitsPostProcessorConfig(), "processor_batched", "name"),
    (adaptrt.ParallelConfig(), "communication_mode", "LEADER"),
    (adaptrt.DebugConfig(), "debug_tensor_names", "names"),
    (adaptrt.GuidedDecodingParams(adaptrt.GuidedDecodingParams.GuideType.JSON), "guide_type", "JSON"),
]


@pytest.mark.parametrize(("options", "name", "value"), WRONG)
def test_a_field_of_a_wrong_kind_is_refused_and_nothing_changes(options: Any, name: str, value: Any) -> None:
    before = copy.deepcopy(options)
    with pytest.raises(TypeError, match=rf"^{type(options).__name__}\.{name} is .*; accepted: "):
        setattr(options, name, value)
    assert options == before


# Minimum and maximum that a field accepts (None: no limit); a list means the limits of a list's elements.
LIMITS: list[tuple[Any, str, Any, Any]] = [
    (adaptrt.DebugConfig(), "debug_tensors_max_iterations", 0, None),
    (adaptrt.RuntimeDefaults(), "max_attention_window", [0], None),
    (adaptrt.RuntimeDefaults(), "sink_token_length", 0, None),
    (adaptrt.MultimodalInput([], [], []), "multimodal_positions", [0], None),
    (adaptrt.MultimodalInput([], [], []), "multimodal_lengths", [0], None),
    (adaptrt.CacheTransceiverConfig(), "max_tokens_in_buffer", 0, None),
    (adaptrt.CacheTransceiverConfig(), "kv_transfer_timeout_ms", 0, None),
    (adaptrt.SpeculativeDecodingFastLogitsInfo(), "draft_request_id", 0, 2**64 - 1),
    (adaptrt.SpeculativeDecodingFastLogitsInfo(), "draft_participant_id", -(2**31), 2**31 - 1),
    (adaptrt.ContextPhaseParams([], 0), "first_gen_tokens", [-(2**31)], [2**31 - 1]),
    (adaptrt.ContextPhaseParams([], 0), "req_id", 0, 2**64 - 1),
    (adaptrt.ContextPhaseParams([], 0), "draft_tokens", [-(2**31)], [2**31 - 1]),
    (adaptrt.ParallelConfig(), "device_ids", [0], None),
    (adaptrt.ParallelConfig(), "participant_ids", [0], None),
    (adaptrt.ParallelConfig(), "num_nodes", 1, None),
    (adaptrt.ExternalDraftTokensConfig([1]), "tokens", [-(2**31)], [2**31 - 1]),
    (LOOKAHEAD, "max_window_size", 1, None),
    (LOOKAHEAD, "max_ngram_size", 1, None),
    (LOOKAHEAD, "max_verification_set_size", 0, None),
    (adaptrt.EagleConfig(), "dynamic_tree_max_topK", 1, None),
]


@pytest.mark.parametrize(("options", "name", "least", "most"), LIMITS)
def test_numbers_are_accepted_up_to_their_limits(options: Any, name: str, least: Any, most: Any) -> None:
    def beyond(limit: Any, step: int) -> Any:
        return [limit[0] + step] if isinstance(limit, list) else limit + step

    options = copy.deepcopy(options)
    for accepted in (least, beyond(least, 2**70) if most is None else most):
        setattr(options, name, accepted)
        assert getattr(options, name) == accepted
    for refused in (beyond(least, -1), None if most is None else beyond(most, 1)):
        if refused is not None:
            with pytest.raises(TypeError, match=rf"\.{name} is {re.escape(str(refused))} .*; accepted: "):
                setattr(options, name, refused)
            assert getattr(options, name) == accepted


@pytest.mark.parametrize(
    "ranges",
    [[RANGE(0, 64, 10), RANGE(32, 128, 50)], [RANGE(0, None, 10), RANGE(64, 65, 10)], [RANGE(5, 5, 1)]],
    ids=["overlap", "after an open end", "empty"],
)
def test_ranges_that_make_no_sense(ranges: list[Any]) -> None:
    with pytest.raises(adaptrt.ConfigError, match=r"^KvCacheRetentionConfig: token_range_retention_configs"):
        adaptrt.KvCacheRetentionConfig(ranges)
    config = adaptrt.KvCacheRetentionConfig()
    config.token_range_retention_configs = ranges
    assert [problem for problem in config.validate() if problem.startswith("token_range_retention_configs")]


def test_older_names_of_retention() -> None:
    tokens = adaptrt.KvCacheRetentionConfig.TokenRangeRetentionPriority(0, 2, 30, 250)
    assert tokens.duration_ms == datetime.timedelta(milliseconds=250)
    assert adaptrt.KvCacheRetentionConfig([tokens]).token_range_retention_priorities == [tokens]


def test_decoding_modes() -> None:
    questions = {name for name in dir(Mode) if name.startswith("is")}
    answers = {
        "Auto": {"isAuto"}, "TopK": {"isTopK", "isTopKorTopP"}, "TopP": {"isTopP", "isTopKorTopP"},
        "TopKTopP": {"isTopK", "isTopP", "isTopKorTopP", "isTopKandTopP"}, "BeamSearch": {"isBeamSearch"},
        "Medusa": {"isMedusa"}, "Lookahead": {"isLookahead"}, "ExplicitDraftTokens": {"isExplicitDraftTokens"},
        "Eagle": {"isEagle"},
    }  # fmt: skip
    for name, expected in answers.items():
        mode = getattr(Mode, name)()
        assert {question for question in questions if getattr(mode, question)()} == expected
        assert pickle.loads(pickle.dumps(mode)) == mode
        assert [other for other in answers if getattr(Mode, other)() == mode] == [name]


@pytest.mark.parametrize(
    ("name", "value", "question"),
    [
        ("lookahead_decoding_config", LOOKAHEAD, "isLookahead"),
        ("medusa_choices", [[0, 0], [0, 1]], "isMedusa"),
        ("eagle_config", adaptrt.EagleConfig([[0, 0]]), "isEagle"),
    ],
)
def test_the_config_that_is_set_decides_the_decoding_mode(name: str, value: Any, question: str) -> None:
    for config in (adaptrt.DecodingConfig(**{name: value}), adaptrt.DecodingConfig(Mode.TopK())):
        setattr(config, name, value)
        assert config.decoding_mode is not None
        assert getattr(config.decoding_mode, question)()
        assert getattr(config, name) == value


def test_fields_keep_their_objects_and_the_executor_refuses_them_by_name() -> None:
    values: dict[str, Any] = {
        "parallel_config": adaptrt.ParallelConfig(), "debug_config": adaptrt.DebugConfig(),
        "spec_dec_config": adaptrt.SpeculativeDecodingConfig(),
        "cache_transceiver_config": adaptrt.CacheTransceiverConfig(max_tokens_in_buffer=8),
    }  # fmt: skip
    config = adaptrt.ExecutorConfig(**values)
    problems = config.validate()
    for name, value in values.items():
        assert getattr(config, name) is value
        assert any(problem.startswith(f"{name} is given ({type(value).__name__})") for problem in problems)
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    again.debug_config.debug_input_tensors = True
    assert again != config
    config.parallel_config = None
    assert config.parallel_config is None


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (adaptrt.DecodingConfig(), None),
        (adaptrt.DecodingConfig(Mode.Auto()), None),
        (adaptrt.DecodingConfig(lookahead_decoding_config=LOOKAHEAD), None),
        (adaptrt.DecodingConfig(Mode.TopKTopP()), "decoding_mode is TopKTopP; accepted: None, Auto or Lookahead"),
        (adaptrt.DecodingConfig(Mode.Lookahead()), "decoding_mode is Lookahead and lookahead_decoding_config None"),
        (adaptrt.DecodingConfig(medusa_choices=[[0]]), "medusa_choices is given; accepted: None"),
        (adaptrt.DecodingConfig(eagle_config=adaptrt.EagleConfig([[0, 1]])), "eagle_config is given; accepted: None"),
        (
            adaptrt.DecodingConfig(lookahead_decoding_config=adaptrt.LookaheadDecodingConfig(2, 1, 0)),
            "lookahead_decoding_config.max_window_size is 2 and max_ngram_size 1",
        ),
    ],
)
def test_decoding_configs_are_copied_and_checked(config: adaptrt.DecodingConfig, problem: str | None) -> None:
    executor_config = adaptrt.ExecutorConfig(decoding_config=config)
    assert executor_config.decoding_config == config
    assert pickle.loads(pickle.dumps(executor_config)) == executor_config
    problems = executor_config.validate()
    if problem is None:
        assert problems == []
    else:
        assert any(found.startswith(f"decoding_config.{problem}") for found in problems)
    config.lookahead_decoding_config = adaptrt.LookaheadDecodingConfig(9, 9, 9)
    assert executor_config.decoding_config != config


def test_a_mode_that_was_set_last_is_kept() -> None:
    config = adaptrt.DecodingConfig(lookahead_decoding_config=LOOKAHEAD)
    config.decoding_mode = Mode.TopK()
    copied = adaptrt.ExecutorConfig(decoding_config=config).decoding_config
    assert copied == config
    assert copied.decoding_mode.name == "TopK"


@pytest.mark.parametrize(
    ("make", "name", "accepted"),
    [
        (adaptrt.ExecutorConfig, "decoding_config", "DecodingConfig"),
        (lambda: adaptrt.Request([1], 1), "lookahead_config", "LookaheadDecodingConfig"),
        (lambda: adaptrt.Request([1], 1), "external_draft_tokens_config", "ExternalDraftTokensConfig"),
    ],
)
@pytest.mark.parametrize("value", [object(), 1, adaptrt.EagleConfig()])
def test_speculation_takes_its_own_classes(make: Any, name: str, accepted: str, value: Any) -> None:
    owner = make()
    with pytest.raises(TypeError, match=rf"^{type(owner).__name__}\.{name} is .*; accepted: None, {accepted}$"):
        setattr(owner, name, value)
    assert getattr(owner, name) is None


def test_configs_of_what_executors_do_are_copied_and_checked() -> None:
    guides = adaptrt.GuidedDecodingConfig(adaptrt.GuidedDecodingConfig.GuidedDecodingBackend.XGRAMMAR)
    processors = adaptrt.LogitsPostProcessorConfig({adaptrt.Request.BATCHED_POST_PROCESSOR_NAME: len})
    config = adaptrt.ExecutorConfig(guided_decoding_config=guides, logits_post_processor_config=processors)
    assert config.guided_decoding_config == guides
    assert config.logits_post_processor_config == processors
    assert pickle.loads(pickle.dumps(config)) == config
    problems = config.validate()
    assert any(problem.startswith("guided_decoding_config.backend is XGRAMMAR") for problem in problems)
    assert any(problem.startswith("logits_post_processor_config.processor_map has 'batched'") for problem in problems)
    config.guided_decoding_config = None
    config.logits_post_processor_config = None
    assert config.guided_decoding_config is None
    assert config == adaptrt.ExecutorConfig()


def test_post_processors_are_equal_as_their_functions_are() -> None:
    text = "text"
    assert adaptrt.LogitsPostProcessorConfig({"a": text.upper}) == adaptrt.LogitsPostProcessorConfig({"a": text.upper})
    assert adaptrt.LogitsPostProcessorConfig({"a": text.upper}) != adaptrt.LogitsPostProcessorConfig({"a": text.lower})
    assert adaptrt.LogitsPostProcessorConfig({"a": text.upper}) != adaptrt.LogitsPostProcessorConfig({"a": None})


def test_requests_keep_their_objects() -> None:
    values: dict[str, Any] = {"eagle_config": adaptrt.EagleConfig(), "logits_post_processor": len}
    request = adaptrt.Request([1], 1, **values)
    again = pickle.loads(pickle.dumps(request))
    for name, value in values.items():
        assert getattr(request, name) is value
        assert getattr(again, name) == value


def test_requests_copy_what_executors_do() -> None:
    values: dict[str, Any] = {
        "guided_decoding_params": adaptrt.GuidedDecodingParams(adaptrt.GuidedDecodingParams.GuideType.REGEX, "a+"),
        "kv_cache_retention_config": adaptrt.KvCacheRetentionConfig([RANGE(0, None, 80)]),
        "external_draft_tokens_config": adaptrt.ExternalDraftTokensConfig([1, 2, 3], np.ones((3, 2)), 0.5, True),
        "lookahead_config": LOOKAHEAD,
        "prompt_tuning_config": adaptrt.PromptTuningConfig(np.ones((3, 4), np.float32), [1]),
    }
    request = adaptrt.Request([1], 1, lora_config=adaptrt.LoraConfig(7), **values)
    again = pickle.loads(pickle.dumps(request))
    for name, value in values.items():
        assert getattr(request, name) == value
        assert getattr(again, name) == value
    taken = request.guided_decoding_params
    for name in (*values, "lora_config"):
        setattr(request, name, None)
        assert getattr(request, name) is None
    assert taken == values["guided_decoding_params"]


def test_types_of_what_executors_do_not_have() -> None:
    assert adaptrt.RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION.value == 0
    assert adaptrt.KvCacheTransferMode["GDS"].value == 1
    info = adaptrt.SpeculativeDecodingFastLogitsInfo()
    info.draft_request_id, info.draft_participant_id = 3, 5
    assert (info.draft_request_id, info.draft_participant_id) == (3, 5)
    info.draft_participant_id = 2**31 - 1  # int in the bindings
    info.draft_participant_id = -(2**31)
    assert info.draft_participant_id == -(2**31)
    result = adaptrt.Result()
    result.request_perf_metrics = adaptrt.RequestPerfMetrics()
    result.request_perf_metrics.last_iter = 33
    assert pickle.loads(pickle.dumps(result)).request_perf_metrics.last_iter == 33
    outputs = adaptrt.OutputConfig(additional_model_outputs=[adaptrt.AdditionalModelOutput("topKLogits", True)])
    assert pickle.loads(pickle.dumps(outputs)) == outputs
